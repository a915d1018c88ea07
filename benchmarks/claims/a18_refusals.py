"""A18: near saturation a router that turns requests away looks fast; with ample capacity its gain is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.figures import ttft_s
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.grading.measured import goodput
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.router.policies.dynamo.kv import DynamoKv
from prefixwatch.router.policies.round_robin import RoundRobin
from prefixwatch.router.policy import Decision, Fleet, NoWorkers, Policy, RouteRequest
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.traffic.trace import TRACE_BLOCK_TOKENS, SimulatedRequest, read_trace
from prefixwatch.slo.objective import Condition, Objective, RequestField

WORKERS = (1, 2, 4, 8)
LONGEST_PROMPT_TOKENS = 16_384
REQUESTS = 1_000
BUSY_PREFILL_TOKENS = 16_384
"""Uncached prompt tokens ahead of a newcomer, above which a worker counts as busy."""
GOOD_TTFT_S = 5.0
ENGINE = EngineConfig(
    StepTime(base_s=0.03, per_prefill_token_s=1 / 10_000), block_size=TRACE_BLOCK_TOKENS, capacity_blocks=270
)
IN_TIME = Objective(
    name="ttft",
    title="first token in time",
    service="llm-serving",
    target=0.95,
    conditions=(Condition(RequestField.TTFT_SECONDS, "lte", GOOD_TTFT_S),),
)


class SheddingDynamoKv(DynamoKv):
    """dynamo_kv behind its front end's busy threshold: with every worker busy the request is turned away (HTTP 503)."""

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        if all(worker.prefill_tokens > BUSY_PREFILL_TOKENS for worker in fleet.workers):
            raise NoWorkers
        return super().choose(request, fleet)


@dataclass(frozen=True, slots=True)
class _Level:
    refused_ratio: float
    answered_ttft_p90_s: float
    goodput_ratio: float
    """Answered with a first token in time, of all requests: refused ones are bad."""


def _run(setting: Setting) -> Finding:
    recorded = read_trace(setting.trace("conversation")).requests
    requests = [r for r in recorded if r.prompt_tokens <= LONGEST_PROMPT_TOKENS]
    del requests[300 if setting.quick else REQUESTS :]
    blind = {count: _level(RoundRobin(), requests, count) for count in WORKERS}
    aware = {count: _level(SheddingDynamoKv(), requests, count) for count in WORKERS}
    tight = max((count for count in WORKERS if aware[count].refused_ratio > 0.05), default=WORKERS[0])
    ample = WORKERS[-1]
    near, near_blind, near_all = aware[tight], blind[tight], _level(DynamoKv(), requests, tight)
    return Finding(
        figures="; ".join(
            f"{count} engines: refused {100 * aware[count].refused_ratio:.1f} %, TTFT p90 of the answered "
            f"{aware[count].answered_ttft_p90_s:.2f} against {blind[count].answered_ttft_p90_s:.2f} s, goodput "
            f"{100 * aware[count].goodput_ratio:.1f} against {100 * blind[count].goodput_ratio:.1f} %"
            for count in WORKERS
        )
        + f"; dynamo_kv that refuses nothing, {tight} engines: TTFT p90 {near_all.answered_ttft_p90_s:.1f} s",
        checks=(
            Check(
                f"near saturation ({tight} engines) about one in seven is refused: 5 to 30 %",
                0.05 < near.refused_ratio < 0.3,
            ),
            Check(
                "there the answered wait less than half as long as under round robin (TTFT p90)",
                near.answered_ttft_p90_s < 0.5 * near_blind.answered_ttft_p90_s,
            ),
            Check(
                "that is the refusing: without it the policy waits at least 5 times as long",
                near_all.answered_ttft_p90_s > 5 * near.answered_ttft_p90_s,
            ),
            Check("goodput counts every refusal as bad", near.goodput_ratio <= 1 - near.refused_ratio),
            Check(f"with {ample} engines nothing is refused", not aware[ample].refused_ratio),
            Check(
                "and the gain is gone: goodput within 1 point",
                abs(aware[ample].goodput_ratio - blind[ample].goodput_ratio) < 0.01,
            ),
            Check(
                "and TTFT p90 within 10 %",
                aware[ample].answered_ttft_p90_s > 0.9 * blind[ample].answered_ttft_p90_s,
            ),
        ),
        seeds="policy 0",
        remark="The refusing is modelled: how many are refused follows from the assumed threshold and speed. Near "
        "saturation means the largest fleet here that refuses more than 5 %; smaller ones refuse more.",
    )


def _level(policy: Policy, requests: list[SimulatedRequest], workers: int) -> _Level:
    records = FleetSimulation([policy], ENGINE, workers, view="events").run(requests).records
    refused = sum(record.outcome is Outcome.REFUSED for record in records)
    good: Any = goodput(Columns.of(records), [IN_TIME])
    return _Level(refused / len(records), ttft_s(records, 90), float(good.mean()))


CLAIM = Claim(
    id="A18",
    claimed="Near saturation a KV router is fast because it refuses requests; with ample capacity its gain vanishes",
    source="an independent test of NVIDIA Dynamo's router, michelecampi.github.io, 2026-06-27",
    published="about 1 in 7 requests refused near saturation; no gain with capacity to spare",
    reproduced="1 to 8 engines (assumed: prefill 10,000 tokens/s, 270 blocks of 512); the first 1,000 requests up to "
    "16,384 tokens of the conversation trace (the source's tool-and-agent trace isn't at hand); dynamo_kv, refusing "
    f"while every worker has over {BUSY_PREFILL_TOKENS:,} tokens to prefill (assumed), against round robin; good: "
    f"first token within {GOOD_TTFT_S:g} s",
    run=_run,
    traces=("conversation",),
)
