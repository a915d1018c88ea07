"""What the size of a KV block costs and saves: the same traffic and the same cache in tokens, cut into other blocks.

Small blocks reuse more of a prompt (at most one block less a token is lost at the end of what is shared), and cost more
names: hashes to compute, blocks in KV events and in the router's index. Virtual time, shipped scenario `agent-loop` by
default; engines step equally fast whatever the block size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic

SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Row:
    """One size."""

    block_size: int
    hit_ratio: float
    ttft_p95_ms: float
    hashed_per_request: float
    """Blocks that the router hashes and looks up."""
    stored_per_second: float
    """Blocks that engines announce in KV events."""


def row(scenario: Scenario, block_size: int, policy: str, seed: int) -> Row:
    """Simulate the scenario with blocks of this size."""
    hints = scenario.engine
    tokens = (hints.capacity_blocks or 4096) * (hints.block_size or DEFAULT_BLOCK_SIZE)
    requests = ScenarioTraffic(scenario, block_size).requests(seed)
    engine = EngineConfig(
        profile(hints.profile or DEFAULT_PROFILE).step_time, block_size=block_size, capacity_blocks=tokens // block_size
    )
    result = simulate_requests(
        requests, policy=policy, workers=scenario.workers, engine=engine, seed=seed, view="events"
    )
    waits = [each.ttft_s for each in result.records if each.ttft_s is not None]
    counters = [worker.counters for worker in result.workers]
    computed = sum(own.query_blocks - own.hit_blocks for own in counters)
    return Row(
        block_size,
        result.token_hit_ratio or 0.0,
        float(np.quantile(waits, 0.95)) * 1e3,
        sum(len(request.blocks) for request in requests) / len(requests),
        computed / scenario.duration_seconds,
    )


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [
        "| block size, tokens | hit tokens | TTFT p95 ms | blocks hashed a request | blocks stored a second |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {own.block_size} | {own.hit_ratio:.1%} | {own.ttft_p95_ms:.0f} | {own.hashed_per_request:.0f} "
        f"| {own.stored_per_second:.0f} |"
        for own in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_size", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scenario", default="agent-loop")
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    scenario = load_scenario(given.scenario)
    print(table([row(scenario, size, given.policy, given.seed) for size in SIZES]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
