"""Whether a run was in steady state: how much of its start was warm-up, and whether waits still grew at the end.

Warm-up is found by MSER-5 (White, "An effective truncation heuristic for bias reduction in simulation output",
Simulation 69, 1997): the cut that leaves the rest with the least standard error of its mean, over means of five
requests, looked for in the first half. What is left is called drifting when its last third waits longer than its
first by more than chance allows and by half as much again: the offered rate is then beyond the capacity, and every
percentile depends on how long the run was.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.slo.objective import Floats

BATCH_REQUESTS = 5
MIN_BATCHES = 20
DRIFT_RATIO = 1.5
DRIFT_Z = 4.0
"""Standard errors: far, because neighbouring batches still share a queue."""
WARM_UP_SHARE = 0.1
"""A warm-up shorter than this share of the run is not reported."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Of one repeat."""

    warm_up_seconds: float
    warm_up_ratio: float
    """Share of the repeat's requests."""
    early_wait_seconds: float
    late_wait_seconds: float
    drifting: bool


def steady_state(scheduled: Floats, wait: Floats) -> SteadyState | None:
    """Of requests in the order of their schedule; those without a wait are left out. None with too few."""
    known = ~np.isnan(wait)
    times, waits = scheduled[known], wait[known]
    batches = len(waits) // BATCH_REQUESTS
    if batches < MIN_BATCHES:
        return None
    means = waits[: batches * BATCH_REQUESTS].reshape(batches, BATCH_REQUESTS).mean(axis=1)
    cut = mser(means)
    rest = means[cut:]
    third = len(rest) // 3
    early, late = rest[:third], rest[-third:]
    error = sqrt((early.var(ddof=1) + late.var(ddof=1)) / third)
    gap = float(late.mean() - early.mean())
    return SteadyState(
        warm_up_seconds=float(times[cut * BATCH_REQUESTS] - times[0]) if cut else 0.0,
        warm_up_ratio=cut / batches,
        early_wait_seconds=float(early.mean()),
        late_wait_seconds=float(late.mean()),
        drifting=bool(gap > DRIFT_Z * error and late.mean() > DRIFT_RATIO * early.mean()),
    )


def mser(means: Floats) -> int:
    """How many of the first means to leave out, at most half of them."""
    reversed_means = means[::-1]
    counts = np.arange(1, len(means) + 1)
    sums = np.cumsum(reversed_means)
    spread = np.cumsum(reversed_means**2) - sums**2 / counts
    score = (spread / counts**2)[::-1]  # of keeping everything from this place on
    return int(np.argmin(score[: len(means) // 2 + 1]))


def notes(policy: str, columns: Columns) -> list[str]:
    """Notes for readers of this policy's percentiles, as sentences."""
    repeats = [columns.repeat == repeat for repeat in np.unique(columns.repeat)]
    states = [steady_state(columns.scheduled[mine], columns.wait[mine]) for mine in repeats]
    known = [state for state in states if state is not None]
    drifting = [state for state in known if state.drifting]
    warming = [state for state in known if state.warm_up_ratio > WARM_UP_SHARE and not state.drifting]
    found = []
    if drifting:
        worst = max(drifting, key=lambda state: state.late_wait_seconds)
        found.append(
            f"{policy}: the wait was still growing in {len(drifting)} of {len(states)} repeats, from "
            f"{worst.early_wait_seconds:.2g} s to {worst.late_wait_seconds:.2g} s: the rate exceeds this fleet's "
            "capacity, and the percentiles depend on the length of the run"
        )
    if 2 * len(warming) > len(states):
        longest = max(state.warm_up_seconds for state in warming)
        found.append(
            f"{policy}: up to the first {longest:.3g} s of {len(warming)} of {len(states)} repeats look like warm-up: "
            "prime the caches, or set warm_up_seconds in the scenario"
        )
    return found
