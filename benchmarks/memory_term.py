"""What a policy's memory and objective terms are worth, in virtual time: equal engines against unlike memories.

Four engines with the step times of an L40S. `equal` has as many KV blocks in all as `unlike`, where two engines have a
sixth of what the other two have. Prompts of 1,920 tokens (a third of them one of 12 openings), 7 requests a second,
500 requests, three traffics. Where memories are unlike, a queue of requests says little of whether a prompt still fits;
good requests have their first token within 0.5 s.

    python -m benchmarks.memory_term
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.claims.figures import ttft_s
from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.loadgen.scenario.fleet_section import EventPlan
from prefixwatch.simulator.fleet_events import simulate_events
from prefixwatch.simulator.result import SimulationResult

FLEETS = {"unlike": (700, 700, 4000, 4000), "equal": (2350,) * 4}
"""KV blocks of 16 tokens."""
POLICIES = (
    *("score", "score{kv_capacity_tokens=auto}"),
    *("flexlb_formula", "flexlb_formula{slo_filter=true}", "flexlb_formula{batcher=slo_budget}"),
)
TRAFFIC = SharedPrefixWorkload(
    requests=500, groups=12, zipf_exponent=1.0, shared_blocks=40, unique_blocks=80, output_tokens=128, rate_per_second=7
)
SEEDS = (1, 2, 3)
OBJECTIVE_S = 0.5


def run(policy: str, blocks: Sequence[int], seed: int) -> SimulationResult:
    """One traffic on engines with this much memory."""
    step_time = profile("l40s-llama-8b").step_time
    engines = [EngineConfig(step_time, capacity_blocks=own) for own in blocks]
    plan = EventPlan([], len(engines), 0)
    return simulate_events(
        shared_prefix_requests(TRAFFIC, seed), plan, policy=policy, engines=engines, view="events", seed=seed
    )


def good_share(result: SimulationResult) -> float:
    """Requests whose first token came within the objective, of all."""
    return sum(r.ttft_s is not None and r.ttft_s <= OBJECTIVE_S for r in result.records) / len(result.records)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.memory_term", description=(__doc__ or "").split("\n", 1)[0]
    ).parse_args()
    print("| memories | policy | good requests, by traffic | TTFT P95 s, by traffic | hit tokens |")
    print("|---|---|---|---|---|")
    for name, blocks in FLEETS.items():
        for policy in POLICIES:
            results = [run(policy, blocks, seed) for seed in SEEDS]
            good = " / ".join(f"{good_share(result):.1%}" for result in results)
            p95 = " / ".join(f"{ttft_s(result.records, 95):.2f}" for result in results)
            hits = float(np.mean([result.token_hit_ratio for result in results]))
            print(f"| {name} | `{policy}` | {good} | {p95} | {hits:.1%} |", flush=True)


if __name__ == "__main__":
    main()
