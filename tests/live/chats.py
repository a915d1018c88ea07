"""Chats through a router with real engines behind it, and what to say in them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from prefixwatch.engines.process import free_port
from prefixwatch.engines.tiny_model import words
from prefixwatch.router.config import PolicyConfig, RouterConfig, WorkerConfig
from prefixwatch.stack.local.fleet import start_router

BLOCK = 32
"""Tokens in a block of the engines."""


@dataclass(slots=True)
class Answer:
    """One chat as the client saw it."""

    status: int = 0
    worker: str = ""
    predicted_tokens: int | None = None
    retries: int = 0
    cached_tokens: int | None = None
    tokens_seen: int = 0
    ttft_seconds: float | None = None
    error: str = ""
    done: bool = False
    location: str = ""
    """Where to ask again, of a 202."""


@dataclass(slots=True)
class Client:
    """Chats through the router."""

    url: str
    session: aiohttp.ClientSession
    streaming: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """By worker: set once it has sent the first token of an answer."""

    async def chat(self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **body: Any) -> Answer:
        answer = Answer()
        request = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | body
        sent = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/chat/completions", json=request, headers=headers) as response:
            answer.status = response.status
            answer.location = response.headers.get("Location", "")
            answer.worker = response.headers.get("x-prefixwatch-worker", "")
            answer.retries = int(response.headers.get("x-prefixwatch-retries", "0"))
            predicted = response.headers.get("x-prefixwatch-predicted-tokens")
            answer.predicted_tokens = None if predicted is None else int(predicted)
            async for line in response.content:
                self._read(line, answer, sent)
        return answer

    def _read(self, line: bytes, answer: Answer, sent: float) -> None:
        if line.startswith(b"data: [DONE]"):
            answer.done = True
        elif line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                answer.error = str(event["error"])
            if event.get("usage"):
                answer.cached_tokens = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
            if any(choice["delta"].get("content") for choice in event.get("choices", [])):
                answer.tokens_seen += 1
                if answer.ttft_seconds is None:
                    answer.ttft_seconds = time.perf_counter() - sent
                    self.streaming[answer.worker].set()


@contextlib.asynccontextmanager
async def routed(
    workers: Sequence[WorkerConfig], model_dir: Path, folder: Path, *, policy: str, **settings: Any
) -> AsyncIterator[Client]:
    """Chats through a fresh router with this policy and these further settings."""
    config = RouterConfig(
        port=free_port(),
        workers=list(workers),
        policy=PolicyConfig(name=policy, seed=1),
        model_dir=model_dir,
        block_size=BLOCK,
        **settings,
    )
    router = await start_router(config, folder)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            yield Client(f"http://127.0.0.1:{config.port}", session)
    finally:
        router.stop()


class Writer:
    """Conversations of plain words that nobody sent before."""

    def __init__(self, name: str) -> None:
        self._rng = random.Random(name)
        self._words = words()

    def text(self, tokens: int) -> str:
        return "".join(f" {word}" for word in self._rng.choices(self._words, k=tokens))

    def conversation(self, system: str, question_tokens: int = 60) -> list[dict[str, Any]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": self.text(question_tokens)}]
