"""One call for a whole simulation.

Arrivals:
    `trace`   as recorded: requests overlap and queue.
    `serial`  each request is served to its end before the next one starts: an exact study of the caches alone. Output
              tokens take their time but no cache blocks.
    `auto`    serial for one worker, trace for several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import ViewKind
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from prefixwatch.simulator.watching import Watch, unwatched

Arrivals = Literal["auto", "serial", "trace"]


def simulate_requests(
    requests: Sequence[SimulatedRequest],
    *,
    policy: str,
    workers: int,
    engine: EngineConfig,
    seed: int = 0,
    policy_options: Mapping[str, Any] | None = None,
    arrivals: Arrivals = "auto",
    view: ViewKind = "history",
    concurrency: int | None = None,
    watch: Watch = unwatched,
    keeps_scores: bool = True,
) -> SimulationResult:
    """Serve these requests by `workers` engines under this policy. Raises ValueError for a wrong policy or option.

    Without `keeps_scores` the records lack their decisions' scores.
    """
    chosen = make_policy(policy, seed=seed, options=policy_options)
    serial = arrivals == "serial" or (arrivals == "auto" and workers == 1 and concurrency is None)
    simulation = FleetSimulation([chosen], engine, workers, view=view, keeps_scores=keeps_scores)
    watchers = watch(simulation.engines, requests)
    return simulation.run(requests, serial=serial, concurrency=concurrency, watchers=watchers)
