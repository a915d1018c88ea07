"""What each policy loses when several routers share the work: the same traffic through 1, 2 and 8 of them.

    python -m benchmarks.multi_router [--policies a,b] [--routers 1,2,8] [--spread random] [--json | --markdown]

Virtual time, so a busy machine changes nothing. 8 engines; 3,000 requests at 60 a second in 150
groups that share 768 of 896 prompt tokens; an engine's cache holds about a quarter of the groups. Each request reaches
a router at random. A policy that can read either kind of cache view has a row for each; one that keeps a memory of its
own, or looks at nothing, has one.

Baseline of a row: itself with the first number of routers. Its knowledge decides what is lost (design classes MR-0
stateless, MR-1 events, MR-2 own history; smg-project/smg#2437, smg#1621).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import POLICIES
from prefixwatch.simulator.multi_router import Spread, simulate_routers
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import ViewKind
from prefixwatch.simulator.traffic.trace import SimulatedRequest

WORKERS = 8
WORKLOAD = SharedPrefixWorkload(
    requests=3000,
    rate_per_second=60,
    groups=150,
    zipf_exponent=0.6,
    shared_blocks=12,
    unique_blocks=2,
    output_tokens=24,
    block_size=64,
)
ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 8000), block_size=64, capacity_blocks=450)
OWN_MEMORY = ("cache_aware_v1", "prefixaware", "llmd_approx", "preble")
"""These keep their own history inside the policy and never ask the router's cache view."""
COLUMNS = ("policy", "knows", "routers", "hit ratio", "TTFT p95 ms", "max/mean in flight", "hits lost", "TTFT p95 ×")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy with one view and one number of routers."""

    policy: str
    knows: str
    """`nothing`, `history` (what this router routed), `events` (what the engines say) or `truth`."""
    routers: int
    hit_ratio: float
    """Prompt tokens reused, of all."""
    ttft_p95_ms: float
    in_flight_max_over_mean: float
    hits_lost: float
    """Of the baseline's hit ratio, as a share; below 0: gained."""
    ttft_p95_ratio: float
    """To the baseline's."""


def measure(
    policies: Sequence[str],
    routers: Sequence[int] = (1, 2, 8),
    *,
    requests: Sequence[SimulatedRequest] | None = None,
    spread: Spread = "random",
    seed: int = 1,
) -> Iterator[Row]:
    """A row for each policy, view and number of routers; the first number is the baseline."""
    traffic = requests if requests is not None else shared_prefix_requests(WORKLOAD, seed=5)
    for policy in policies:
        for knows, view in _views(policy):
            baseline: tuple[float, float] | None = None
            for count in routers:
                result = simulate_routers(
                    traffic,
                    policy=policy,
                    routers=count,
                    workers=WORKERS,
                    engine=ENGINE,
                    seed=seed,
                    view=view,
                    spread=spread,
                )
                hits, p95_ms = result.token_hit_ratio or 0.0, _ttft_p95_ms(result)
                baseline = baseline or (hits, p95_ms)
                yield Row(
                    policy=policy,
                    knows=knows,
                    routers=count,
                    hit_ratio=round(hits, 4),
                    ttft_p95_ms=round(p95_ms, 1),
                    in_flight_max_over_mean=round(result.in_flight_max_over_mean or 1.0, 2),
                    hits_lost=round(1 - hits / baseline[0], 3) if baseline[0] else 0.0,
                    ttft_p95_ratio=round(p95_ms / baseline[1], 2),
                )


def _views(policy: str) -> list[tuple[str, ViewKind]]:
    needs = POLICIES[policy].needs
    if needs.truth:
        return [("truth", "events")]
    if policy in OWN_MEMORY:
        return [("history", "history")]
    if not needs.cache_view:
        return [("nothing", "history")]
    if needs.events:
        return [("events", "events")]
    return [("history", "history"), ("events", "events")]


def _ttft_p95_ms(result: SimulationResult) -> float:
    return float(np.percentile([record.ttft_s for record in result.records if record.ttft_s is not None], 95)) * 1000


def _cells(row: Row) -> list[str]:
    return [
        row.policy,
        row.knows,
        str(row.routers),
        f"{100 * row.hit_ratio:.1f} %",
        f"{row.ttft_p95_ms:.0f}",
        f"{row.in_flight_max_over_mean:.2f}",
        f"{100 * row.hits_lost:+.1f} %",
        f"{row.ttft_p95_ratio:.2f}",
    ]


def _markdown(rows: Sequence[Row], routers: Sequence[int]) -> str:
    """A line for each policy and view: the hit ratio by number of routers, and what the last does to TTFT."""
    head = ["policy", "knows", *(f"hits at {count}" for count in routers), "TTFT p95 ×"]
    lines = [head, ["---"] * len(head)]
    for first in range(0, len(rows), len(routers)):
        of_policy = rows[first : first + len(routers)]
        hits = [f"{100 * row.hit_ratio:.1f} %" for row in of_policy]
        lines.append([of_policy[0].policy, of_policy[0].knows, *hits, f"{of_policy[-1].ttft_p95_ratio:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated (default: all)")
    parser.add_argument(
        "--routers", default="1,2,8", help="numbers of routers, comma-separated; the first is the baseline"
    )
    parser.add_argument("--spread", choices=("random", "round_robin"), default="random", help="requests over routers")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    arguments.policies = arguments.policies.split(",")
    for name in arguments.policies:
        if name not in POLICIES:
            parser.error(f"unknown policy '{name}'; known policies: {', '.join(POLICIES)}")
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    counts = [int(count) for count in arguments.routers.split(",")]
    rows = list(measure(arguments.policies, counts, spread=arguments.spread))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif arguments.markdown:
        print(_markdown(rows, counts))
    else:
        table = Table(*COLUMNS, title=f"{WORKERS} engines, baseline: {counts[0]} router")
        for row in rows:
            table.add_row(*_cells(row), end_section=row.routers == counts[-1])
        Console().print(table)


if __name__ == "__main__":
    main()
