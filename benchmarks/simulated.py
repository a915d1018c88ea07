"""Traffic for the fleet simulator without a scenario: groups that share an opening, sessions that grow turn by turn,
and a recording replayed in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE, Hashes, Tokens, block_hashes
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import ViewKind
from prefixwatch.simulator.runs import Arrivals, simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest, read_trace
from prefixwatch.simulator.watching import Watch, unwatched


@dataclass(frozen=True, slots=True)
class SharedPrefixWorkload:
    """Poisson arrivals; each prompt is a group's opening and a tail of its own; groups have Zipf popularity."""

    requests: int = 1000
    rate_per_second: float = 10.0
    groups: int = 20
    zipf_exponent: float = 1.1
    shared_blocks: int = 8
    """Blocks of the opening; 0 for traffic without any reuse."""
    unique_blocks: int = 2
    output_tokens: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE


def shared_prefix_requests(workload: SharedPrefixWorkload, seed: int) -> list[SimulatedRequest]:
    """The requests of this workload; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    size = workload.block_size
    popularity = 1.0 / np.arange(1, workload.groups + 1) ** workload.zipf_exponent
    groups = rng.choice(workload.groups, workload.requests, p=popularity / popularity.sum())
    arrivals = np.cumsum(rng.exponential(1.0 / workload.rate_per_second, workload.requests))
    openings = [_random_tokens(rng, workload.shared_blocks * size) for _ in range(workload.groups)]
    requests = []
    for k, (group, arrival) in enumerate(zip(groups.tolist(), arrivals.tolist(), strict=True)):
        tokens = np.concatenate([openings[group], _random_tokens(rng, workload.unique_blocks * size)])
        requests.append(
            _request(
                f"r{k}", arrival, tokens, output_tokens=workload.output_tokens, block_size=size, group=f"group-{group}"
            )
        )
    return requests


def session_requests(
    sessions: int,
    turns: int,
    *,
    system_blocks: int = 4,
    turn_blocks: int = 4,
    think_seconds: float = 10.0,
    output_tokens: int = 16,
    block_size: int = DEFAULT_BLOCK_SIZE,
    seed: int = 0,
) -> list[SimulatedRequest]:
    """Conversations after a common system prompt, one after another, each turn repeating all before it."""
    rng = np.random.default_rng(seed)
    system = _random_tokens(rng, system_blocks * block_size)
    requests = []
    for session in range(sessions):
        tokens = system
        for turn in range(turns):
            tokens = np.concatenate([tokens, _random_tokens(rng, turn_blocks * block_size)])
            arrival = think_seconds * (session * turns + turn)
            name = f"session-{session}"
            requests.append(
                _request(
                    f"{name}-{turn}", arrival, tokens, output_tokens=output_tokens, block_size=block_size, session=name
                )
            )
    return requests


def _request(
    request_id: str,
    arrival_s: float,
    tokens: Tokens,
    *,
    output_tokens: int,
    block_size: int,
    group: str = "",
    session: str = "",
) -> SimulatedRequest:
    hashes: Hashes = block_hashes(tokens, block_size)
    return SimulatedRequest(
        id=request_id,
        arrival_s=arrival_s,
        prompt_tokens=len(tokens),
        output_tokens=output_tokens,
        blocks=hashes,
        tokens=lambda: tokens,
        session=session,
        group=group,
    )


def _random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, 2**31, count, dtype=np.uint32)


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
