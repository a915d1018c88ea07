"""The socket side of KV events, against a small publisher that speaks as vLLM's does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from prefixwatch.kvcache.events.feed import Applied, WorkerFeed
from prefixwatch.kvcache.events.subscriber import KvEventSubscriber
from prefixwatch.kvcache.index.block_index import BlockIndex

PROMPT = list(range(1, 161))
TIMEOUT_SECONDS = 10.0


class FakeEngine:
    """An event publisher with a replay buffer. `subscribed` is set when a subscriber has arrived."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, *, connects: bool = False, topic: str = "kv@w"
    ) -> None:
        context = zmq.asyncio.Context.instance()
        self.topic = topic.encode()
        self.pub = context.socket(zmq.XPUB)
        (self.pub.connect if connects else self.pub.bind)(endpoint)
        self.buffer: list[bytes] = []
        self.replays_asked: list[int] = []
        self.subscribed = asyncio.Event()
        self.replay_asked = asyncio.Event()
        self.tasks = [asyncio.create_task(self._await_subscribers())]
        self.router: zmq.asyncio.Socket | None = None
        if replay_endpoint is not None:
            self.router = context.socket(zmq.ROUTER)
            self.router.bind(replay_endpoint)
            self.tasks.append(asyncio.create_task(self._serve_replays(self.router)))

    async def publish(self, payload: bytes, *, lose: bool = False) -> None:
        self.buffer.append(payload)
        if not lose:
            sequence = (len(self.buffer) - 1).to_bytes(8, "big")
            await self.pub.send_multipart([self.topic, sequence, payload])

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.pub.close(linger=0)
        if self.router is not None:
            self.router.close(linger=0)

    async def _await_subscribers(self) -> None:
        while True:
            if (await self.pub.recv()).startswith(b"\x01"):
                self.subscribed.set()

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            identity, _, start = await router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replays_asked.append(first)
            self.replay_asked.set()
            for sequence, payload in enumerate(self.buffer):
                if sequence >= first:
                    await router.send_multipart([identity, b"", self.topic, sequence.to_bytes(8, "big"), payload])
            await router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])


class Rig:
    """An engine, a subscriber in its own task, and the blocks it believes in."""

    def __init__(self, folder: Path, wire: Any) -> None:
        self.wire = wire
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/kv", f"ipc://{folder}/kvr"
        self.index = BlockIndex()
        self.feed = WorkerFeed("w", self.index)
        self.changes: asyncio.Queue[Applied] = asyncio.Queue()
        self.engines: list[FakeEngine] = []
        self.task: asyncio.Task[None] | None = None

    def engine(self, *, replay: bool = True) -> FakeEngine:
        engine = FakeEngine(self.endpoint, self.replay_endpoint if replay else None)
        self.engines.append(engine)
        return engine

    def subscribe(self, *, replay: bool = True, **options: Any) -> KvEventSubscriber:
        endpoint = options.pop("endpoint", self.endpoint)
        subscriber = KvEventSubscriber(
            "w",
            endpoint,
            self.replay_endpoint if replay else None,
            self.feed,
            on_applied=self.changes.put_nowait,
            **options,
        )
        self.task = asyncio.create_task(subscriber.run())
        return subscriber

    def block(self, position: int, **fields: Any) -> bytes:
        tokens = PROMPT[16 * position : 16 * (position + 1)]
        parent = 100 + position - 1 if position else None
        return bytes(self.wire.batch(self.wire.stored([100 + position], tokens, parent, **fields)))

    async def until(self, believed: Callable[[], bool]) -> None:
        """Wait for changes until the condition holds."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not believed():
                await self.changes.get()

    async def blocks(self, count: int) -> None:
        await self.until(lambda: self.index.block_count("w") == count)

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        for engine in self.engines:
            await engine.close()


@pytest.fixture
async def rig(tmp_path: Path, wire: Any) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, wire)
    yield rig
    await rig.close()


async def test_a_late_subscriber_learns_what_is_cached_already(rig: Rig) -> None:
    engine = rig.engine()
    for position in range(3):
        await engine.publish(rig.block(position))
    subscriber = rig.subscribe()
    await rig.blocks(3)
    assert (subscriber.last_sequence, subscriber.lag_seconds) == (2, None)
    await engine.subscribed.wait()
    await engine.publish(rig.block(3))
    await rig.blocks(4)
    assert engine.replays_asked == [0]
    assert rig.feed.counters.replayed_batches == 3


async def test_a_gap_is_filled_from_the_replay(rig: Rig) -> None:
    """llm-d/llm-d-router#1737 (RT14)"""
    engine = rig.engine()
    rig.subscribe()
    await engine.subscribed.wait()
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    await engine.publish(rig.block(1), lose=True)
    await engine.publish(rig.block(2), lose=True)
    await engine.publish(rig.block(3))
    await rig.blocks(4)
    assert rig.feed.counters.missed_batches == 2
    assert engine.replays_asked[-1] == 0  # the last batch known, to see that it is still the same engine


