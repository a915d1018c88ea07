"""The fleet that A2 and A3 replay the Mooncake traces on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import TRACE_BLOCK_TOKENS, read_trace

ENGINE = EngineConfig(
    StepTime(base_s=0.02, per_prefill_token_s=1 / 16_000),
    block_size=TRACE_BLOCK_TOKENS,
    capacity_blocks=12_500,
    max_num_batched_tokens=8192,
)
SPEED = 0.6
FLEET = "4 engines of 12,500 blocks, prefill 16,000 tokens/s, the whole trace at 0.6 times its speed"


@cache
def replay(trace: Path, limit: int | None, beta: float | None) -> SimulationResult:
    """The trace under `loadaware` with this beta; None: round robin. Kept, since claims share runs."""
    requests = [replace(request, arrival_s=request.arrival_s / SPEED) for request in read_trace(trace, limit).requests]
    return simulate_requests(
        requests,
        policy="round_robin" if beta is None else "loadaware",
        policy_options=None if beta is None else {"beta": beta},
        workers=4,
        engine=ENGINE,
        view="events",
        arrivals="trace",
    )
