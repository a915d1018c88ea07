"""Router and exporter in front of two real vLLM engines: what they predict and count is what the engines did."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engines.fleet import EngineHandle
from engines.process import free_port
from engines.tiny_model import words
from exporters.app import running
from exporters.config import ExporterConfig, TargetConfig
from kvcache.blocks import block_hashes, namespace_root
from kvcache.index import BlockIndex
from kvcache.tokenizer import Tokenizer
from router.config import CacheViewConfig, PolicyConfig, RouterConfig
from stack.fleet import as_workers, start_router

pytestmark = pytest.mark.vllm

BLOCK = 32
HIT_AT_MOST_OF_MISS = 0.5
"""TTFT of a 2,000-token hit as a share of a miss's; 0.08 was measured, the margin is for noisy neighbours."""


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


@dataclass(slots=True)
class Client:
    """Chats through the router."""

    url: str
    session: aiohttp.ClientSession
    first_token: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, messages: list[dict[str, Any]], **body: Any) -> Answer:
        answer = Answer()
        request = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | body
        sent = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/chat/completions", json=request) as response:
            answer.status = response.status
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
                    self.first_token.set()


@pytest_asyncio.fixture
async def client(engines: list[EngineHandle], model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    """A fresh `cache_aware` router, fed by the engines' KV events."""
    config = RouterConfig(
        port=free_port(),
        workers=as_workers(engines),
        policy=PolicyConfig(name="cache_aware", seed=1),
        model_dir=model_dir,
        block_size=BLOCK,
        cache_view=CacheViewConfig(source="events"),
    )
    router = await start_router(config, tmp_path)
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


@pytest.fixture
def writer(request: pytest.FixtureRequest) -> Writer:
    return Writer(request.node.nodeid)


async def test_reported_hits_are_what_block_hashes_predict(
    client: Client, writer: Writer, tokenizer: Tokenizer
) -> None:
    """The index here is filled with our own hashes only; the router's is fed by the engines' events."""
    ours = BlockIndex()
    systems = [writer.text(n) for n in (300, 700, 1500)]
    hits = 0
    for turn in range(12):
        messages = writer.conversation(systems[turn % 3])
        tokens = tokenizer.encode_chat(messages)
        blocks = block_hashes(tokens, BLOCK, root=namespace_root("acme"))
        answer = await client.chat(messages, cache_salt="acme")
        expected = ours.depths(blocks).get(answer.worker, 0) * BLOCK
        assert answer.cached_tokens is not None
        assert abs(answer.cached_tokens - expected) <= BLOCK
        assert answer.predicted_tokens is not None
        assert abs(answer.cached_tokens - answer.predicted_tokens) <= BLOCK
        ours.store(answer.worker, blocks.tolist())
        hits += answer.cached_tokens > 0
        await asyncio.sleep(0.05)  # the engine publishes its events after the answer
    assert hits >= 9  # every prompt after the first of its three openings


async def test_a_hit_answers_sooner_than_a_miss(client: Client, writer: Writer) -> None:
    misses: list[float] = []
    hits: list[float] = []
    for _ in range(5):
        messages = writer.conversation(writer.text(2000))
        for seconds in (misses, hits):
            answer = await client.chat(messages)
            assert answer.ttft_seconds is not None
            seconds.append(answer.ttft_seconds)
    assert statistics.median(hits) < HIT_AT_MOST_OF_MISS * statistics.median(misses)


async def test_another_salt_never_hits(client: Client, writer: Writer) -> None:
    messages = writer.conversation(writer.text(600))
    await client.chat(messages, cache_salt="acme")
    again = await client.chat(messages, cache_salt="acme")
    assert again.cached_tokens
    for salt in ("globex", "initech"):
        other = await client.chat(messages, cache_salt=salt)
        assert (other.cached_tokens, other.predicted_tokens) == (0, 0)


async def test_the_exporter_counts_the_tokens_that_engines_report(
    client: Client, writer: Writer, engines: list[EngineHandle]
) -> None:
    settings = ExporterConfig(
        targets=tuple(TargetConfig(name=engine.name, url=engine.url) for engine in engines), listen="127.0.0.1:0"
    )
    async with running(settings) as exporter:
        await exporter.scrape_all()
        before = _hit_tokens(exporter.targets)
        system = writer.text(800)
        answers = [await client.chat(writer.conversation(system)) for _ in range(8)]
        await asyncio.sleep(0.5)  # vLLM logs its statistics after the step
        await exporter.scrape_all()
        counted = _hit_tokens(exporter.targets) - before
    reported = sum(answer.cached_tokens or 0 for answer in answers)
    assert reported > 0
    assert counted == reported


async def test_killing_an_engine_loses_no_request_that_had_not_begun_to_stream(
    client: Client, writer: Writer, engines: list[EngineHandle]
) -> None:
    async def one(position: int) -> Answer:
        await asyncio.sleep(0.1 * position)
        return await client.chat(writer.conversation(writer.text(400)), max_tokens=80, ignore_eos=True)

    async def kill_once_streaming() -> None:
        await client.first_token.wait()
        await asyncio.sleep(0.7)
        await asyncio.to_thread(engines[0].process.kill)

    killing = asyncio.create_task(kill_once_streaming())
    answers = await asyncio.gather(*(one(position) for position in range(20)))
    await killing
    lost = [answer for answer in answers if not answer.tokens_seen]
    cut = [answer for answer in answers if answer.tokens_seen and answer.error]
    whole = [answer for answer in answers if answer.done and not answer.error]
    assert lost == []
    assert len(cut) + len(whole) == 20
    assert all(answer.worker == engines[0].name and not answer.done for answer in cut)
    assert cut, "the engine was killed while nothing streamed from it: the test showed nothing"
    with pytest.raises(Exception, match=f"{engines[0].name} was killed by SIGKILL"):
        engines[0].process.check()


def _hit_tokens(targets: Any) -> float:
    totals = [target.store.total("prefix_hit_tokens") for target in targets]
    assert all(total is not None for total in totals)
    return float(sum(totals))
