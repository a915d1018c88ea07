"""One engine's KV events, subscribed to: its blocks in the fleet's table, and their evictions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixwatch.kvcache.events.endpoints import event_streams
from prefixwatch.kvcache.events.subscriber import KvEventSubscriber
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.index.block_table import BlockTable, warm_up

_log = logging.getLogger(__name__)

STALE_LAG_SECONDS = 5.0
"""Events that arrive this long after the engine's clock are old news (or the clocks differ, which is as bad)."""


@dataclass(frozen=True, slots=True)
class KvEventCounts:
    """What the events reported since the exporter began to listen, in blocks of the engine's size."""

    evicted_blocks: int
    regretted_blocks: int
    resident_blocks: int
    missed_batches: int
    """Sequence numbers that never came, nor could be replayed."""
    lag_seconds: float | None
    stored_blocks: int = 0
    batches: int = 0
    replayed_batches: int = 0
    unreadable: int = 0
    """Payloads and events that could not be read: they were left out or, where they may have held removals, made all
    blocks be dropped."""
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
    ranks_unheard: int = 0
    """Data-parallel ranks whose endpoint has not been heard: their caches are missing from these counts."""
    hybrid: bool = False
    """The model has cache groups besides full attention, which limit what can be reused of the blocks counted here."""

    @property
    def flags(self) -> Mapping[str, bool]:
        """Why these numbers may mislead."""
        return {
            "kv_events_missed": self.missed_batches > 0,
            "kv_events_unreadable": self.unreadable > 0,
            "ranks_missing": self.ranks_unheard > 0,
            "hybrid_cache": self.hybrid,
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
    """A target's KV-event subscriptions, one per data-parallel rank, as a source of counts.

    Each rank's blocks are a cache of their own in `table` until the watcher is stopped.
    """

    def __init__(self, target: str, endpoints: Sequence[str], replays: Sequence[str], table: BlockTable) -> None:
        self._target = target
        self._subscribers: list[KvEventSubscriber] = []
        self._feeds: list[TableFeed] = []
        for stream in event_streams(target, endpoints, replays):
            feed = TableFeed(stream.cache, table)
            bind = "*" in stream.endpoint
            self._feeds.append(feed)
            self._subscribers.append(
                KvEventSubscriber(target, stream.endpoint, stream.replay_endpoint, feed, bind=bind)
            )
        self._task: asyncio.Task[None] | None = None
        self._fault = ""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"kv-events {self._target}")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """By a fault of the exporter, which must neither end the rest of it nor go unseen."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        self._fault = f"reading its KV events ended by a fault of the exporter ({type(cause).__name__}: {cause})"
        _log.error("KV events ended by a fault of the exporter", extra={"target": self._target}, exc_info=error)

    async def stop(self) -> None:
        """Stop listening; what the target held no longer belongs to the fleet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for feed in self._feeds:
            feed.close()

    def counts(self) -> KvEventCounts | None:
        heard = [
            (subscriber, feed)
            for subscriber, feed in zip(self._subscribers, self._feeds, strict=True)
            if not subscriber.failure and (subscriber.connected or feed.counters.batches)
        ]
        if not heard or self._fault:
            return None
        subscribers, feeds = zip(*heard, strict=True)
        blocks = [feed.blocks for feed in feeds]
        lifetimes = [each.lifetimes for each in blocks]
        lags = [each.lag_seconds for each in subscribers if each.lag_seconds is not None]
        return KvEventCounts(
            evicted_blocks=sum(each.evicted_blocks for each in blocks),
            regretted_blocks=sum(each.regretted_blocks for each in blocks),
            resident_blocks=sum(each.resident_blocks for each in blocks),
            missed_batches=sum(each.counters.lost_batches for each in feeds),
            lag_seconds=max(lags, default=None),
            stored_blocks=sum(each.stored_blocks for each in blocks),
            batches=sum(each.counters.batches for each in feeds),
            replayed_batches=sum(each.counters.replayed_batches for each in feeds),
            unreadable=sum(each.counters.malformed_batches + each.counters.malformed_events for each in feeds),
            clears=sum(each.clears for each in feeds),
            block_size_tokens=next((each.block_size for each in feeds if each.block_size), None),
            lifetimes=[sum(column) for column in zip(*(ages for ages, _ in lifetimes), strict=True)],
            lifetimes_sum_seconds=sum(total for _, total in lifetimes),
            tells_salts=any(each.tells_salts for each in feeds),
            duplicate_tokens=sum(each.duplicate_tokens for each in blocks),
            lost_hit_tokens=sum(each.lost_tokens for each in blocks),
            incomplete=any(each.incomplete or each.unsure for each in feeds),
            connected=all(each.connected for each in subscribers),
            ranks_unheard=len(self._feeds) - len(feeds),
            hybrid=any(each.hybrid for each in feeds),
        )

    def why_unknown(self) -> str:
        if self._fault:
            return f"{self._fault}: restart it, and report what its log says"
        failures = [each.failure for each in self._subscribers if each.failure]
        endpoints = ", ".join(each.endpoint for each in self._subscribers)
        return "; ".join(failures) or f"no KV-event publisher answers at {endpoints}"

    async def _run(self) -> None:
        await asyncio.to_thread(warm_up)
        async with asyncio.TaskGroup() as group:
            for subscriber in self._subscribers:
                group.create_task(subscriber.run())
