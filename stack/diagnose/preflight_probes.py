"""Small chats that a preflight sends, and what engines' tokenizers say: the facts that only asking gives."""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Any

import aiohttp

from prefixwatch.engines.tiny_model import words
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.openai_api.answer import Answer, AnswerOutcome
from prefixwatch.stack.config import PrefixwatchConfig
from prefixwatch.stack.diagnose.preflight import ProbeFacts
from prefixwatch.stack.local.targets import Endpoint, served_model

ROUNDS = 3
_WORDS = 600
_PAUSE_SECONDS = 1.1
"""Longer than a template's clock ticks."""
_TIMEOUT_SECONDS = 60.0
_TENANTS = ("preflight-a", "preflight-b")


async def probe(target: str, tenants: tuple[str, str] = _TENANTS, *, tenant_header: str = "x-tenant-id") -> ProbeFacts:
    """Send about ten chats of a token each. Raises UsageError when the target doesn't list a model."""
    base = target.rstrip("/").removesuffix("/v1")
    model = await served_model(Endpoint(base))
    vocabulary, rng = words(), random.Random(secrets.randbits(64))
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def chat(opening: list[str], tenant: str) -> Answer:
            headers = {tenant_header: tenant, "x-session-id": f"preflight-{tenant}"}
            return await _send(session, base, model, " ".join(opening), headers)

        repeats, others, cold = [], [], []
        halves: list[Answer] = []
        for _ in range(ROUNDS):
            opening = rng.choices(vocabulary, k=_WORDS)
            cold.append(await chat(opening, tenants[0]))
            await asyncio.sleep(_PAUSE_SECONDS)
            repeats.append(await chat(opening, tenants[0]))
            half = opening[: _WORDS // 2] + rng.choices(vocabulary, k=_WORDS // 2)
            halves.append(await chat(half, tenants[0]))
            others.append(await chat(opening, tenants[1]))
    return ProbeFacts(
        problem="" if repeats[0].usage.cached_tokens is not None else "the target doesn't report cached tokens",
        prompt_tokens=repeats[0].usage.prompt_tokens,
        repeat_cached_tokens=_most(repeats),
        half_cached_tokens=_most(halves),
        other_tenant_cached_tokens=_most(others),
        tenants=tenants,
        uncached_answered=all(answer.outcome is AnswerOutcome.COMPLETED for answer in cold),
    )


async def compare_tokens(config: PrefixwatchConfig) -> tuple[bool | None, str]:
    """Whether every engine tokenises a chat as the configured model folder does, and the evidence."""
    folder, workers = config.tokenizer.model_dir, config.fleet.targets
    if folder is None or not workers:
        return None, "needs --config with fleet.targets and tokenizer.model_dir"
    messages = [
        {"role": "system", "content": "Answer briefly. Café, 東京, 1 000 €."},
        {"role": "user", "content": "Which  of these is a city?\n"},
    ]
    expected = [int(token) for token in Tokenizer(folder).encode_chat(messages)]
    silent, different = [], []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)) as session:
        for worker in workers:
            tokens = await _tokenize(session, worker.url, messages)
            if tokens is None:
                silent.append(worker.name)
            elif tokens != expected:
                different.append(f"{worker.name} ({len(tokens)} tokens for {len(expected)} of {folder.name})")
    if different:
        return False, f"other tokens for the same chat: {', '.join(different)}"
    if len(silent) == len(workers):
        return None, "no engine has a /tokenize that takes chats"
    said = f"{len(workers) - len(silent)} of {len(workers)} engines give the same tokens for a chat as {folder.name}"
    return True, said


async def _send(session: aiohttp.ClientSession, base: str, model: str, opening: str, headers: dict[str, str]) -> Answer:
    messages = [{"role": "system", "content": opening}, {"role": "user", "content": "Go on."}]
    body = {"model": model, "messages": messages, "max_tokens": 1}
    try:
        async with session.post(f"{base}/v1/chat/completions", json=body, headers=headers) as response:
            answer = Answer(response.status, response.headers.get("Content-Type", ""))
            async for piece in response.content.iter_any():
                answer.feed(piece)
            answer.end()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return Answer(status=0)
    return answer


async def _tokenize(session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]) -> list[int] | None:
    try:
        async with session.post(f"{url}/tokenize", json={"messages": messages}) as response:
            body: dict[str, Any] = await response.json(content_type=None)
            return [int(token) for token in body["tokens"]]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        return None


def _most(answers: list[Answer]) -> int | None:
    return max(
        (answer.usage.cached_tokens for answer in answers if answer.usage.cached_tokens is not None), default=None
    )
