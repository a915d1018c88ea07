"""Do routers and engines agree on who is busy? A count that a router never takes back keeps its worker idle for good.

An engine's count and a router's are scraped at different moments, so they differ all the time by what has come and
gone in between. A leak is what never goes away: the least difference of a whole window.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prefixwatch.exporters.caches.worker_targets import WorkerTargets
from prefixwatch.exporters.scraping.target import Target

MIN_SAMPLES = 3

Samples = Sequence[tuple[float, Mapping[str, float]]]
"""Loads by name, at times of a monotonic clock, oldest first."""


def router_in_flight(targets: Sequence[Target]) -> dict[str, float]:
    """Requests in flight by the routers' own counts, added up, by worker."""
    counts: dict[str, float] = {}
    engines = WorkerTargets(targets)
    for target in _routers(targets):
        if target.numbers is not None:
            for worker, load in target.numbers.loads.items():
                name = engines.name_of(worker)
                counts[name] = counts.get(name, 0.0) + load
    return counts


def in_flight_leaks(targets: Sequence[Target], tolerance_seconds: float) -> dict[str, float]:
    """Requests that routers count at a worker beyond those that its engine knows, least of the window, at least 0.

    Only of workers that are among the targets and up. Source: vllm-project/production-stack#1072, #1001.
    """
    routers = [(target.loads.samples, target.loads.means()) for target in _routers(targets) if target.up]
    engines = WorkerTargets(targets)
    leaks: dict[str, float] = {}
    for worker in {worker for _, means in routers for worker in means}:
        engine = engines.find(worker)
        if engine is not None and engine.up:
            believed = [_of(samples, worker) for samples, means in routers if worker in means]
            excess = least_excess(believed, _totals(engine.loads.samples), tolerance_seconds, enough=0.0)
            if excess is not None:
                leaks[engine.name] = max(excess, 0.0, leaks.get(engine.name, 0.0))
    return leaks


def least_excess(
    believed: Sequence[Sequence[tuple[float, float]]],
    real: Sequence[tuple[float, float]],
    tolerance_seconds: float,
    enough: float = -math.inf,
) -> float | None:
    """The least of (sum of the routers' beliefs - the engine's count), over the engine's samples.

    Each belief is the router's sample nearest in time; where one isn't within the tolerance, that moment is left out.
    None with fewer than `MIN_SAMPLES` moments. The search ends at a difference of `enough` or less.
    """
    least, known = math.inf, 0
    moments = [(ordered := sorted(samples), [at for at, _ in ordered]) for samples in believed]
    for at, count in real:
        belief = 0.0
        for samples, times in moments:
            when, value = _nearest(samples, times, at)
            if abs(when - at) > tolerance_seconds:
                break
            belief += value
        else:
            least, known = min(least, belief - count), known + 1
            if known >= MIN_SAMPLES and least <= enough:
                break
    return least if known >= MIN_SAMPLES else None


def _nearest(samples: Sequence[tuple[float, float]], times: Sequence[float], at_seconds: float) -> tuple[float, float]:
    """Of samples in the order of their `times`; at an infinite distance where there are none."""
    after = bisect_left(times, at_seconds)
    around = samples[max(after - 1, 0) : after + 1]
    return min(around, key=lambda sample: abs(sample[0] - at_seconds), default=(math.inf, 0.0))


def _routers(targets: Sequence[Target]) -> list[Target]:
    return [target for target in targets if target.system is not None and target.system.role == "router"]


def _of(samples: Samples, worker: str) -> list[tuple[float, float]]:
    """A router that doesn't list a worker has sent it nothing."""
    return [(at, loads.get(worker, 0.0)) for at, loads in samples]


def _totals(samples: Samples) -> list[tuple[float, float]]:
    return [(at, sum(loads.values())) for at, loads in samples]
