"""What a running OpenAI-compatible endpoint says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from kvcache.tokenizer import Tokenizer
from loadgen.prompts import PromptWriter
from stack.errors import UsageError

_TIMEOUT_SECONDS = 10.0


async def served_model(url: str) -> str:
    """The first model that the endpoint lists. Raises UsageError naming the endpoint and what it answered."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--target {url}: give it as http://HOST:PORT")
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)) as session,
            session.get(address) as response,
        ):
            if response.status != 200:
                raise UsageError(f"--target: {address} answers {response.status}: is it an OpenAI-compatible endpoint?")
            models = (await response.json(content_type=None)).get("data", [])
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
        why = str(error) or type(error).__name__
        raise UsageError(
            f"--target: {address} can't be read ({why}): start it first, or correct the address"
        ) from error
    if not models:
        raise UsageError(f"--target: {address} lists no model")
    return str(models[0]["id"])


async def check_tokenizer(url: str, model: str, model_dir: Path) -> None:
    """Where the endpoint has vLLM's `/tokenize`, see that it counts a prompt as the tokenizer in this folder does.

    Raises UsageError when it doesn't: every prompt would have another length than planned.
    """
    writer = PromptWriter(Tokenizer(model_dir))
    conversation = [("user", writer.alphabet.draw(200, "check"))]
    ours, theirs = len(writer.tokens(conversation)), await _counted(url, model, writer.messages(conversation))
    if theirs is not None and theirs != ours:
        raise UsageError(
            f"--model-dir: its tokenizer counts {ours} tokens where {url} counts {theirs}: give the folder of the "
            f"model that is served ({model})"
        )


async def _counted(url: str, model: str, messages: list[dict[str, Any]]) -> int | None:
    """Tokens of a conversation as the endpoint counts them; None where it doesn't say."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/tokenize"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)) as session,
            session.post(address, json={"model": model, "messages": messages}) as response,
        ):
            answer = await response.json(content_type=None) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    count = answer.get("count") if isinstance(answer, dict) else None
    return count if isinstance(count, int) else None
