"""Every quantity that must be measured has a rule or series, and an alert."""

from __future__ import annotations

import pytest

from prefixwatch.alerts.catalogue.model import load_catalogue
from tests.alerts.hygiene import metrics

CATALOGUE = load_catalogue()

PRACTITIONERS_NAMES = {
    "prefix_hit_rate_total": ("prefixwatch:prefix_hit:ratio_rate5m", "PrefixHitRateLow"),
    "prefix_hit_rate_per_session": ("prefixwatch:session_prefix_hit:ratio_rate5m", "SessionPrefixHitRateLow"),
    "prefix_block_count_per_worker": ("prefixwatch:worker_prefix_blocks:max", "PrefixBlocksNearCapacity"),
    "prefix_tree_depth_p99": ("prefixwatch:prefix_tree_depth:p99", "PrefixTreeTooDeep"),
    "sticky_session_collision_rate": ("prefixwatch:sticky_session_collision:ratio_rate5m", "StickySessionCollisions"),
    "warm_pool_utilization": ("prefixwatch:warm_pool_utilization:max", "WarmPoolNearlyFull"),
    "session_migration_count_per_minute": ("prefixwatch:session_migration:per_minute", "SessionMigrationsHigh"),
    "cold_prefill_time_p50": ("prefixwatch:cold_prefill_seconds:p50", "ColdPrefillSlow"),
    "cold_prefill_time_p95": ("prefixwatch:cold_prefill_seconds:p95", "ColdPrefillSlow"),
    "cold_prefill_time_p99": ("prefixwatch:cold_prefill_seconds:p99", "ColdPrefillSlow"),
    "cold_prefill_cost_per_request": ("prefixwatch:cold_prefill_cost_usd:per_request", "ColdPrefillCostHigh"),
    "async_prefill_wait_time_p99": ("prefixwatch:async_prefill_wait_seconds:p99", "AsyncPrefillWaitLong"),
    "prefix_miss_cost_p95": ("prefixwatch:prefix_miss_cost:p95", "PrefixMissCostHigh"),
    "prefix_tree_walk_latency_p99": ("prefixwatch:prefix_tree_walk_seconds:p99", "PrefixTreeWalkSlow"),
    "topology_aware_placement_hit_rate": ("prefixwatch:topology_placement:ratio_rate5m", "TopologyPlacementLow"),
    "cross_node_migration_count_per_minute": ("prefixwatch:cross_node_migration:per_minute", "CrossNodeMigrationsHigh"),
    "moe_expert_alignment_rate": ("prefixwatch:moe_expert_alignment:min", "MoeExpertsMisaligned"),
    "speculative_decoding_acceptance_rate": (
        "prefixwatch:speculative_acceptance:ratio_rate5m",
        "SpeculativeAcceptanceLow",
    ),
    "continuous_batching_affinity_admission_rate": (
        "prefixwatch:affinity_admission:ratio_rate5m",
        "AffinityAdmissionLow",
    ),
}
"""Their name of a quantity, our series of it, and its alert."""

CORE = {
    "prefix hit tokens": "PrefixHitRateLow",
    "TTFT delta": "CacheHitsNotFaster",
    "router decision latency": "RouterDecisionSlow",
    "hotspot": "WorkerHotspot",
    "eviction churn": "EvictionChurn",
    "transfer cost": "KvTransferFailing",
    "SLO goodput": "SloBudgetBurnFast",
    "isolation violation": "IsolationViolation",
}

CHECKLIST_LINES = {
    "PrefixHitRateLow": ("<", 0.6),
    "SessionPrefixHitRateLow": ("<", 0.8),
    "PrefixBlocksNearCapacity": (">", 0.9),
    "PrefixTreeTooDeep": (">", 32),
    "StickySessionCollisions": (">", 0.05),
    "WarmPoolNearlyFull": (">", 0.8),
    "ColdPrefillSlow": (">", 3),
    "ColdPrefillCostHigh": (">", 0.05),
    "AsyncPrefillWaitLong": (">", 5),
    "PrefillWaitLong": (">", 5),
    "PrefixMissCostHigh": (">", 1.5),
    "PrefixTreeWalkSlow": (">", 0.005),
    "TopologyPlacementLow": ("<", 0.9),
    "MoeExpertsMisaligned": ("<", 0.7),
    "SpeculativeAcceptanceLow": ("<", 0.6),
    "AffinityAdmissionLow": ("<", 0.5),
}


@pytest.mark.parametrize(("record", "alert"), PRACTITIONERS_NAMES.values(), ids=PRACTITIONERS_NAMES)
def test_each_quantity_of_the_practitioners_list_is_recorded_and_has_an_alert(record: str, alert: str) -> None:
    [found] = [one for one in CATALOGUE.records if one.name == record]

    assert set(found.rows) & set(CATALOGUE.alert(alert).rows)


@pytest.mark.parametrize(("row", "alert"), CORE.items())
def test_each_core_quantity_has_an_alert(row: str, alert: str) -> None:
    assert row in CATALOGUE.alert(alert).rows


@pytest.mark.parametrize(("alert", "line"), CHECKLIST_LINES.items())
def test_the_checklists_lines_are_the_thresholds(alert: str, line: tuple[str, float]) -> None:
    sign, threshold = line

    assert f" {sign} {threshold:g}" in (CATALOGUE.alert(alert).expr or "")


def test_a_recorded_series_is_read_by_an_alert_or_serves_a_row_that_has_one() -> None:
    alerted = {row for alert in CATALOGUE.alerts for row in alert.rows}
    read = {name for alert in CATALOGUE.alerts if alert.expr for name in metrics(alert.expr)}

    assert [one.name for one in CATALOGUE.records if one.name not in read and not set(one.rows) & alerted] == []
