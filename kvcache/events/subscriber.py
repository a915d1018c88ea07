"""The socket side of KV events: one engine's ZMQ stream into one feed.

The engine publishes `[topic, sequence, payload]` (sequence: 8 bytes, big-endian) and, where it was given a
replay endpoint, sends its last batches again on request. A subscriber asks for them whenever a connection comes
up, so that it knows what was cached before it joined and notices an engine that was replaced meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from prefixwatch.kvcache.events.block_mapping import BlockSizeMismatch
from prefixwatch.kvcache.events.sequence import Applied, EventSequence, Replay

log = logging.getLogger(__name__)

_SEQUENCE_BYTES = 8
_REPLAY_END = b"\xff" * _SEQUENCE_BYTES
_REPLAY_ROUNDS = 3
_RETRY_SECONDS = 1.0
_TAKEN_AT_ONCE = 32
"""Messages between two turns of the event loop."""
_IDLE_POLL_SECONDS = 1.0
_PARKED_POLL_SECONDS = 0.05


class KvEventSubscriber:
    """Keeps a feed up to date until it is cancelled; no message from the engine ends it.

    With `bind=False` it connects to an engine that binds (`tcp://*:5557` there, the engine's host here). With
    `bind=True` it binds and the engine connects, as vLLM and SGLang do where their endpoint has a concrete host
    (`tcp://127.0.0.1:5557`). `on_applied` hears of every batch that changed something. `failure` says what is wrong
    now, for people; None while all is well.
    """

    def __init__(
        self,
        worker: str,
        endpoint: str,
        replay_endpoint: str | None,
        feed: EventSequence,
        topic: str = "",
        *,
        bind: bool = False,
        replay_timeout_seconds: float = 2.0,
        on_applied: Callable[[Applied], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.worker = worker
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.feed = feed
        self.topic = topic
        self.bind = bind
        self.connected = False
        self.failure: str | None = None
        self.lag_seconds: float | None = None
        """From the engine's clock at the last live batch to its arrival here; None before the first."""
        self.malformed_messages = 0
        self.replays_failed = 0
        self._warned_of_unreadable = False
        self._replay_timeout_seconds = replay_timeout_seconds
        self._on_applied = on_applied
        self._wall_clock = wall_clock
        self._context: zmq.asyncio.Context = zmq.asyncio.Context.instance()

    @property
    def last_sequence(self) -> int | None:
        return self.feed.last_sequence

    async def run(self) -> None:
        """Subscribe and stay subscribed. Ends only when cancelled."""
        while True:
            try:
                await self._session()
            except zmq.ZMQError as error:
                way = "bind" if self.bind else "connect to"
                self._fail(f"worker {self.worker}: can't {way} its KV events at {self.endpoint}: {error}")
            self.connected = False
            await asyncio.sleep(_RETRY_SECONDS)

    async def _session(self) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.set_hwm(0)
        socket.linger = 0
        socket.setsockopt(zmq.SUBSCRIBE, self.topic.encode())
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            (socket.bind if self.bind else socket.connect)(self.endpoint)
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            while True:
                wait = _PARKED_POLL_SECONDS if self.feed.parked else _IDLE_POLL_SECONDS
                ready = dict(await poller.poll(int(wait * 1000)))
                if monitor in ready:
                    await self._connection_changed(await monitor.recv_multipart())
                if socket in ready:
                    await self._take_waiting(plain)
                self.feed.expire(time.monotonic())
                await asyncio.sleep(0)  # polling a socket with messages waiting never yields
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    async def _connection_changed(self, message: list[bytes]) -> None:
        self.connected = parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not self.connected:
            return
        self.failure = None
        last = self.feed.last_sequence
        if not await self._catch_up(last or 0) and last is not None:
            self._lose()  # whatever happened while the connection was down can't be known

    async def _take_waiting(self, socket: zmq.Socket[bytes]) -> None:
        """What has arrived: received without asyncio's part in it, which costs ten times as much as a small batch."""
        for _ in range(_TAKEN_AT_ONCE):
            try:
                message = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            await self._take(message)

    async def _take(self, message: list[bytes]) -> None:
        """One live message."""
        parsed = _sequence_and_payload(message)
        if parsed is None:
            self.malformed_messages += 1
            return
        applied = self._apply(*parsed)
        if applied is not None and applied.replay is not None:
            caught_up = await self._catch_up(applied.replay.from_sequence)
            last = self.feed.last_sequence
            if not caught_up or last is None or last < parsed[0]:
                self._lose()
                applied = self._apply(*parsed)
        if applied is not None and applied.timestamp is not None:
            self.lag_seconds = max(self._wall_clock() - applied.timestamp, 0.0)

    async def _catch_up(self, start: int) -> bool:
        """Replay from `start` on; False where the engine has no replay or doesn't answer."""
        if self.replay_endpoint is None:
            return False
        for _ in range(_REPLAY_ROUNDS):
            try:
                async with asyncio.timeout(30 * self._replay_timeout_seconds):
                    received, again = await self._replay(self.replay_endpoint, start)
            except (TimeoutError, zmq.ZMQError):
                self.replays_failed += 1
                log.warning("worker %s: no answer from its KV-event replay at %s", self.worker, self.replay_endpoint)
                return False
            if again is not None:
                start = again.from_sequence
            elif start and not received:
                self.feed.restart()  # it doesn't know a batch that was seen from it: another engine
                start = 0
            else:
                return True
        return False

    async def _replay(self, endpoint: str, start: int) -> tuple[int, Replay | None]:
        """Feed the engine's batches from `start` on: how many came, and what the feed asks for instead."""
        received = 0
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        try:
            socket.connect(endpoint)
            await socket.send_multipart([b"", start.to_bytes(_SEQUENCE_BYTES, "big")])
            while True:
                message = await asyncio.wait_for(socket.recv_multipart(), self._replay_timeout_seconds)
                if len(message) >= 2 and message[-2] == _REPLAY_END:
                    return received, None
                parsed = _sequence_and_payload(message)
                if parsed is None:
                    self.malformed_messages += 1
                    continue
                received += 1
                applied = self._apply(*parsed, replayed=True)
                if applied is not None and applied.replay is not None:
                    return received, applied.replay
                await asyncio.sleep(0)  # nor does receiving from it, and a replay may hold 10,000 batches
        finally:
            socket.close(linger=0)

    def _apply(self, sequence: int, payload: bytes, *, replayed: bool = False) -> Applied | None:
        try:
            applied = self.feed.apply(sequence, payload, time.monotonic(), replayed=replayed)
        except BlockSizeMismatch as error:
            self._lose()
            self._fail(str(error))
            return None
        if self.feed.unreadable is not None and not self._warned_of_unreadable:
            self._warned_of_unreadable = True
            log.warning("worker %s: KV events that can't be read are left out: %s", self.worker, self.feed.unreadable)
        self._report(applied)
        return applied

    def _lose(self) -> None:
        self.feed.lost()
        self._report(Applied(cleared=True))

    def _report(self, applied: Applied) -> None:
        if self._on_applied is not None and (applied.stored or applied.removed or applied.cleared):
            self._on_applied(applied)

    def _fail(self, reason: str) -> None:
        if reason != self.failure:
            log.error("%s", reason)
        self.failure = reason


def _sequence_and_payload(message: list[Any]) -> tuple[int, bytes] | None:
    """The last two frames, whether or not a topic or an empty delimiter stands before them."""
    if len(message) < 2 or len(message[-2]) != _SEQUENCE_BYTES:
        return None
    return int.from_bytes(message[-2], "big"), message[-1]
