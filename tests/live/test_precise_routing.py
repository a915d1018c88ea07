"""`llmd_precise`, fed by the KV events of two real vLLM engines: what it predicts is what the engines deliver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.router.config import CacheViewConfig, HealthConfig, PolicyConfig, RouterConfig, WorkerConfig
from prefixwatch.stack.local.fleet import as_workers, start_router
from tests.live.chats import Answer, Client, Writer

pytestmark = pytest.mark.vllm

BLOCK = 32
SESSIONS, TURNS, TURN_TOKENS = 4, 30, 200
TURNS_BEFORE_A_NEW_CONVERSATION = 6
EVENT_TIMEOUT_SECONDS = 2.0
"""How long the router waits for an engine's answer to a replay."""
THINKING_SECONDS = 0.5
"""Between an answer and the next turn; the engine publishes its events after the answer, on a busy core later still."""

Start = Callable[[Sequence[WorkerConfig]], Awaitable[Client]]


@pytest_asyncio.fixture
async def start(model_dir: Path, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts the router in front of these engines."""
    routers: list[ManagedProcess] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def begin(workers: Sequence[WorkerConfig]) -> Client:
            config = RouterConfig(
                port=free_port(),
                workers=list(workers),
                policy=PolicyConfig(name="llmd_precise", seed=1),
                model_dir=model_dir,
                block_size=BLOCK,
                cache_view=CacheViewConfig(source="events", audit_share=1.0),
                health=HealthConfig(interval_seconds=0.5),
            )
            routers.append(await start_router(config, tmp_path))
            return Client(f"http://127.0.0.1:{config.port}", session)

        yield begin
        for router in routers:
            router.stop()


class Metrics:
    """The router's own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def value(self, name: str, **labels: str) -> float:
        """0 where there is no such sample."""
        async with self._client.session.get(f"{self._client.url}/metrics") as response:
            text = await response.text()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == f"prefixwatch_router_{name}" and s.labels == labels)

    async def until(self, name: str, worker: str, reached: Callable[[float], bool], seconds: float) -> None:
        """Fails the test after `seconds`."""
        begun = time.monotonic()
        while not reached(last := await self.value(name, worker=worker)):
            assert time.monotonic() - begun < seconds, f"{name} of {worker} is still {last} after {seconds} s"
            await asyncio.sleep(0.02)


def misjudged(answers: Sequence[Answer]) -> list[tuple[str, int | None, int | None]]:
    """Worker, predicted and delivered tokens of the answers where these differ by more than a block."""
    return [
        (answer.worker, answer.predicted_tokens, answer.cached_tokens)
        for answer in answers
        if answer.predicted_tokens is None
        or answer.cached_tokens is None
        or abs(answer.predicted_tokens - answer.cached_tokens) > BLOCK
    ]


