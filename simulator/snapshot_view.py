"""A stale cache: what simulated engines held when they were last asked for all their keys."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from prefixwatch.kvcache.events.snapshot import FIRST_INTERVAL_SECONDS, PollInterval, SnapshotWriter
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.simulator.engine_views import EngineView


class SnapshotView(EngineView):
    """Every engine is polled at its own, adaptive interval, or a fixed one; in between, the view is as old as that.

    It receives an engine's changes as they happen (`store`, `remove`) and the time (`advance`, before anything happens
    then), and shows them from the next poll on. That is what comparing whole key sets would find, at a cost that
    doesn't grow with the cache.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        """`interval_s`: poll each engine so often; None: the more often, the more changes."""
        super().__init__(BlockIndex())
        self._interval_s = interval_s
        self.polls: Counter[str] = Counter()
        """By engine, so far."""
        self._engines: dict[str, _Engine] = {}
        self._due: list[tuple[float, str]] = []
        self._now_s = 0.0

    def worker_removed(self, worker: str) -> None:
        engine = self._engine(worker)
        engine.changed.clear()
        engine.writer.forget()

    def store(self, worker: str, blocks: Iterable[int]) -> None:
        """The engine holds these blocks now."""
        self._engine(worker).changed.update(dict.fromkeys(blocks, True))

    def remove(self, worker: str, blocks: Iterable[int]) -> None:
        """The engine doesn't hold these blocks any more."""
        self._engine(worker).changed.update(dict.fromkeys(blocks, False))

    def advance(self, now_s: float) -> None:
        """Do the polls due by now. They find what the engines did before."""
        self._now_s = now_s
        while self._due and self._due[0][0] <= now_s:
            due_s, worker = self._due[0]
            adaptive_s = self._engines[worker].poll()
            self.polls[worker] += 1
            heapq.heapreplace(self._due, (due_s + (self._interval_s or adaptive_s), worker))

    def _engine(self, worker: str) -> _Engine:
        engine = self._engines.get(worker)
        if engine is None:
            engine = self._engines[worker] = _Engine(SnapshotWriter(worker, self._index))
            heapq.heappush(self._due, (self._now_s + (self._interval_s or FIRST_INTERVAL_SECONDS), worker))
        return engine


class _Engine:
    """What changed at one engine since its last poll: whether it holds each of these blocks now."""

    def __init__(self, writer: SnapshotWriter) -> None:
        self.writer = writer
        self.changed: dict[int, bool] = {}
        self._interval = PollInterval()

    def poll(self) -> float:
        """Seconds until the next one."""
        held = [block for block, holds in self.changed.items() if holds]
        gone = [block for block, holds in self.changed.items() if not holds]
        self.changed.clear()
        return self._interval.polled(self.writer.report_changed(held, gone).changed_keys)