async def test_a_gap_without_a_replay_clears_the_worker(rig: Rig) -> None:
    """llm-d/llm-d-router#1737 (RT14)"""
    engine = rig.engine(replay=False)
    rig.subscribe(replay=False)
    await engine.subscribed.wait()
    await engine.publish(rig.block(0))
    await engine.publish(rig.block(1))
    await rig.blocks(2)
    await engine.publish(rig.block(2), lose=True)
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    assert (rig.feed.counters.missed_batches, rig.feed.last_sequence) == (1, 3)


async def test_a_replay_that_does_not_answer_clears_the_worker(rig: Rig) -> None:
    engine = rig.engine(replay=False)
    subscriber = rig.subscribe(replay_timeout_seconds=0.05)
    await engine.subscribed.wait()
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    await engine.publish(rig.block(1), lose=True)
    await engine.publish(rig.block(0))
    await rig.until(lambda: rig.feed.last_sequence == 2)
    assert rig.index.block_count("w") == 1
    assert subscriber.replays_failed == 2  # on joining, and at the gap


async def test_a_restarted_engine_is_noticed_before_it_says_anything(rig: Rig) -> None:
    """sgl-project/sglang#39822 (RT17)"""
    engine = rig.engine()
    for position in range(3):
        await engine.publish(rig.block(position))
    rig.subscribe()
    await rig.blocks(3)
    await engine.close()
    second = rig.engine()
    await second.subscribed.wait()
    await second.replay_asked.wait()
    await second.publish(rig.block(0))
    await rig.blocks(1)
    assert (rig.feed.counters.restarts, rig.feed.last_sequence) == (1, 0)
    assert second.replays_asked == [2, 0]


async def test_a_broken_connection_without_a_replay_clears_the_worker(rig: Rig) -> None:
    """sgl-project/sglang#39822 (RT17)"""
    engine = rig.engine(replay=False)
    rig.subscribe(replay=False)
    await engine.subscribed.wait()
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    await engine.close()
    rig.engine(replay=False)
    await rig.blocks(0)


async def test_no_message_ends_the_subscription(rig: Rig) -> None:
    engine = rig.engine(replay=False)
    subscriber = rig.subscribe(replay=False)
    await engine.subscribed.wait()
    for message in ([b"kv@w"], [b"kv@w", b"short", b"x"], [b"kv@w", b""]):
        await engine.pub.send_multipart(message)
    await engine.publish(b"\xc1 no msgpack")
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    assert (subscriber.malformed_messages, rig.feed.counters.malformed_batches) == (3, 1)


async def test_a_block_size_that_does_not_fit_is_said_and_credits_nothing(rig: Rig) -> None:
    engine = rig.engine()
    subscriber = rig.subscribe()
    await engine.subscribed.wait()
    await engine.publish(bytes(rig.wire.batch(rig.wire.stored([1], PROMPT[:24], None, 24))))
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    assert subscriber.failure is not None
    assert "blocks of 24 tokens" in subscriber.failure


async def test_only_the_topic_asked_for_is_heard(rig: Rig) -> None:
    engine = rig.engine(replay=False)
    rig.subscribe(replay=False, topic="kv@w")
    await engine.subscribed.wait()
    await engine.pub.send_multipart([b"kv@other", (0).to_bytes(8, "big"), rig.block(1)])
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    assert rig.feed.counters.batches == 1


async def test_lag_is_from_the_engines_clock_to_arrival(rig: Rig) -> None:
    engine = rig.engine(replay=False)
    subscriber = rig.subscribe(replay=False, wall_clock=lambda: 1003.0)
    await engine.subscribed.wait()
    await engine.publish(rig.block(0))
    await rig.blocks(1)
    await engine.publish(rig.block(1))
    await rig.blocks(2)
    await asyncio.sleep(0)  # the lag is noted right after the change is reported
    assert subscriber.lag_seconds == 2.0


async def test_an_engine_that_connects_needs_a_subscriber_that_binds(rig: Rig) -> None:
    engine = FakeEngine(rig.endpoint, None, connects=True)
    rig.engines.append(engine)
    rig.subscribe(replay=False, bind=True)
    await engine.subscribed.wait()
    await engine.publish(rig.block(0))
    await rig.blocks(1)


class Told(logging.Handler):
    """Sets an event when something is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


async def test_an_endpoint_that_cannot_be_used_is_said_and_tried_again(rig: Rig) -> None:
    told = Told()
    logging.getLogger("prefixwatch.kvcache.events.subscriber").addHandler(told)
    subscriber = rig.subscribe(endpoint="tcp://*:5557", replay=False)
    await asyncio.wait_for(told.event.wait(), TIMEOUT_SECONDS)
    logging.getLogger("prefixwatch.kvcache.events.subscriber").removeHandler(told)
    assert subscriber.failure is not None
    assert "can't connect to its KV events at tcp://*:5557" in subscriber.failure
    assert rig.task is not None
    assert not rig.task.done()
