"""What the router believes each worker caches.

`HistoryView` remembers what it routed where and forgets like an engine of a stated size would; `EventView`
reads what the engines themselves say. Neither knows HTTP or tasks; a clock is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import ClassVar, NamedTuple, Protocol

from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.index.audit import IndexAudit
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.policy import RouteRequest, ViewSource

_MOST_MENTIONS, _FEW_MENTIONS = 4, 256
"""Older mentions of a worker's blocks are dropped beyond this multiple of its blocks, and this number more."""


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


class _Touch(NamedTuple):
    """A prompt that was routed: when, its number, and its blocks that haven't been looked at again, head first."""

    at_seconds: float
    number: int
    blocks: list[int]


@dataclass(slots=True)
class _Recency:
    """What one worker was sent, the least recently touched block out first.

    A block belongs to the last prompt that had it. Older mentions of it in `_touches` are skipped when their turn
    comes, so touching a prompt costs no step of the interpreter per block.
    """

    _last: dict[int, int] = field(default_factory=dict)
    """The number of the prompt that each block was last touched by."""
    _touches: deque[_Touch] = field(default_factory=deque)
    _mentions: int = 0
    """Blocks in `_touches`."""
    _number: int = 0

    def __len__(self) -> int:
        return len(self._last)

    @property
    def oldest_seconds(self) -> float:
        """No block was touched earlier; infinite where there is none."""
        return self._touches[0].at_seconds if self._touches else math.inf

    def touch(self, blocks: list[int], now: float) -> list[int]:
        """These blocks were sent, the tail before the head. Return those that weren't there."""
        last = self._last
        fresh = [block for block in blocks if block not in last]
        self._number += 1
        last.update(dict.fromkeys(blocks, self._number))
        self._touches.append(_Touch(now, self._number, blocks))
        self._mentions += len(blocks)
        if self._mentions > _MOST_MENTIONS * len(last) + _FEW_MENTIONS:
            self._forget_mentions()
        return fresh

    def take(self, count: int) -> list[int]:
        """Take out the `count` blocks whose last touch is longest ago."""
        last, gone = self._last, list[int]()
        while len(gone) < count:
            _, number, blocks = self._touches[0]
            while blocks and len(gone) < count:
                block = blocks.pop()
                self._mentions -= 1
                if last.get(block) == number:
                    del last[block]
                    gone.append(block)
            if not blocks:
                self._touches.popleft()
        return gone

    def take_oldest(self) -> list[int]:
        """Take out what was last touched by the oldest prompt."""
        _, number, blocks = self._touches.popleft()
        self._mentions -= len(blocks)
        gone = [block for block in blocks if self._last.get(block) == number]
        for block in gone:
            del self._last[block]
        return gone

    def _forget_mentions(self) -> None:
        last = self._last
        kept = (
            _Touch(at, number, [block for block in blocks if last.get(block) == number])
            for at, number, blocks in self._touches
        )
        self._touches = deque(touch for touch in kept if touch.blocks)
        self._mentions = len(last)


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
        self._recency: dict[str, _Recency] = {}
        self._expiry_due = math.inf  # nothing expires before

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        self._expire()
        return self._lookup(request.blocks)

    def routed(self, request: RouteRequest, worker: str) -> None:
        self._expire()
        now = 0.0 if self.ttl_seconds is None else self._clock()
        recency = self._recency.get(worker)
        if recency is None:
            recency = self._recency[worker] = _Recency()
        self._index.store(worker, recency.touch(request.blocks[: self.capacity_blocks].tolist(), now))
        if len(recency) > self.capacity_blocks:
            self._index.remove(worker, recency.take(len(recency) - self.capacity_blocks))
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
            while (due := recency.oldest_seconds + self.ttl_seconds) <= now:
                self._index.remove(worker, recency.take_oldest())
            self._expiry_due = min(self._expiry_due, due)


class EventView:
    """The engines' own account: an index that these feeds, one per rank of each worker, keep up to date.

    Which data-parallel rank of a worker will serve a request isn't known here, so a worker is credited with what every
    one of its ranks holds.
    """

    source: ClassVar[ViewSource] = "events"

    def __init__(
        self, index: BlockIndex, feeds: Mapping[str, Sequence[WorkerFeed]], audit: IndexAudit | None = None
    ) -> None:
        self._index = index
        self._lookup = audit.lookup(index) if audit else index.depths
        self._feeds = feeds
        self._ranks = {name: [feed.worker for feed in own] for name, own in feeds.items() if len(own) > 1}

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        found = self._lookup(request.blocks)
        if self._ranks:
            of_ranks = {name: min(found.pop(rank, 0) for rank in ranks) for name, ranks in self._ranks.items()}
            found.update({name: depth for name, depth in of_ranks.items() if depth})
        return found

    def routed(self, request: RouteRequest, worker: str) -> None:
        """Nothing to note: the engine will say itself what it stored."""

    def worker_removed(self, worker: str) -> None:
        """Its process is gone; should it speak on after all, the feed asks it for everything again."""
        for feed in self._feeds[worker]:
            feed.restart()

    def block_count(self, worker: str) -> int:
        return sum(self._index.block_count(feed.worker) for feed in self._feeds.get(worker, ()))