async def converse(client: Client, writer: Writer, system: str) -> list[Answer]:
    """One session: conversations that open with the same text, turn upon turn."""
    answers: list[Answer] = []
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        if turn % TURNS_BEFORE_A_NEW_CONVERSATION == 0:
            messages = [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": writer.text(TURN_TOKENS)})
        answers.append(await client.chat(messages, max_tokens=3))
        messages.append({"role": "assistant", "content": writer.text(3)})
        await asyncio.sleep(THINKING_SECONDS)
    return answers


async def test_predictions_are_what_the_engines_deliver(
    start: Start, writer: Writer, engines: list[EngineHandle]
) -> None:
    """Conversations over a cache too small for all of them, so that blocks are evicted and removed as well."""
    client = await start(as_workers(engines))
    metrics = Metrics(client)
    systems = [writer.text(tokens) for tokens in (300, 450, 600, 750)]
    for system in systems:
        await client.chat(writer.conversation(system))
        await asyncio.sleep(THINKING_SECONDS)
    sessions = await asyncio.gather(*(converse(client, writer, systems[k]) for k in range(SESSIONS)))
    answers = [answer for session in sessions for answer in session]
    wrong = misjudged(answers)
    hits = [answer for answer in answers if (answer.cached_tokens or 0) >= 300 // BLOCK * BLOCK]
    removed = [await metrics.value("kv_events_removed_blocks_total", worker=engine.name) for engine in engines]
    audited = await metrics.value("index_audited_lookups_total")
    holes = [await metrics.value("index_prefix_holes_total", worker=engine.name) for engine in engines]
    print(
        f"{len(answers)} requests, {len(hits)} hits, {len(wrong)} misjudged {wrong}; "
        f"blocks removed {removed}; {audited:g} lookups audited, {holes} holes"
    )
    assert len(answers) >= 100
    assert len(hits) > 0.9 * len(answers)
    assert len(wrong) <= 0.01 * len(answers), wrong
    assert {answer.worker for answer in answers} == {engine.name for engine in engines}
    assert sum(removed) > 0
    assert audited == len(answers) + len(systems)
    assert holes == [0, 0]


async def test_a_killed_and_restarted_engine_is_known_to_be_empty(
    start: Start, writer: Writer, engines: list[EngineHandle]
) -> None:
    """sgl-project/sglang#39822 (RT17)"""
    client = await start(as_workers(engines))
    metrics, victim = Metrics(client), engines[0].name
    chats = [writer.conversation(writer.text(300)) for _ in range(12)]
    before = [await client.chat(chat) for chat in chats]
    lost = [chat for chat, answer in zip(chats, before, strict=True) if answer.worker == victim]
    await metrics.until("believed_blocks", victim, lambda blocks: blocks >= len(lost) * 300 // BLOCK, 2)

    killed_at = time.monotonic()
    await asyncio.to_thread(engines[0].process.kill)
    await metrics.until("believed_blocks", victim, lambda blocks: blocks == 0, EVENT_TIMEOUT_SECONDS)
    cleared_seconds = time.monotonic() - killed_at
    engines[0] = await fleet.restart(engines[0])
    await metrics.until("worker_up", victim, lambda up: up == 1, 5)

    again = [await client.chat(chat) for chat in lost]
    print(f"blocks cleared after {cleared_seconds:.2f} s; {[(a.worker, a.predicted_tokens) for a in again]}")
    assert cleared_seconds < EVENT_TIMEOUT_SECONDS
    assert [(answer.predicted_tokens, answer.cached_tokens) for answer in again] == [(0, 0)] * len(lost)
    assert victim in {answer.worker for answer in again}
    await asyncio.sleep(THINKING_SECONDS)
    third = [await client.chat(chat) for chat in lost]
    assert misjudged(third) == []
    assert all((answer.predicted_tokens or 0) >= 300 // BLOCK * BLOCK for answer in third)


class LossyRelay:
    """Stands between an engine's event feed and the router; the engine's replay is not its business."""

    def __init__(self, source: str, endpoint: str) -> None:
        context = zmq.asyncio.Context.instance()
        self._engine, self._router = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._engine.subscribe(b"")
        self._engine.connect(source)
        self._router.bind(endpoint)
        self.swallow_next = False
        self.swallowed: list[int] = []

    async def run(self) -> None:
        while True:
            message = await self._engine.recv_multipart()
            if self.swallow_next:
                self.swallow_next = False
                self.swallowed.append(int.from_bytes(message[-2], "big"))
            else:
                await self._router.send_multipart(message)

    def close(self) -> None:
        self._engine.close(linger=0)
        self._router.close(linger=0)


@pytest_asyncio.fixture
async def relay(engines: list[EngineHandle]) -> AsyncIterator[LossyRelay]:
    relay = LossyRelay(engines[0].kv_events_endpoint, f"{engines[0].kv_events_endpoint}.relay")
    passing_on = asyncio.create_task(relay.run())
    yield relay
    passing_on.cancel()
    await asyncio.wait([passing_on])
    relay.close()


async def test_a_lost_event_is_replayed(
    start: Start, writer: Writer, engines: list[EngineHandle], relay: LossyRelay
) -> None:
    """llm-d/llm-d-router#1737, kvcache-ai/Mooncake#3616 (RT14): unnoticed, the index drifts for good."""
    [worker] = as_workers(engines[:1])
    client = await start([worker.model_copy(update={"kv_events": (f"{worker.kv_events[0]}.relay",)})])
    metrics = Metrics(client)
    await metrics.until("kv_events_connected", worker.name, lambda connected: connected == 1, 5)
    first, hidden, next_one = (writer.conversation(writer.text(300)) for _ in range(3))
    await client.chat(first)
    await metrics.until("believed_blocks", worker.name, lambda blocks: blocks >= 300 // BLOCK, 2)

    async def counted(name: str) -> float:
        return await metrics.value(f"kv_events_{name}_total", worker=worker.name)

    missed, replayed, cleared = [await counted(name) for name in ("missed_batches", "replayed_batches", "cleared")]
    relay.swallow_next = True
    await client.chat(hidden)
    await client.chat(next_one)
    await metrics.until(
        "kv_events_replayed_batches_total", worker.name, lambda count: count > replayed, EVENT_TIMEOUT_SECONDS
    )
    assert len(relay.swallowed) == 1
    assert await counted("missed_batches") == missed + 1
    assert await counted("cleared") == cleared
    await asyncio.sleep(THINKING_SECONDS)
    answers = [await client.chat(chat) for chat in (first, hidden, next_one)]
    print(f"batch {relay.swallowed} swallowed; {[(a.predicted_tokens, a.cached_tokens) for a in answers]}")
    assert [answer.predicted_tokens for answer in answers] == [answer.cached_tokens for answer in answers]
    assert all((answer.cached_tokens or 0) >= 300 // BLOCK * BLOCK for answer in answers)
