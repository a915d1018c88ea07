"""One call for a whole simulation: of requests, or of a trace.

Arrivals:
    `trace`   as recorded (divided by `speed`): requests overlap and queue.
    `serial`  each request is served to its end before the next one starts: an exact study of the caches alone. Output
              tokens take their time but no cache blocks.
    `auto`    serial for one worker, trace for several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import ViewKind
from prefixwatch.simulator.traffic.trace import SimulatedRequest, read_trace
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


def simulate_trace(
    path: Path | str,
    *,
    workers: int = 1,
    capacity_blocks: int | None = None,
    policy: str = "round_robin",
    policy_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    arrivals: Arrivals = "auto",
    speed: float = 1.0,
    limit: int | None = None,
    step_time_profile: str = DEFAULT_PROFILE,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    view: ViewKind = "history",
    watch: Watch = unwatched,
) -> SimulationResult:
    """Replay the (first `limit`) requests of a recording, `speed` times as fast as recorded.

    `capacity_blocks` is each engine's cache in the trace's blocks; None: nothing is ever evicted. Raises ValueError
    (TraceError for the file) with what is wrong and where.
    """
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    trace = read_trace(path, limit)
    engine = EngineConfig(
        step_time=profile(step_time_profile).step_time,
        block_size=trace.block_size,
        capacity_blocks=capacity_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return simulate_requests(
        [replace(request, arrival_s=request.arrival_s / speed) for request in trace.requests],
        policy=policy,
        workers=workers,
        engine=engine,
        seed=seed,
        policy_options=policy_options,
        arrivals=arrivals,
        view=view,
        watch=watch,
    )
