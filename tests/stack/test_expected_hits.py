"""What a scenario says beforehand that an infinite cache would hit is what the engine model does hit, to the token."""

from __future__ import annotations

import pytest

from prefixwatch.documents import parse
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.cache_class import reusable_part
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.planner import planned_prompts
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic

PROMPTS = PromptWriter(Tokenizer(default_model_dir()))
FLAT = "count: 3, shared_tokens: {min: 90, max: 150}, "
BASE = """\
name: kind
duration_seconds: 30
arrivals: {{rate_per_second: 3}}
groups: {{{opening}unique_tokens: {{min: 5, max: 60}}, output_tokens: {{min: 2, max: 9}}}}
{more}
"""
KINDS = {
    "groups": (FLAT, ""),
    "zero locality": ("count: 0, shared_tokens: 120, ", ""),
    "nesting": (
        "nesting: [{name: company, count: 2, tokens: 70}, {name: product, count: 2, tokens: {min: 30, max: 90}}, "
        "{name: template, count: 2, tokens: 40}], ",
        "",
    ),
    "lognormal": ("count: 4, shared_tokens: {median: 120, sigma: 0.6, max: 500}, ", ""),
    "empirical": ("count: 4, shared_tokens: {values: [50, 200], weights: [3, 1]}, ", ""),
    "turns": (FLAT, "sessions: {turns: {1: 1, 4: 1}, think_seconds: {mean: 3}}"),
    "agent": (
        FLAT,
        "tools: {count: 5, tokens: 40}\n"
        "sessions: {turns: {6: 1}, think_seconds: {min: 0.5, max: 2}, later_tokens: {median: 80, sigma: 1}}",
    ),
    "forks": (FLAT, "sessions: {turns: 4, think_seconds: 2, forks: {share: 0.5, branches: 3}}"),
    "hand-over": (FLAT, "sessions: {turns: 4, think_seconds: 2, handover_share: 0.5}"),
    "documents": (FLAT, "documents: {count: 6, per_turn: 2, tokens: 64, popularity: {zipf: 1.2}}"),
    "documents in order": (FLAT, "documents: {count: 4, per_turn: 2, tokens: 64, order: fixed}"),
    "few-shot": (FLAT, "few_shot: {pool: 4, shots: 2, tokens: 50, shuffled_share: 0.5}"),
    "tool order flips": (FLAT, "tools: {count: 6, tokens: 30, shuffled_share: 0.3}"),
    "tools as a field": (FLAT, "tools: {count: 4, tokens: 30, sent_as: field}\nsessions: {turns: 3, think_seconds: 1}"),
    "field's order flips": (FLAT, "tools: {count: 3, tokens: 40, sent_as: field, shuffled_share: 0.3}"),
    "dynamic front": (FLAT, "dynamic_front: {tokens: 6, share: 0.5}"),
    "session front": (FLAT, "dynamic_front: {per: session}\nsessions: {turns: 3, think_seconds: 2}"),
    "roll-out": (FLAT, "rollout: {at_seconds: 10, over_seconds: 10, keeps_tokens: 40}"),
    "flash crowd": (FLAT, "flash_crowd: {at_seconds: 5, seconds: 4, rate_per_second: 8, tokens: 300}"),
    "tenants": (FLAT, "tenants: [{name: a, salt: sa, weight: 2}, {name: b, salt: sb}, {name: c, salt: sa}]"),
    "models": (FLAT, "models: [{name: base, weight: 3}, {name: support-lora}]"),
    "closed loop": (FLAT, "sessions: {turns: 2}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_expected_hits_are_what_the_engine_reports(kind: str) -> None:
    opening, more = KINDS[kind]
    scenario = parse(BASE.format(opening=opening, more=more).replace(*_closed(kind)), Scenario, name="kind.yaml")
    traffic = ScenarioTraffic(scenario)
    planned = [request for request, _ in planned_prompts(scenario, PROMPTS, seed=5, nonce="simulated-5", texts=False)]
    engine = EngineConfig(StepTime(base_s=0.001, per_prefill_token_s=1e-6), capacity_blocks=None)
    result = simulate_requests(
        traffic.requests(seed=5), policy="round_robin", workers=1, engine=engine, arrivals="serial"
    )
    expected = [reusable_part(r.shared_tokens, r.prompt_tokens, DEFAULT_BLOCK_SIZE) for r in planned]
    assert [record.cached_tokens for record in result.records] == expected
    assert [record.prompt_tokens for record in result.records] == [request.prompt_tokens for request in planned]
    assert len(expected) > 40
    if kind != "zero locality":
        assert sum(expected) > 0


def _closed(kind: str) -> tuple[str, str]:
    return "{rate_per_second: 3}", "{kind: closed, concurrency: 2}" if kind == "closed loop" else "{rate_per_second: 3}"
