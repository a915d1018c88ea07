"""A running OpenAI-compatible endpoint: how it is reached, and what it says of itself."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.scenario.secrets import bearer
from prefixwatch.loadgen.sending.served_tokenizer import ServedTokenizer
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import has_login, trusted

_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` with or without `/v1` at its end. Raises UsageError for one that can't be used."""

    url: str
    api_key_env: str = ""
    """Environment variable that holds its API key."""
    ca_file: Path | None = None
    """Certificates that its own is checked with; None: the system's."""
    tls: ssl.SSLContext | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if has_login("--target", self.url):
            raise UsageError(
                "--target: a password in the address would be in every result: give the address alone, and the name "
                "of an environment variable with the key as --api-key-env"
            )
        object.__setattr__(self, "tls", trusted(self.ca_file))

    def address(self, path: str) -> str:
        return f"{self.url.rstrip('/').removesuffix('/v1')}{path}"

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Raises InputError when the variable with the key isn't set."""
        connector = aiohttp.TCPConnector(ssl=self.tls if self.tls is not None else True)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        headers = bearer(self.api_key_env)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            yield session


async def served_model(endpoint: Endpoint, wanted: str | None = None) -> str:
    """The model that the endpoint lists under this name, or the first. Raises UsageError naming the endpoint and what
    it answered."""
    address = endpoint.address("/v1/models")
    try:
        async with endpoint.session() as session, session.get(address) as response:
            if response.status in (401, 403):
                raise UsageError(
                    f"--target: {address} answers {response.status}: name the environment variable that holds its API "
                    f"key as --api-key-env"
                )
            if response.status != 200:
                raise UsageError(f"--target: {address} answers {response.status}: is it an OpenAI-compatible endpoint?")
            listed = [str(model["id"]) for model in (await response.json(content_type=None)).get("data", [])]
    except aiohttp.ClientConnectorCertificateError as error:
        raise UsageError(
            f"--target: {address} has a certificate that can't be trusted ({error.certificate_error}): give the "
            f"certificates of its authority as --ca-file"
        ) from error
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, KeyError, TypeError) as error:
        why = str(error) or type(error).__name__
        raise UsageError(
            f"--target: {address} can't be read ({why}): start it first, or correct the address"
        ) from error
    if not listed:
        raise UsageError(f"--target: {address} lists no model")
    if wanted is not None and wanted not in listed:
        raise UsageError(f"--model {wanted}: {address} lists {', '.join(listed)}")
    return wanted or listed[0]


async def check_tokenizer(endpoint: Endpoint, model: str, model_dir: Path) -> None:
    """Where the endpoint has vLLM's `/tokenize`, see that it counts a prompt as the tokenizer in this folder does.

    Raises UsageError when it doesn't: every prompt would have another length than planned.
    """
    writer = PromptWriter(Tokenizer(model_dir))
    conversation = [("user", writer.alphabet.draw(200, "check"))]
    ours, theirs = len(writer.tokens(conversation)), await _counted(endpoint, model, writer.messages(conversation))
    if theirs is not None and theirs != ours:
        raise UsageError(
            f"--model-dir: its tokenizer counts {ours} tokens where {endpoint.url} counts {theirs}: give the folder of "
            f"the model that is served ({model})"
        )


def check_served_tokenizer(endpoint: Endpoint, model: str, tokenize_url: str | None) -> None:
    """See that prompts can be made with the endpoint's own `/tokenize`, or that of the engine named. Blocks.

    Raises PromptError or TokenizerError when they can't. The API key goes to the endpoint alone.
    """
    asked = (
        ServedTokenizer(tokenize_url, model)
        if tokenize_url
        else ServedTokenizer(endpoint.url, model, headers=bearer(endpoint.api_key_env), tls=endpoint.tls)
    )
    writer = PromptWriter(asked)
    writer.verify([("user", writer.alphabet.draw(200, "check"))])


async def _counted(endpoint: Endpoint, model: str, messages: list[dict[str, Any]]) -> int | None:
    """Tokens of a conversation as the endpoint counts them; None where it doesn't say."""
    body = {"model": model, "messages": messages}
    try:
        async with endpoint.session() as session, session.post(endpoint.address("/tokenize"), json=body) as response:
            answer = await response.json(content_type=None) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    count = answer.get("count") if isinstance(answer, dict) else None
    return count if isinstance(count, int) else None
