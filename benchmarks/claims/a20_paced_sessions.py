"""A20: sessions that leave nothing in flight when the next request is placed defeat a load term."""

from __future__ import annotations

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.figures import hit_percent
from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests

BETAS = (0.01, 1.0, 20.0)
WINDOWED = ("score", "affinity")
ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 12_000), capacity_blocks=20_000)


def _run(setting: Setting) -> Finding:
    requests = session_requests(56, 8, think_seconds=2, seed=0)

    def run(policy: str, **options: float) -> SimulationResult:
        return simulate_requests(
            requests, policy=policy, policy_options=options, workers=2, engine=ENGINE, view="events", arrivals="trace"
        )

    blind = run("round_robin")
    weighed = [run("loadaware", beta=beta) for beta in BETAS]
    windowed = {policy: run(policy) for policy in WINDOWED}
    gathered = weighed[0]
    return Finding(
        figures=f"loadaware at beta {', '.join(f'{beta:g}' for beta in BETAS)}: "
        f"{', '.join(_split(result) for result in weighed)}, hits {hit_percent(gathered):.1f} %; round robin "
        f"{_split(blind)}, {hit_percent(blind):.1f} %; "
        + ", ".join(f"{name} {_split(result)}, {hit_percent(result):.1f} %" for name, result in windowed.items()),
        checks=(
            Check(
                "one worker gets over 95 % at every weight of requests in flight",
                min(result.busiest_share for result in weighed) > 0.95,
            ),
            Check(
                "policies that count recent requests give no worker over 65 %",
                max(result.busiest_share for result in windowed.values()) < 0.65,
            ),
            Check(
                "and keep the hits within 1 point",
                min(hit_percent(result) for result in windowed.values()) > hit_percent(gathered) - 1,
            ),
            Check("round robin has at least 5 points fewer", hit_percent(blind) < hit_percent(gathered) - 5),
        ),
        seeds="traffic 0, policy 0",
        remark="The published hits differ by weight; here nothing is ever in flight, so no weight changes anything.",
    )


def _split(result: SimulationResult) -> str:
    return "/".join(str(worker.requests) for worker in sorted(result.workers, key=lambda w: -w.requests))


CLAIM = Claim(
    id="A20",
    claimed="Paced sessions defeat a load term that counts requests in flight",
    source="AMD-AGI/Infera#103, #104 (RT04)",
    published="448/0 before, 50/50 after; hits: round robin 82.0, w 0.01 92.6, w 1 87.3, w 20 95.7 %",
    reproduced="2 engines; 56 sessions of 8 turns after one system prompt, each request 2 s after the one before, "
    "which is long done; loadaware at three betas, score, affinity",
    run=_run,
)
