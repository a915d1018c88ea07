"""One probe: a streamed request to an OpenAI-compatible endpoint, and the times and counts of its answer."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from prefixwatch.openai_api.answer import Answer

Outcome = Literal["completed", "refused", "rejected", "failed", "timed_out"]

_MAX_BODY_BYTES = 1024 * 1024
_CUT = "the stream was cut off"


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """How a probe went. What the endpoint doesn't report is None."""

    outcome: Outcome
    detail: str = ""
    ttft_seconds: float | None = None
    """To the first content; None where nothing was streamed."""
    e2e_seconds: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


def probe_body(api: str, model: str, prompt: str, max_output_tokens: int, salt: str | None) -> dict[str, Any]:
    """The request for a prompt."""
    asked = {"prompt": prompt} if api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": model, "max_tokens": max_output_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return body | asked | ({"cache_salt": salt} if salt else {})


async def send_probe(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str],
    tls: ssl.SSLContext | bool,
    timeout_seconds: float,
) -> ProbeAnswer:
    """Send it and read the answer to its end. Never raises for what the endpoint does."""
    sent, answer, first = perf_counter(), Answer(), None

    def ended(outcome: Outcome, detail: str = "") -> ProbeAnswer:
        ttft = first - sent if first is not None and outcome == "completed" else None
        return ProbeAnswer(outcome, detail, ttft, perf_counter() - sent, *answer.usage)

    try:
        async with (
            asyncio.timeout(timeout_seconds),
            session.post(url, json=body, headers=headers, ssl=tls, allow_redirects=False) as response,
        ):
            answer = Answer(response.status, response.headers.get("Content-Type", ""))
            if response.status != 200:
                said = (await response.content.read(300)).decode(errors="replace")
                return ended(answer.outcome.value, f"HTTP {response.status}: {said}")
            async for piece in _pieces(response):
                content = answer.feed(piece)
                if first is None and (content or answer.finished):
                    first = perf_counter()
            answer.end()
    except TimeoutError:
        return ended("timed_out", f"no complete answer within {timeout_seconds:g} s")
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        return ended("failed", f"{type(error).__name__}: {error}"[:300])
    return ended(answer.outcome.value, answer.error.text if answer.error else _CUT if not answer.complete else "")


async def first_model(
    session: aiohttp.ClientSession,
    url: str,
    *,
    headers: Mapping[str, str],
    tls: ssl.SSLContext | bool,
    timeout_seconds: float,
) -> str | None:
    """The first model that the endpoint lists; None when it lists none. Also warms up the connection."""
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            session.get(f"{url}/v1/models", headers=headers, ssl=tls, allow_redirects=False) as response,
        ):
            listed = json.loads(b"".join([piece async for piece in _pieces(response)]))
            return str(listed["data"][0]["id"]) if response.status == 200 else None
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, LookupError, TypeError):
        return None


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises ValueError for one that is too large."""
    total = 0
    async for piece in response.content.iter_any():
        total += len(piece)
        if total > _MAX_BODY_BYTES:
            raise ValueError(f"an answer of more than {_MAX_BODY_BYTES} bytes")
        yield piece
