"""What the router believes each worker caches.

`HistoryView` remembers what it routed where and forgets like an engine of a stated size would; `EventView`
reads what the engines themselves say. Neither knows HTTP, clocks or tasks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import ClassVar, Protocol

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

    A prompt is touched tail first, so a block is never more recent than its predecessor and eviction takes
    tails before heads, as engines do: a worker's remembered blocks stay closed under "prefix of".
    """

    source: ClassVar[ViewSource] = "history"

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a history needs room for at least 1 block a worker, got {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self._index = BlockIndex()
        self._recency: dict[str, OrderedDict[int, None]] = {}

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return self._index.depths(request.blocks)

    def routed(self, request: RouteRequest, worker: str) -> None:
        blocks = request.blocks[: self.capacity_blocks].tolist()
        recency = self._recency.setdefault(worker, OrderedDict())
        self._index.store(worker, [block for block in blocks if block not in recency])
        for block in reversed(blocks):
            recency[block] = None
            recency.move_to_end(block)
        excess = len(recency) - self.capacity_blocks
        if excess > 0:
            self._index.remove(worker, [recency.popitem(last=False)[0] for _ in range(excess)])

    def worker_removed(self, worker: str) -> None:
        self._recency.pop(worker, None)
        self._index.forget(worker)

    def block_count(self, worker: str) -> int:
        return self._index.block_count(worker)


class EventView:
    """The engines' own account: an index that these feeds, one a worker, keep up to date."""

    source: ClassVar[ViewSource] = "events"

    def __init__(self, index: BlockIndex, feeds: Mapping[str, WorkerFeed]) -> None:
        self._index = index
        self._feeds = feeds

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return self._index.depths(request.blocks)

    def routed(self, request: RouteRequest, worker: str) -> None:
        """Nothing to note: the engine will say itself what it stored."""

    def worker_removed(self, worker: str) -> None:
        """Its process is gone; should it speak on after all, the feed asks it for everything again."""
        self._feeds[worker].restart()

    def block_count(self, worker: str) -> int:
        return self._index.block_count(worker)
