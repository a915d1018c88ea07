"""The checklist before a launch: what passes, what fails, and what nobody could tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from alerts.build import known_metrics
from engines.simulated import SimulatedEngine, SimulatedEngineConfig
from engines.tiny_model import default_model_dir
from router.config import PolicyConfig, WorkerConfig
from runbooks.page import at
from runbooks.promql import metric_names
from stack.config import FleetSection, PrefixwatchConfig, RouterSection, TenantSection, TokenizerSection
from stack.policy_trial import weighs_load
from stack.preflight import METRIC_QUERIES, Facts, Item, ProbeFacts, checklist
from stack.preflight_probes import compare_tokens, probe

PROBED = ProbeFacts(
    prompt_tokens=620,
    repeat_cached_tokens=608,
    half_cached_tokens=304,
    other_tenant_cached_tokens=0,
    tenants=("acme", "globex"),
    uncached_answered=True,
)
MEASURED = Facts(
    probes=PROBED,
    config=PrefixwatchConfig(router=RouterSection(policy=PolicyConfig(name="score"))),
    metrics={
        "session_hit_ratio": 0.9,
        "hit_token_series": 4.0,
        "ttft_classes": 3.0,
        "max_over_mean": 1.2,
        "missed_batches": 0.0,
        "predicted_over_delivered": 0.98,
        "break_even_tokens": 1500.0,
    },
    tokens_equal=True,
    tokens_why="2 of 2 engines give the same tokens",
)


def _item(facts: Facts, name: str) -> Item:
    return next(item for item in checklist(facts) if item.name == name)


def test_a_fleet_that_is_ready_passes_all_twelve() -> None:
    assert [item.state for item in checklist(MEASURED)] == ["passed"] * 12


def test_without_anything_to_judge_by_nothing_passes() -> None:
    items = checklist(Facts())
    assert {item.state for item in items} == {"not verifiable here"}
    assert all(item.evidence for item in items)


FAILURES = {
    "Prompt order is stable": replace(MEASURED, metrics={**MEASURED.metrics, "session_hit_ratio": 0.4}),
    "Dynamic fields stand late": replace(MEASURED, probes=replace(PROBED, repeat_cached_tokens=0)),
    "Prefixes match by block": replace(MEASURED, probes=replace(PROBED, half_cached_tokens=0)),
    "The index copes with weak consistency": replace(MEASURED, metrics={**MEASURED.metrics, "missed_batches": 3.0}),
    "Hit tokens are recorded": replace(MEASURED, metrics={**MEASURED.metrics, "hit_token_series": None}),
    "TTFT is split by hit and miss": replace(MEASURED, metrics={**MEASURED.metrics, "ttft_classes": 1.0}),
    "Hotspots are guarded against": replace(MEASURED, metrics={**MEASURED.metrics, "max_over_mean": 2.4}),
    "Transfers pay": replace(MEASURED, metrics={**MEASURED.metrics, "break_even_tokens": 20_000.0}),
    "Tenants are salted": replace(MEASURED, probes=replace(PROBED, other_tenant_cached_tokens=608)),
    "Tokenizer and template agree": replace(MEASURED, tokens_equal=False),
    "It works without the cache": replace(MEASURED, probes=replace(PROBED, uncached_answered=False)),
}


@pytest.mark.parametrize(("name", "facts"), FAILURES.items(), ids=list(FAILURES))
def test_each_item_fails_by_its_own_evidence_alone(name: str, facts: Facts) -> None:
    assert [item.name for item in checklist(facts) if item.state == "failed"] == [name]


def test_a_tenant_without_a_salt_fails_before_any_probe() -> None:
    config = PrefixwatchConfig(tenants=[TenantSection(name="acme", salt=SecretStr("s")), TenantSection(name="globex")])
    assert _item(replace(MEASURED, config=config), "Tenants are salted").evidence == "tenants without a salt: globex"


def test_no_cross_tenant_hit_proves_nothing_while_caching_is_off() -> None:
    """vllm-project/vllm#53347 (IS03)."""
    off = replace(MEASURED, probes=replace(PROBED, repeat_cached_tokens=0, half_cached_tokens=0))
    assert _item(off, "Tenants are salted").state == "not verifiable here"


@pytest.mark.parametrize(("policy", "expected"), [("kvaware", False), ("round_robin", False), ("score", True)])
def test_a_policy_that_follows_caches_alone_is_told_from_one_that_leaves_an_overloaded_worker(
    policy: str, expected: bool
) -> None:
    """vllm-project/production-stack#1035 (RT01)."""
    assert weighs_load(PolicyConfig(name=policy)) is expected


def test_the_metric_questions_read_what_the_exporter_writes() -> None:
    for query in METRIC_QUERIES.values():
        assert metric_names(at(query, "5m")) <= set(known_metrics())


async def test_probes_tell_an_engine_without_tenants_from_a_safe_one(tmp_path: Path) -> None:
    engine = SimulatedEngine(SimulatedEngineConfig(model_dir=default_model_dir(), speed=20.0))
    await engine.start()
    try:
        facts = await probe(engine.url)
        config = PrefixwatchConfig(
            fleet=FleetSection(targets=[WorkerConfig(name="e", url=engine.url)]),
            tokenizer=TokenizerSection(model_dir=default_model_dir()),
        )
        equal, _ = await compare_tokens(config)
    finally:
        await engine.stop()
    assert facts.prompt_tokens is not None
    assert facts.repeat_cached_tokens is not None
    assert facts.prompt_tokens - 32 <= facts.repeat_cached_tokens < facts.prompt_tokens
    assert facts.other_tenant_cached_tokens == facts.repeat_cached_tokens  # nobody salts: tenants share
    assert _item(Facts(probes=facts), "Tenants are salted").state == "failed"
    assert _item(Facts(probes=facts), "Prefixes match by block").state == "passed"
    assert equal is True
