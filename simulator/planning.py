"""The smallest fleet that meets the objectives, found by simulation.

A fleet of N engines *holds* when every objective is met in every run (one per seed). More engines are taken to hold
whenever fewer do; the search doubles N until it holds, then halves the interval, so both N and N − 1 were simulated.

`ideal_engine_hours` is the bound that instant scaling could reach. One engine holds r = peak rate / N, with the peak
taken over windows of `WINDOW_SECONDS`; a window with rate λ needs ⌈λ / r⌉ engines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prefixwatch.loadgen.grading.model import ObjectiveGrade

WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet of this size in one run."""

    workers: int
    seed: int
    objectives: tuple[ObjectiveGrade, ...]
    hit_ratio: float | None
    ten_points_engine_hours: float | None = None
    """Prefill that 10 points more of hits would save."""

    @property
    def holds(self) -> bool:
        """Every objective was met; one that no request counts for is not."""
        return all(objective.ok is True for objective in self.objectives)


@dataclass(frozen=True, slots=True)
class Plan:
    """`workers` is None where not even the largest fleet holds."""

    workers: int | None
    trials: tuple[Trial, ...]
    """Every fleet that was simulated, in that order."""

    def of_size(self, workers: int) -> list[Trial]:
        return [trial for trial in self.trials if trial.workers == workers]


def smallest_fleet(run: Callable[[int, int], Trial], seeds: Sequence[int], *, first: int, largest: int) -> Plan:
    """The plan. `run(workers, seed)` simulates a fleet; the search starts at `first` and ends at `largest` engines."""
    trials: list[Trial] = []

    def holds(workers: int) -> bool:
        for seed in seeds:
            trials.append(run(workers, seed))
            if not trials[-1].holds:
                return False
        return True

    too_few, enough = 0, max(1, min(first, largest))
    while not holds(enough):
        too_few = enough
        if enough == largest:
            return Plan(None, tuple(trials))
        enough = min(2 * enough, largest)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if holds(middle):
            enough = middle
        else:
            too_few = middle
    return Plan(enough, tuple(trials))


def ideal_engine_hours(arrivals_s: Sequence[float], workers: int) -> float:
    """Engine hours with instant scaling, for traffic in order of arrival whose peak needs `workers` engines."""
    start_s, end_s = arrivals_s[0], arrivals_s[-1]
    counts = Counter(int((arrival_s - start_s) // WINDOW_SECONDS) for arrival_s in arrivals_s)
    peak = max(counts.values())
    seconds = 0.0
    for window, count in counts.items():
        length_s = min(WINDOW_SECONDS, end_s - start_s - window * WINDOW_SECONDS)
        seconds += math.ceil(workers * count / peak) * length_s
    return seconds / 3600


def prefill_engine_hours(
    requests: Iterable[tuple[int, int]], prefill_s: Callable[[int, int], float], points: float
) -> float:
    """Engine hours of prefill that go away if `points` (0 to 1) more of each prompt were cached.

    `requests` are prompt and cached tokens of each; `prefill_s` gives the seconds for both. A prompt's last token is
    always computed. A fleet needs fewer engines for it only where prefill is what it waits for.
    """
    saved_s = 0.0
    for prompt, cached in requests:
        more = min(prompt - 1, cached + round(points * prompt))
        saved_s += prefill_s(prompt, cached) - prefill_s(prompt, max(more, cached))
    return saved_s / 3600


def first_guess(work_seconds: float, traffic_seconds: float) -> int:
    """Engines that could just compute the traffic's prompts and tokens if they never waited and never reused."""
    return max(1, math.ceil(work_seconds / traffic_seconds)) if traffic_seconds > 0 else 1
