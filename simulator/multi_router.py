"""Several routers in front of one fleet: each sees its share of the requests and keeps its own account of them.

A router's history, counters in flight and windows know only what it routed itself; KV events and load reports reach
every router alike. What a policy loses from one router to eight is what it took from its own memory (smg#2437).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Policy
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import ViewKind
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from prefixwatch.simulator.watching import Watch, unwatched

Spread = Literal["round_robin", "random"]


def simulate_routers(
    requests: Sequence[SimulatedRequest],
    *,
    policy: str,
    routers: int,
    workers: int,
    engine: EngineConfig,
    seed: int = 0,
    policy_options: Mapping[str, Any] | None = None,
    serial: bool = False,
    view: ViewKind = "history",
    spread: Spread = "random",
    watch: Watch = unwatched,
) -> SimulationResult:
    """Serve these requests through `routers` replicas of this policy, seeded `seed`, `seed + 1`, …

    With one router this is `simulate_requests`. Raises ValueError for a wrong policy, option or number.
    """
    via = spread_over(routers, len(requests), spread, seed)
    simulation = FleetSimulation(replicas(policy, seed, routers, policy_options), engine, workers, view=view)
    return simulation.run(requests, serial=serial, via=via, watchers=watch(simulation.engines, requests))


def replicas(policy: str, seed: int, routers: int, options: Mapping[str, Any] | None = None) -> list[Policy]:
    """The policy of each router, seeded `seed`, `seed + 1`, …"""
    return [make_policy(policy, seed=seed + k, options=options) for k in range(routers)]


def spread_over(routers: int, requests: int, spread: Spread, seed: int) -> list[int] | None:
    """Each request's router by number: in turn, or at random as a connection balancer does it; None for one router.

    In turn, routers that themselves deal in turn march in step and send bursts to one worker; at random they don't.
    """
    if routers < 2:
        return None
    if spread == "round_robin":
        return [k % routers for k in range(requests)]
    numbers: list[int] = np.random.default_rng(seed).integers(0, routers, requests).tolist()
    return numbers
