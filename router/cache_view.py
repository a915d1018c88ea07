"""What the router believes each worker caches.

`HistoryView` remembers what it routed where and forgets like an engine of a stated size would; `EventView`
reads what the engines themselves say. Neither knows HTTP or tasks; a clock is passed in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import ClassVar, Protocol

from kvcache.audit import IndexAudit
from kvcache.feed import WorkerFeed
from kvcache.index import BlockIndex
from router.policy import RouteRequest, ViewSource


class CacheView(Protocol):
    """Believed cache content."""

    source: ClassVar[ViewSource]

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        """Leading blocks of the request by worker; workers that hold none are left out."""
        ...

    def routed(self, request: RouteRequest, worker: str) -> None:
        """The request goes to this worker, which will hold its full blocks."""
        ...

    def worker_removed(self, worker: str) -> None:
        """The worker's cache is gone."""
        ...

    def block_count(self, worker: str) -> int:
        """Blocks believed to be at this worker."""
        ...


class NoView:
    """For policies that place without looking."""

    source: ClassVar[ViewSource] = "history"

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return {}

    def routed(self, request: RouteRequest, worker: str) -> None:
        """Nothing is remembered."""

    def worker_removed(self, worker: str) -> None:
        """Nothing was remembered."""

    def block_count(self, worker: str) -> int:
        return 0


class HistoryView:
    """The router's own routing history, at most `capacity_blocks` a worker, least recently routed out first.

    With `ttl_seconds` a block is also forgotten that long after it was last routed (Dynamo's approximate mode: 120).

    A prompt is touched tail first, so a block is never more recent than its predecessor and eviction takes
    tails before heads, as engines do: a worker's remembered blocks stay closed under "prefix of".
    """

    source: ClassVar[ViewSource] = "history"

    def __init__(
        self,
        capacity_blocks: int,
        *,
        ttl_seconds: float | None = None,
        clock: Callable[[], float] = perf_counter,
        audit: IndexAudit | None = None,
    ) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a history needs room for at least 1 block a worker, got {capacity_blocks}")
        if ttl_seconds is not None and not ttl_seconds > 0:
            raise ValueError(f"a history's time to live must be above 0 s, got {ttl_seconds}")
        self.capacity_blocks = capacity_blocks
        self.ttl_seconds = ttl_seconds
        self._clock = clock
        self._index = BlockIndex()
        self._lookup = audit.lookup(self._index) if audit else self._index.depths
        self._recency: dict[str, OrderedDict[int, float]] = {}  # when each block was last routed, the longest ago first
        self._expiry_due = math.inf  # nothing expires before

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        self._expire()
        return self._lookup(request.blocks)

    def routed(self, request: RouteRequest, worker: str) -> None:
        self._expire()
        now = 0.0 if self.ttl_seconds is None else self._clock()
        blocks = request.blocks[: self.capacity_blocks].tolist()
        recency = self._recency.setdefault(worker, OrderedDict())
        self._index.store(worker, [block for block in blocks if block not in recency])
        for block in reversed(blocks):
            recency[block] = now
            recency.move_to_end(block)
        excess = len(recency) - self.capacity_blocks
        if excess > 0:
            self._index.remove(worker, [recency.popitem(last=False)[0] for _ in range(excess)])
        if self.ttl_seconds is not None:
            self._expiry_due = min(self._expiry_due, now + self.ttl_seconds)

    def worker_removed(self, worker: str) -> None:
        self._recency.pop(worker, None)
        self._index.forget(worker)

    def block_count(self, worker: str) -> int:
        self._expire()
        return self._index.block_count(worker)

    def _expire(self) -> None:
        """Forget what was last routed too long ago."""
        if self.ttl_seconds is None or (now := self._clock()) < self._expiry_due:
            return
        self._expiry_due = math.inf
        for worker, recency in self._recency.items():
            expired = []
            while recency and (due := next(iter(recency.values())) + self.ttl_seconds) <= now:
                expired.append(recency.popitem(last=False)[0])
            self._index.remove(worker, expired)
            if recency:
                self._expiry_due = min(self._expiry_due, due)


class EventView:
    """The engines' own account: an index that these feeds, one a worker, keep up to date."""

    source: ClassVar[ViewSource] = "events"

    def __init__(self, index: BlockIndex, feeds: Mapping[str, WorkerFeed], audit: IndexAudit | None = None) -> None:
        self._index = index
        self._lookup = audit.lookup(index) if audit else index.depths
        self._feeds = feeds

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return self._lookup(request.blocks)

    def routed(self, request: RouteRequest, worker: str) -> None:
        """Nothing to note: the engine will say itself what it stored."""

    def worker_removed(self, worker: str) -> None:
        """Its process is gone; should it speak on after all, the feed asks it for everything again."""
        self._feeds[worker].restart()

    def block_count(self, worker: str) -> int:
        return self._index.block_count(worker)
