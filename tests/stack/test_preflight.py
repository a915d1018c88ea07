"""The checklist before a launch: what passes, what fails, and what nobody could tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from prefixwatch.alerts.build import RULES, known_metrics
from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.simulated.server import SimulatedEngine
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.router.config import PolicyConfig, WorkerConfig
from prefixwatch.runbooks.page import at
from prefixwatch.slo.promql import metric_names
from prefixwatch.stack.config import FleetSection, PrefixwatchConfig, RouterSection, TenantSection, TokenizerSection
from prefixwatch.stack.diagnose.preflight import (
    METRIC_QUERIES,
    Facts,
    Item,
    ProbeFacts,
    checklist,
    weighs_load,
    weighs_memory,
)
from prefixwatch.stack.diagnose.preflight_hashing import hash_algorithms
from prefixwatch.stack.diagnose.preflight_probes import compare_tokens, probe
from prefixwatch.stack.local.monitoring import prometheus_command

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
        "longest_window_days": 30.0,
    },
    retention="45d or 1TiB",
    tokens_equal=True,
    tokens_why="2 of 2 engines give the same tokens",
    hash_algorithms={"w0": "sha256", "w1": "sha256_cbor"},
)


def _item(facts: Facts, name: str) -> Item:
    return next(item for item in checklist(facts) if item.name == name)


def test_a_fleet_that_is_ready_passes_all_fourteen() -> None:
    assert [item.state for item in checklist(MEASURED)] == ["passed"] * 14


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
    "Block hashes can't be forged": replace(MEASURED, config=None, hash_algorithms={"w0": "sha256", "w1": "xxhash"}),
    "It works without the cache": replace(MEASURED, probes=replace(PROBED, uncached_answered=False)),
    "Error budgets are kept": replace(MEASURED, retention="15d"),
}


@pytest.mark.parametrize(("name", "facts"), FAILURES.items(), ids=list(FAILURES))
def test_each_item_fails_by_its_own_evidence_alone(name: str, facts: Facts) -> None:
    assert [item.name for item in checklist(facts) if item.state == "failed"] == [name]


TWO_TENANTS = PrefixwatchConfig(tenants=[TenantSection(name=name, salt=SecretStr(name)) for name in ("acme", "globex")])


@pytest.mark.parametrize(
    ("algorithms", "state", "evidence"),
    [
        ({"w0": "sha256", "w1": "sha512"}, "passed", "all 2 engines use sha256, sha512; the seed is on no page"),
        ({"w0": "builtin", "w1": ""}, "failed", "anybody can make blocks collide at w0 (builtin)"),
        ({"w0": "sha256", "w1": ""}, "not verifiable here", "these don't say how they hash blocks: w1"),
        ({}, "not verifiable here", "needs --config with fleet.targets"),
    ],
)
def test_predictable_hashing_fails_where_several_tenants_share_engines(
    algorithms: dict[str, str], state: str, evidence: str
) -> None:
    item = _item(replace(MEASURED, config=TWO_TENANTS, hash_algorithms=algorithms), "Block hashes can't be forged")
    assert (item.state, item.evidence.startswith(evidence)) == (state, True)
    alone = replace(MEASURED, config=PrefixwatchConfig(), hash_algorithms={"w0": "xxhash"})
    assert _item(alone, "Block hashes can't be forged").state == "passed"


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


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [("score", {"kv_capacity_tokens": "auto"}, True), ("score", {}, False), ("cache_aware", {}, False)],
)
def test_a_policy_that_weighs_memory_leaves_a_full_worker(policy: str, options: dict[str, Any], expected: bool) -> None:
    assert weighs_memory(PolicyConfig(name=policy, options=options)) is expected


def test_a_store_that_does_not_say_what_it_keeps_settles_nothing() -> None:
    """adorsys/status-list-server#445 (N33): 30 days of budget in 15 days of samples. Thanos and Mimir keep blocks."""
    short = _item(replace(MEASURED, retention="15d"), "Error budgets are kept")
    assert short.evidence.startswith("Prometheus keeps 15d, and the longest objective has a window of 30 days")
    for unknown in ("", "10GiB"):
        assert _item(replace(MEASURED, retention=unknown), "Error budgets are kept").state == "not verifiable here"


@pytest.mark.prometheus
async def test_a_real_prometheus_says_what_it_keeps(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text("scrape_configs: []\n")
    address = f"127.0.0.1:{free_port()}"
    command = [*prometheus_command("prometheus", tmp_path, address), "--storage.tsdb.retention.time=20d"]
    process = ManagedProcess("prometheus", command, tmp_path / "log")
    try:
        await process.wait_ready(f"http://{address}/-/ready", 120.0)
        async with new_session() as session:
            assert await Prometheus(f"http://{address}", session).retention() == "20d"
    finally:
        process.kill()


def test_the_metric_questions_read_what_the_exporter_or_the_rules_write() -> None:
    files = [yaml.safe_load(file.read_text()) for file in RULES.glob("slo-*.yaml")]
    recorded = {rule.get("record") for file in files for group in file["groups"] for rule in group["rules"]}
    for query in METRIC_QUERIES.values():
        assert set(metric_names(at(query, "5m"))) <= {*known_metrics(), *recorded}


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
        hashing = await hash_algorithms(config)
    finally:
        await engine.stop()
    assert facts.prompt_tokens is not None
    assert facts.repeat_cached_tokens is not None
    assert facts.prompt_tokens - 32 <= facts.repeat_cached_tokens < facts.prompt_tokens
    assert facts.other_tenant_cached_tokens == facts.repeat_cached_tokens  # nobody salts: tenants share
    assert _item(Facts(probes=facts), "Tenants are salted").state == "failed"
    assert _item(Facts(probes=facts), "Prefixes match by block").state == "passed"
    assert equal is True
    assert hashing == {"e": "xxh3_64"}
