"""Evictions and regret of one engine, exact, from its KV events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from kvcache.feed import Applied, WorkerFeed
from kvcache.index import BlockIndex
from kvcache.subscriber import KvEventSubscriber

REGRET_SECONDS = 300.0
"""A block that is stored again within this time after its eviction was evicted too early."""

_REMEMBERED_EVICTIONS = 200_000


@dataclass(frozen=True, slots=True)
class KvEventCounts:
    """What the events told since the exporter began to listen, in blocks of the engine's size."""

    evicted_blocks: int
    regretted_blocks: int
    resident_blocks: int
    missed_batches: int
    lag_seconds: float | None


class KvEventSource(Protocol):
    """Where a target's evictions come from."""

    def counts(self) -> KvEventCounts | None:
        """None while nothing is known."""

    def why_unknown(self) -> str:
        """For people: why `counts` is None."""


class EvictionLedger:
    """Counts evictions, and evictions that were regretted: the block was wanted, and stored, again soon after."""

    def __init__(self, regret_seconds: float = REGRET_SECONDS, remembered: int = _REMEMBERED_EVICTIONS) -> None:
        self.evicted_blocks = 0
        self.regretted_blocks = 0
        self._regret_seconds = regret_seconds
        self._remembered = remembered
        self._evicted_at: OrderedDict[int, float] = OrderedDict()

    def apply(self, stored: Iterable[int], removed: Iterable[int], now_seconds: float) -> None:
        """One batch of events, in block hashes; vLLM makes room first, so a batch's removals come before its stores."""
        evicted_at = self._evicted_at
        for block in removed:
            self.evicted_blocks += 1
            evicted_at[block] = now_seconds
        for block in stored:
            at = evicted_at.pop(block, None)
            if at is not None and now_seconds - at <= self._regret_seconds:
                self.regretted_blocks += 1
        while len(evicted_at) > self._remembered:
            evicted_at.popitem(last=False)

    def cleared(self) -> None:
        """The cache was dropped as a whole: nothing of what is stored next was evicted before."""
        self._evicted_at.clear()


class KvEventWatcher:
    """A target's KV-event subscription, as a source of counts."""

    def __init__(self, target: str, endpoint: str, replay_endpoint: str | None, block_size: int | None) -> None:
        self._index = BlockIndex()
        self._target = target
        self._ledger = EvictionLedger()
        self._feed = WorkerFeed(target, self._index, block_size or DEFAULT_BLOCK_SIZE)
        self._subscriber = KvEventSubscriber(
            target, endpoint, replay_endpoint, self._feed, bind="*" in endpoint, on_applied=self._on_applied
        )
        self._since_unix_seconds = time.time()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._subscriber.run(), name=f"kv-events {self._target}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def counts(self) -> KvEventCounts | None:
        if self._subscriber.failure or not (self._subscriber.connected or self._feed.counters.batches):
            return None
        return KvEventCounts(
            evicted_blocks=self._ledger.evicted_blocks,
            regretted_blocks=self._ledger.regretted_blocks,
            resident_blocks=self._index.block_count(self._target),
            missed_batches=self._feed.counters.missed_batches,
            lag_seconds=self._subscriber.lag_seconds,
        )

    def why_unknown(self) -> str:
        return self._subscriber.failure or f"no KV-event publisher answers at {self._subscriber.endpoint}"

    def _on_applied(self, applied: Applied) -> None:
        if applied.cleared:
            self._ledger.cleared()
        at = applied.timestamp or time.time()
        if at >= self._since_unix_seconds:  # a replay also tells what happened before anybody counted
            self._ledger.apply(applied.stored, applied.removed, at)
