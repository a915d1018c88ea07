"""Looking at a simulated fleet while it runs: its workers' figures as rows of `fleet.parquet`, and how far the run is.

Watchers only read. They look at fixed moments of virtual time, before anything happens then, so a run that is watched
ends exactly as one that isn't.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.simulator.event_engine import EventEngine
from prefixwatch.simulator.traffic.trace import SimulatedRequest

MOST_ROWS = 20_000
"""Rows of a run's fleet log, about: larger fleets are looked at less often."""

Watch = Callable[[Mapping[str, EventEngine], Sequence[SimulatedRequest]], Sequence["Watcher"]]
"""Makes the watchers of a run, from its engines by worker and its requests in order of arrival."""


class Watcher(Protocol):
    """Receives the time of each event of the simulation before the event takes place."""

    def advance(self, now_s: float) -> None: ...

    def end(self, now_s: float) -> None:
        """The last request has left."""


class FleetSamples:
    """One row per worker at the start, at the end and every `interval_s` between."""

    def __init__(
        self,
        policy: str,
        repeat: int,
        *,
        engines: Mapping[str, EventEngine],
        begins_s: float,
        ends_s: float,
        rows: list[FleetRow],
    ) -> None:
        """`rows` receives them; the arrivals begin and end at these times."""
        self._policy, self._repeat, self._engines, self._rows = policy, repeat, engines, rows
        self._interval_s = max(1.0, (ends_s - begins_s) * len(engines) / MOST_ROWS)
        self._due_s = begins_s

    def advance(self, now_s: float) -> None:
        if now_s >= self._due_s:
            self._read(now_s)
            self._due_s = now_s + self._interval_s

    def end(self, now_s: float) -> None:
        self._read(now_s)

    def _read(self, now_s: float) -> None:
        for name, engine in self._engines.items():
            counters, pool = engine.counters, engine.pool
            self._rows.append(
                FleetRow(
                    unix_s=now_s,
                    policy=self._policy,
                    repeat=self._repeat,
                    worker=name,
                    up=True,
                    running=engine.running,
                    waiting=engine.waiting,
                    kv_usage_ratio=engine.kv_usage_at(now_s) if pool.capacity_blocks else None,
                    prefix_hit_tokens_total=counters.hit_tokens,
                    prefix_query_tokens_total=counters.query_tokens,
                    kv_blocks_stored_total=pool.cached_blocks + pool.evicted_blocks,
                    kv_blocks_removed_total=pool.evicted_blocks,
                    kv_cache_clears_total=0,
                    kv_batches_missed_total=0,
                    at_s=now_s,
                )
            )


class Steps:
    """Calls `report` with the share of a run's arrivals that is over (0 to 1), about `count` times."""

    def __init__(self, report: Callable[[float], None], begins_s: float, ends_s: float, count: int = 200) -> None:
        self._report, self._begins_s, self._ends_s = report, begins_s, ends_s
        self._step_s = (ends_s - begins_s) / count
        self._due_s = begins_s

    def advance(self, now_s: float) -> None:
        if now_s >= self._due_s and self._step_s > 0:
            self._due_s = now_s + self._step_s
            self._report(min(1.0, (now_s - self._begins_s) / (self._ends_s - self._begins_s)))

    def end(self, now_s: float) -> None:
        self._report(1.0)


def unwatched(engines: Mapping[str, EventEngine], requests: Sequence[SimulatedRequest]) -> Sequence[Watcher]:
    """No watchers."""
    return ()
