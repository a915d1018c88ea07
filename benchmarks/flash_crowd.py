"""A flash crowd of cold prompts, with and without the degradation chain, in virtual time.

Steady traffic of 24 openings of 2,048 tokens (8 requests a second, nearly all hits) meets 5 minutes of a crowd whose
prompts of 8,192 tokens nobody has sent before (3 a second), on 8 engines that prefill 8,000 tokens a second. Shown is
the P95 of the TTFT of the steady requests that hit, in the quiet minutes before and during the crowd.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.plot import Curve, Panel, svg
from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.router.degradation.chain import Transition
from prefixwatch.router.degradation.config import DegradationConfig
from prefixwatch.router.degradation.policy import DegradingPolicy
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.traffic.trace import SimulatedRequest

BLOCK = 64
ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 8000), block_size=BLOCK, capacity_blocks=5000)
CHAIN = DegradationConfig(enabled=True, ttft_seconds=0.5, warm_pool_workers=2, steps=("re_sticky", "warm_pool"))
CROWD = "crowd"
FIGURE = Path("docs/figures/flash-crowd.svg")


@dataclass(frozen=True)
class Setting:
    """How much traffic meets how many engines; times in seconds."""

    workers: int = 8
    steady_per_second: float = 8.0
    crowd_per_second: float = 3.0
    begins: float = 180.0
    lasts: float = 300.0
    ends: float = 600.0


@dataclass(frozen=True)
class Run:
    """One policy's run."""

    name: str
    records: Sequence[RequestRecord]
    transitions: Sequence[Transition]

    def hits(self, begin: float, end: float) -> list[float]:
        """TTFT of the steady requests scheduled in this time of whose prompt at least half was cached."""
        return [
            record.first_token_s - record.scheduled_s
            for record in self.records
            if record.group != CROWD
            and begin <= record.scheduled_s < end
            and record.first_token_s is not None
            and (record.cached_tokens or 0) >= 0.5 * (record.prompt_tokens or 1)
        ]

    def crowd(self) -> list[float]:
        """TTFT of the crowd's requests."""
        return [
            r.first_token_s - r.scheduled_s for r in self.records if r.group == CROWD and r.first_token_s is not None
        ]


def traffic(setting: Setting) -> list[SimulatedRequest]:
    """The steady requests and the crowd's, in order of arrival."""
    rate = setting.steady_per_second
    steady = SharedPrefixWorkload(
        int(rate * setting.ends), rate, groups=24, zipf_exponent=0.8, shared_blocks=32, unique_blocks=2,
        output_tokens=40, block_size=BLOCK,
    )  # fmt: skip
    rate = setting.crowd_per_second
    crowd = SharedPrefixWorkload(
        int(rate * setting.lasts),
        rate,
        groups=1,
        shared_blocks=0,
        unique_blocks=128,
        output_tokens=40,
        block_size=BLOCK,
    )
    late = [
        replace(request, id=f"crowd-{request.id}", arrival_s=request.arrival_s + setting.begins, group=CROWD)
        for request in shared_prefix_requests(crowd, seed=2)
    ]
    return sorted([*shared_prefix_requests(steady, seed=1), *late], key=lambda request: request.arrival_s)


def run(setting: Setting, requests: Sequence[SimulatedRequest], policy: str, chain: DegradationConfig | None) -> Run:
    """Serve the traffic; with a chain, its policy is the wrapped one."""
    chosen = make_policy(policy)
    if chain is not None:
        chosen = DegradingPolicy(chosen, chain)
    result = FleetSimulation([chosen], ENGINE, setting.workers, view="events").run(requests)
    transitions = chosen.transitions if isinstance(chosen, DegradingPolicy) else []
    return Run(policy if chain is None else f"{policy} + chain", result.records, transitions)


def p95(seconds: Sequence[float]) -> float:
    """The 95 % quantile."""
    return float(np.percentile(seconds, 95))


def ratio(setting: Setting, one: Run) -> float:
    """P95 of the hits during the crowd over that of the quiet time before."""
    quiet = one.hits(setting.begins / 3, setting.begins)
    return p95(one.hits(setting.begins, setting.begins + setting.lasts)) / p95(quiet)


def figure(setting: Setting, runs: Sequence[Run]) -> str:
    """P95 of the hits over time."""
    step = 15.0
    curves = [
        Curve(
            one.name,
            [
                (begin, p95(found))
                for begin in np.arange(setting.begins / 3, setting.ends, step).tolist()
                if (found := one.hits(begin, begin + step))
            ],
        )
        for one in runs
    ]
    span = setting.begins, setting.begins + setting.lasts
    title = "P95 of the TTFT of hits, seconds (crowd: yellow)"
    return svg([Panel(title, "seconds", curves, log_y=True, span=span)])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flash_crowd", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--policies", default="score,cache_aware", help="comma-separated names")
    parser.add_argument("--crowd", type=float, default=3.0, metavar="RATE", help="the crowd's requests a second")
    parser.add_argument("--out", type=Path, default=FIGURE, help="the figure")
    arguments = parser.parse_args()
    setting = Setting(crowd_per_second=arguments.crowd)
    requests = traffic(setting)
    runs = [run(setting, requests, name, chain) for name in arguments.policies.split(",") for chain in (None, CHAIN)]
    print(f"{'policy':22} {'quiet P95':>10} {'crowd P95':>10} {'ratio':>7} {'crowd’s own P95':>16}")
    for one in runs:
        quiet = p95(one.hits(setting.begins / 3, setting.begins))
        crowd = p95(one.hits(setting.begins, setting.begins + setting.lasts))
        print(f"{one.name:22} {quiet:9.3f}s {crowd:9.3f}s {crowd / quiet:7.2f} {p95(one.crowd()):15.2f}s")
        for change in one.transitions:
            print(f"    {change.at:6.1f} s  {change.step:14} {change.rule:14} now {change.state}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(figure(setting, runs))
    print(f"figure: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
