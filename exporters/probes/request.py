"""One probe: a streamed request to an OpenAI-compatible endpoint, and what its answer told."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

Outcome = Literal["completed", "refused", "rejected", "failed", "timed_out"]

_MAX_BODY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """How a probe went; what the endpoint didn't tell is None."""

    outcome: Outcome
    detail: str = ""
    ttft_seconds: float | None = None
    """To the first content; None where nothing was streamed."""
    e2e_seconds: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


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
    """Sends it and reads the answer to its end; never raises for what the endpoint does."""
    watch = _Watch()
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            session.post(url, json=body, headers=headers, ssl=tls, allow_redirects=False) as response,
        ):
            if response.status != 200:
                said = (await response.content.read(300)).decode(errors="replace")
                return watch.ended(_outcome_of_status(response.status), f"HTTP {response.status}: {said}")
            await _read(response, watch)
    except TimeoutError:
        return watch.ended("timed_out", f"no complete answer within {timeout_seconds:g} s")
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        return watch.ended("failed", f"{type(error).__name__}: {error}"[:300])
    if watch.error:
        return watch.ended("failed", watch.error)
    return watch.ended("completed") if watch.finished else watch.ended("failed", "the stream was cut off")


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
            listed = json.loads(await _whole(response))
            return str(listed["data"][0]["id"]) if response.status == 200 else None
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, LookupError, TypeError):
        return None


class _Watch:
    """Times and counts of one answer as its events go by."""

    def __init__(self) -> None:
        self._sent = perf_counter()
        self._first: float | None = None
        self._usage = _Usage()
        self.finished = False
        self.error = ""

    def event(self, payload: bytes, at: float) -> None:
        if payload == b"[DONE]":
            self.finished = True
            return
        event = _decode(payload)
        if event.error is not None:
            self.error = f"the stream brought an error: {str(event.error)[:200]}"
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            if self._first is None and (_content(choice) or choice.finish_reason):
                self._first = at
            self.finished = self.finished or bool(choice.finish_reason)

    def whole(self, body: bytes) -> None:
        """An answer that wasn't streamed: no time to first token."""
        event = _decode(body)
        self._usage = event.usage or self._usage
        self.error = str(event.error)[:200] if event.error is not None else ""
        self.finished = bool(event.choices)

    def ended(self, outcome: Outcome, detail: str = "") -> ProbeAnswer:
        first, usage = self._first, self._usage
        known = first is not None and outcome == "completed"
        return ProbeAnswer(
            outcome=outcome,
            detail=detail,
            ttft_seconds=first - self._sent if first is not None and known else None,
            e2e_seconds=perf_counter() - self._sent,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
            output_tokens=usage.completion_tokens,
        )


async def _read(response: aiohttp.ClientResponse, watch: _Watch) -> None:
    """Raises ValueError for what is neither an event stream nor an answer."""
    if response.content_type == "application/json":
        watch.whole(await _whole(response))
        return
    async for line in response.content:  # raises HttpProcessingError for a line without an end
        if line.startswith(b"data:"):
            watch.event(line[5:].strip(), perf_counter())


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, in however many pieces it comes. Raises ValueError for one that is too large."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise ValueError(f"an answer of more than {_MAX_BODY_BYTES} bytes")
    return bytes(body)


def _content(choice: _Choice) -> bool:
    delta = choice.delta or {}
    return bool(choice.text or any(delta.get(name) for name in ("content", "reasoning", "reasoning_content")))


def _outcome_of_status(status: int) -> Outcome:
    if status in (429, 503):
        return "refused"
    return "rejected" if 400 <= status < 500 else "failed"
