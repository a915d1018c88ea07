"""Do routers and engines agree on who is busy? A count that a router never takes back keeps its worker idle for good.

An engine's count and a router's are scraped at different moments, so they differ all the time by what has come and
gone in between. A leak is what never goes away: the least difference of a whole window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exporters.caches.worker_targets import WorkerTargets
from exporters.scraping.target import Target

MIN_SAMPLES = 3

Samples = Sequence[tuple[float, Mapping[str, float]]]
"""Loads by name, at times of a monotonic clock, oldest first."""


def router_in_flight(targets: Sequence[Target]) -> dict[str, float]:
    """Requests in flight by the routers' own counts, added up, by the worker's name as routers give it."""
    counts: dict[str, float] = {}
    for target in _routers(targets):
        if target.numbers is not None:
            for worker, load in target.numbers.loads.items():
                counts[worker] = counts.get(worker, 0.0) + load
    return counts


def in_flight_leaks(targets: Sequence[Target], tolerance_seconds: float) -> dict[str, float]:
    """Requests that routers count at a worker beyond those that its engine knows, least of the window, at least 0.

    Only of workers that are among the targets and up. Source: vllm-project/production-stack#1072, #1001.
    """
    routers = [target for target in _routers(targets) if target.up]
    engines, leaks = WorkerTargets(targets), {}
    for worker in {worker for router in routers for worker in router.loads.means()}:
        engine = engines.find(worker)
        if engine is not None and engine.up:
            believed = [_of(router.loads.samples, worker) for router in routers]
            excess = least_excess(believed, _totals(engine.loads.samples), tolerance_seconds)
            if excess is not None:
                leaks[worker] = max(excess, 0.0)
    return leaks


def least_excess(
    believed: Sequence[Sequence[tuple[float, float]]], real: Sequence[tuple[float, float]], tolerance_seconds: float
) -> float | None:
    """The least of (sum of the routers' beliefs - the engine's count), over the engine's samples.

    Each belief is the router's sample nearest in time; where one isn't within the tolerance, that moment is left out.
    None with fewer than `MIN_SAMPLES` moments.
    """
    differences = []
    for at, count in real:
        near = [_nearest(samples, at) for samples in believed if samples]
        if len(near) == len(believed) and all(abs(when - at) <= tolerance_seconds for when, _ in near):
            differences.append(sum(belief for _, belief in near) - count)
    return min(differences) if len(differences) >= MIN_SAMPLES else None


def _nearest(samples: Sequence[tuple[float, float]], at_seconds: float) -> tuple[float, float]:
    return min(samples, key=lambda sample: abs(sample[0] - at_seconds))


def _routers(targets: Sequence[Target]) -> list[Target]:
    return [target for target in targets if target.system is not None and target.system.role == "router"]


def _of(samples: Samples, worker: str) -> list[tuple[float, float]]:
    """A router that doesn't list a worker has sent it nothing."""
    return [(at, loads.get(worker, 0.0)) for at, loads in samples]


def _totals(samples: Samples) -> list[tuple[float, float]]:
    return [(at, sum(loads.values())) for at, loads in samples]
