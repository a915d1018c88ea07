"""A fleet whose size follows its load in virtual time: a scaler is asked at fixed moments, workers start with a delay.

A worker costs from the moment it is asked for until its last request and its last transfer have ended. One that leaves
drains: its sessions move on purpose (`simulator.sessions.moving_fleet`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.loadgen.scenario.fleet_section import EventPlan
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.router.policy import Policy
from prefixwatch.simulator.event_engine import EventEngine
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import ViewKind
from prefixwatch.simulator.sessions.moving_fleet import MovingFleet
from prefixwatch.simulator.traffic.trace import SimulatedRequest


@dataclass(frozen=True, slots=True)
class Look:
    """What a scaler sees."""

    now_s: float
    loads: Mapping[str, float]
    """Requests running and waiting at each worker that serves, mean of the looks since the last decision."""
    asked: int
    """Workers that serve or are starting."""
    engines: Mapping[str, EventEngine]


class Scaler(Protocol):
    """Decides on the size of a fleet."""

    def desired(self, look: Look) -> int:
        """How many workers there should be."""
        ...

    def leaving(self, look: Look) -> str:
        """Which of the workers that serve goes first."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a scaler looks and decides, and how long a worker takes to start, seconds."""

    look_s: float = 5.0
    decide_s: float = 15.0
    start_s: float = 180.0


class ScaledFleet(MovingFleet):
    """`workers` serve at the start; at most `most` do at any time."""

    def __init__(
        self,
        policies: Callable[[], Sequence[Policy]],
        engine: EngineConfig,
        moves: Moves,
        scaler: Scaler,
        *,
        workers: int,
        most: int,
        pace: Pace | None = None,
        view: ViewKind = "history",
    ) -> None:
        super().__init__(policies, [engine], EventPlan([], workers, most - workers), moves, view=view)
        self._scaler, self._pace = scaler, pace or Pace()
        self._on = dict.fromkeys(self._names[:workers], 0.0)
        """By worker that serves, since when it costs."""
        self._starting: dict[str, float] = {}
        self._stopping: dict[str, float] = {}
        self._off = list(reversed(self._names[workers:]))
        self._sums: dict[str, float] = {}
        self._looks = 0
        self._ends_s = 0.0
        self.worker_seconds = 0.0
        """What all workers cost."""
        self.sizes: list[tuple[float, int]] = [(0.0, workers)]
        """The number that serves or starts, at each change."""

    def run_day(self, requests: Sequence[SimulatedRequest]) -> SimulationResult:
        """Serve these requests under the scaler."""
        self._ends_s = requests[-1].arrival_s
        self._agenda.append((self._pace.look_s, self._look_at_loads))
        self._agenda.append((self._pace.decide_s, self._decide))
        result = self.run(requests)
        for since in (*self._on.values(), *self._starting.values(), *self._stopping.values()):
            self.worker_seconds += max(0.0, self._ends_s - since)
        return result

    def _look_at_loads(self, now_s: float) -> None:
        for name in self._on:
            model = self._by_name[name]
            self._sums[name] = self._sums.get(name, 0.0) + model.running + model.waiting
        self._looks += 1
        self._end_stopped(now_s)
        if now_s < self._ends_s:
            self._at_time(now_s + self._pace.look_s, self._look_at_loads)

    def _decide(self, now_s: float) -> None:
        means = {name: total / self._looks for name, total in self._sums.items()}
        self._sums, self._looks = {}, 0
        look = self._look_now(now_s, means)
        change = self._scaler.desired(look) - look.asked
        for _ in range(min(change, len(self._off))):
            name = self._off.pop()
            self._starting[name] = now_s
            self._at_time(now_s + self._pace.start_s, partial(self._joined, name))
        for _ in range(min(-change, len(self._on) - 1)):
            self._leaves(self._scaler.leaving(look), now_s)
            look = self._look_now(now_s, means)
        if change:
            self.sizes.append((now_s, len(self._on) + len(self._starting)))
        if now_s < self._ends_s:
            self._at_time(now_s + self._pace.decide_s, self._decide)

    def _look_now(self, now_s: float, means: Mapping[str, float]) -> Look:
        """`means` are the loads since the last decision, by worker."""
        loads = {name: means.get(name, 0.0) for name in self._on}
        return Look(now_s, loads, len(self._on) + len(self._starting), self._by_name)

    def _joined(self, name: str, now_s: float) -> None:
        self._on[name] = self._starting.pop(name)
        self._start(self._number[name], now_s)

    def _leaves(self, name: str, now_s: float) -> None:
        self._stopping[name] = self._on.pop(name)
        self._drain(self._number[name], now_s)

    def _end_stopped(self, now_s: float) -> None:
        for name, since in list(self._stopping.items()):
            wire = self.wire(name)
            if not self._by_name[name].busy and (wire is None or wire.free_at <= now_s):
                self.worker_seconds += now_s - since
                del self._stopping[name]
                self._off.append(name)
