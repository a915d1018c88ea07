"""One engine's KV events, subscribed to: its blocks in the fleet's table, and what became of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.block_table import BlockTable, warm_up
from kvcache.subscriber import KvEventSubscriber
from kvcache.table_feed import TableFeed

STALE_LAG_SECONDS = 5.0
"""Events that arrive this long after the engine's clock are old news (or the clocks differ, which is as bad)."""


@dataclass(frozen=True, slots=True)
class KvEventCounts:
    """What the events told since the exporter began to listen, in blocks of the engine's size."""

    evicted_blocks: int
    regretted_blocks: int
    resident_blocks: int
    missed_batches: int
    """Sequence numbers that never came, nor could be replayed."""
    lag_seconds: float | None
    stored_blocks: int = 0
    batches: int = 0
    replayed_batches: int = 0
    clears: int = 0
    block_size_tokens: int | None = None
    lifetimes: Sequence[int] = ()
    """Evictions by the block's lifetime: up to each of `LIFETIME_BOUNDS_SECONDS` and above, not cumulative."""
    lifetimes_sum_seconds: float = 0.0
    tells_salts: bool = False
    """Whether the engine's events say under which salt blocks are stored."""
    duplicate_tokens: int = 0
    """See `exporters.caches.isolation.IsolationCost`, as the next one."""
    lost_hit_tokens: int = 0
    incomplete: bool = False
    """The engine may hold blocks that were stored before anybody listened, or held some that are lost from sight."""
    connected: bool = True

    @property
    def flags(self) -> Mapping[str, bool]:
        """Why these numbers may mislead."""
        return {
            "kv_events_missed": self.missed_batches > 0,
            "index_gap": self.incomplete,
            "stale_index": not self.connected or (self.lag_seconds or 0.0) > STALE_LAG_SECONDS,
        }


class KvEventSource(Protocol):
    """Where a target's evictions come from."""

    def counts(self) -> KvEventCounts | None:
        """None while nothing is known."""

    def why_unknown(self) -> str:
        """For people: why `counts` is None."""


class KvEventWatcher:
    """A target's KV-event subscription, as a source of counts. Its blocks are in `table` until it is stopped."""

    def __init__(self, target: str, endpoint: str, replay_endpoint: str | None, table: BlockTable) -> None:
        self._target = target
        self._feed = TableFeed(target, table)
        self._subscriber = KvEventSubscriber(target, endpoint, replay_endpoint, self._feed, bind="*" in endpoint)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"kv-events {self._target}")

    async def stop(self) -> None:
        """Stop listening; what the target held is no part of the fleet any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._feed.close()

    def counts(self) -> KvEventCounts | None:
        subscriber, feed = self._subscriber, self._feed
        if subscriber.failure or not (subscriber.connected or feed.counters.batches):
            return None
        blocks = feed.blocks
        lifetimes, lifetimes_sum = blocks.lifetimes
        return KvEventCounts(
            evicted_blocks=blocks.evicted_blocks,
            regretted_blocks=blocks.regretted_blocks,
            resident_blocks=blocks.resident_blocks,
            missed_batches=feed.counters.lost_batches,
            lag_seconds=subscriber.lag_seconds,
            stored_blocks=blocks.stored_blocks,
            batches=feed.counters.batches,
            replayed_batches=feed.counters.replayed_batches,
            clears=feed.clears,
            block_size_tokens=feed.block_size,
            lifetimes=lifetimes,
            lifetimes_sum_seconds=lifetimes_sum,
            tells_salts=feed.tells_salts,
            duplicate_tokens=blocks.duplicate_tokens,
            lost_hit_tokens=blocks.lost_tokens,
            incomplete=feed.incomplete or feed.unsure,
            connected=subscriber.connected,
        )

    def why_unknown(self) -> str:
        return self._subscriber.failure or f"no KV-event publisher answers at {self._subscriber.endpoint}"

    async def _run(self) -> None:
        await asyncio.to_thread(warm_up)
        await self._subscriber.run()
