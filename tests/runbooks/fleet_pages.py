"""A healthy fleet as the exporter shows it, and what field reports change in it.

Names are without the namespace; the two values are five minutes apart. None takes a series away.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefixwatch.runbooks.snapshots import Snapshots

Pair = tuple[float, float]

HEALTHY: dict[str, Pair] = {
    'target_up{target="a",system="vllm",version="0.32"}': (1, 1),
    'target_up{target="b",system="vllm",version="0.32"}': (1, 1),
    'scrape_age_seconds{target="a"}': (1, 1),
    'data_quality_checks{target="a"}': (20, 20),
    'request_records_total{source="router"}': (0, 1_000),
    'tenant_hit_tokens_total{tenant="x"}': (0, 42_000),
    'tenant_hit_tokens_total{tenant="y"}': (0, 42_000),
    'block_size_tokens{target="a"}': (16, 16),
    'block_size_tokens{target="b"}': (16, 16),
    "router_block_size_tokens": (16, 16),
    'prompt_token_checks_total{result="equal"}': (0, 1_000),
    'prompt_token_checks_total{result="different"}': (0, 0),
    'kv_events_lag_seconds{target="a"}': (0.01, 0.01),
    'router_oldest_in_flight_seconds{target="router"}': (20, 20),
    'router_untokenized_requests_total{target="router"}': (0, 0),
    'router_decisions_total{policy="score",reason="prefix"}': (0, 1_000),
    "isolation_audited_requests_total": (0, 1_000),
    "cold_prefill_requests_total": (0, 50),
    'router_decision_seconds_bucket{step="total",le="0.005"}': (0, 990),
    'router_decision_seconds_bucket{step="total",le="0.01"}': (0, 1_000),
    'router_decision_seconds_bucket{step="total",le="0.1"}': (0, 1_000),
    'router_decision_seconds_bucket{step="total",le="+Inf"}': (0, 1_000),
    'router_decision_seconds_bucket{step="lookup",le="0.001"}': (0, 1_000),
    'router_decision_seconds_bucket{step="lookup",le="+Inf"}': (0, 1_000),
    'prefill_wait_seconds_bucket{le="0.1"}': (0, 990),
    'prefill_wait_seconds_bucket{le="1.0"}': (0, 1_000),
    'prefill_wait_seconds_bucket{le="+Inf"}': (0, 1_000),
    'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 85_000),
    'prefix_query_tokens_total{target="a",model="m"}': (0, 100_000),
    'prefix_funnel_tokens_total{stage="held"}': (0, 90_000),
    'tenant_prompt_tokens_total{tenant="x"}': (0, 50_000),
    'tenant_prompt_tokens_total{tenant="y"}': (0, 50_000),
    'kv_cache_clears_total{target="a"}': (0, 0),
    'kv_blocks_evicted_total{target="a"}': (0, 1_000),
    'kv_blocks_regretted_total{target="a"}': (0, 10),
    'kv_event_batches_missed_total{target="a"}': (0, 0),
    'preemptions_total{target="a",model="m"}': (0, 0),
    "predicted_hit_tokens_total": (0, 84_000),
    "delivered_hit_tokens_total": (0, 85_000),
    'router_believed_blocks{target="a"}': (2_000, 2_000),
    'kv_blocks_resident{target="a"}': (2_000, 2_000),
    'named_prefix_request_share_ratio{prefix="support-bot",span="before"}': (0.4, 0.4),
    'named_prefix_request_share_ratio{prefix="support-bot",span="now"}': (0.4, 0.4),
    'workers_changed{change="joined"}': (0, 0),
    'workers_changed{change="left"}': (0, 0),
    "sessions_moved_ratio": (0.02, 0.02),
    "sticky_requests_total": (0, 1_000),
    "sticky_collisions_total": (0, 10),
    'requests_total{class="chat",outcome="completed"}': (0, 1_000),
    'requests_total{class="chat",outcome="refused"}': (0, 0),
    "hotspot_max_over_mean": (1.1, 1.1),
    "hotspot_top_share_ratio": (0.52, 0.52),
    'worker_load_requests{target="a"}': (5, 5),
    'worker_load_requests{target="b"}': (5, 5),
    'engine_latency_quantile_seconds{target="a",latency="inter_token",quantile="0.5"}': (0.01, 0.01),
    'engine_latency_quantile_seconds{target="b",latency="inter_token",quantile="0.5"}': (0.01, 0.01),
    'requests_waiting{target="a"}': (0, 0),
    'requests_running{target="a"}': (5, 5),
    'requests_running{target="b"}': (5, 5),
    'router_in_flight_requests{target="a"}': (10, 10),
    'in_flight_leak_requests{target="a"}': (0, 0),
    'isolation_violations_total{kind="cross_tenant_hit"}': (0, 0),
    'isolation_violations_total{kind="unsalted_traffic"}': (0, 0),
    'isolation_findings_total{kind="salt_ignored"}': (0, 0),
    'isolation_findings_total{kind="salt_reused"}': (0, 0),
    'isolation_findings_total{kind="salt_per_request"}': (0, 0),
    'isolation_findings_total{kind="stored_salt_shared"}': (0, 0),
    'router_identity_files_usable{target="router",file="secrets"}': (1, 1),
    'isolation_cached_tokens{target="a"}': (32_000, 32_000),
    'isolation_duplicate_tokens{target="a"}': (0, 0),
    'isolation_lost_hit_tokens_total{target="a"}': (0, 0),
}


CASES: dict[str, tuple[str, dict[str, Pair | None]]] = {
    "vllm-project/vllm#25780 (EM01): recomputed tokens are booked as hits": (
        "preemption_storm",
        {
            'data_quality{target="a",flag="preemption_inflated"}': (1, 1),
            'preemptions_total{target="a",model="m"}': (0, 180),
        },
    ),
    "vllm-project/vllm#49983 (EM17): the metrics page fails, the engine doesn't": (
        "metrics_endpoint_failing",
        {
            'target_up{target="a",system="vllm",version="0.32"}': (0, 0),
            'scrape_failures_total{target="a",reason="http_500"}': (10, 40),
        },
    ),
    "ai-dynamo/dynamo#11646 (RT19): a dead worker": (
        "target_unreachable",
        {
            'target_up{target="a",system="vllm",version="0.32"}': (0, 0),
            'scrape_failures_total{target="a",reason="refused"}': (10, 40),
        },
    ),
    "vllm-project/production-stack#989 (EM07): a gauge was renamed": (
        "metric_renamed",
        {'data_quality{target="a",flag="missing_family"}': (1, 1)},
    ),
    "kubeai-project/kubeai#391 (SL18): a selector that matches nothing": (
        "exporter_blind",
        {
            'discovered_targets{discovery="kubernetes"}': (0, 0),
            **dict.fromkeys([name for name in HEALTHY if name.startswith("target_up")]),
        },
    ),
    "vllm-project/aibrix#2287 (RT16): an engine cleared its cache": (
        "engine_restarted",
        {
            'kv_cache_clears_total{target="a"}': (0, 1),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 40_000),
        },
    ),
    "a cache smaller than the working set": (
        "cache_too_small",
        {
            'kv_blocks_evicted_total{target="a"}': (0, 10_000),
            'kv_blocks_regretted_total{target="a"}': (0, 4_000),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 40_000),
        },
    ),
    "vllm-project/vllm#54607 (EM06): prompts that share less than a block": (
        "no_shared_prefix",
        {
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 0),
            'prefix_funnel_tokens_total{stage="held"}': (0, 0),
            "predicted_hit_tokens_total": (0, 0),
            "delivered_hit_tokens_total": (0, 0),
        },
    ),
    "vllm-project/vllm#53347 (IS03): caching is off altogether": (
        "prefix_caching_off",
        {
            'data_quality{target="a",flag="prefix_caching_off"}': (1, 1),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 0),
        },
    ),
    "vllm-project/production-stack#1035 (RT01): a popular prefix": (
        "hot_prefix",
        {"hotspot_max_over_mean": (1.9, 1.9), "hotspot_top_share_ratio": (0.95, 0.95)},
    ),
    "a throttled card": (
        "slow_worker",
        {
            'engine_latency_quantile_seconds{target="b",latency="inter_token",quantile="0.5"}': (0.05, 0.05),
            "hotspot_max_over_mean": (1.7, 1.7),
        },
    ),
    "sgl-project/sglang#39822 (RT17): an index that is empty after a restart": (
        "router_blind",
        {"predicted_hit_tokens_total": (0, 2_000), 'router_believed_blocks{target="a"}': (10, 10)},
    ),
    "vllm-project/router#237 (RT09): prompts keyed otherwise than the engine's": (
        "tokenizer_mismatch",
        {
            "delivered_hit_tokens_total": (0, 5_000),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 5_000),
            'prompt_token_checks_total{result="equal"}': (0, 10),
            'prompt_token_checks_total{result="different"}': (0, 990),
        },
    ),
    "a block size of 16 at the router, 256 at the engines": (
        "block_size_mismatch",
        {
            "delivered_hit_tokens_total": (0, 20_000),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 65_000),
            'block_size_tokens{target="a"}': (256, 256),
            'block_size_tokens{target="b"}': (256, 256),
            'kv_blocks_evicted_total{target="a"}': (0, 0),
        },
    ),
    "ai-dynamo/dynamo#1056: another hash seed": (
        "blocks_named_differently",
        {"predicted_hit_tokens_total": (0, 2_000)},
    ),
    "a history that outlives the engines' caches": (
        "belief_outlives_cache",
        {
            "predicted_hit_tokens_total": (0, 95_000),
            "delivered_hit_tokens_total": (0, 30_000),
            'router_believed_blocks{target="a"}': (9_000, 9_000),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 65_000),
        },
    ),
    "vllm-project/aibrix#842: six routers with a history each": (
        "other_router",
        {
            "predicted_hit_tokens_total": (0, 20_000),
            'router_believed_blocks{target="a"}': (400, 400),
            'data_quality{target="router",flag="shared_workers"}': (1, 1),
        },
    ),
    "prefill and decode split: all but one token of a prompt is cached": (
        "kv_split",
        {
            "predicted_hit_tokens_total": (0, 40_000),
            "delivered_hit_tokens_total": (0, 99_000),
            'tenant_hit_tokens_total{tenant="x"}': (0, 49_500),
            'tenant_hit_tokens_total{tenant="y"}': (0, 49_500),
        },
    ),
    "llm-d/llm-d-router#1737 (RT14): a gap in the event sequence": (
        "event_gap",
        {'kv_event_batches_missed_total{target="a"}': (0, 7), 'kv_cache_clears_total{target="a"}': (0, 3)},
    ),
    "vllm-project/router#215 (RT22): a leak of the in-flight count": (
        "in_flight_leak",
        {'in_flight_leak_requests{target="a"}': (40, 40), "hotspot_max_over_mean": (1.6, 1.6)},
    ),
    "llm-d/llm-d-router#2295 (RT24): a janitor that drops live requests": (
        "in_flight_dropped",
        {
            'requests_running{target="a"}': (1_029, 1_029),
            'requests_running{target="b"}': (0, 0),
            'router_in_flight_requests{target="a"}': (588, 588),
        },
    ),
    "one tenant's flood pushes out what others had": (
        "tenant_flood",
        {
            'tenant_prompt_tokens_total{tenant="x"}': (0, 300_000),
            'kv_blocks_evicted_total{target="a"}': (0, 10_000),
            'kv_blocks_regretted_total{target="a"}': (0, 1_000),
        },
    ),
    "vllm-project/vllm#52655 (IS08): ten salts make ten copies of a system prompt of 6000 tokens": (
        "salts_too_fine",
        {
            'isolation_cached_tokens{target="a"}': (60_000, 60_000),
            'isolation_duplicate_tokens{target="a"}': (54_000, 54_000),
            'isolation_lost_hit_tokens_total{target="a"}': (0, 54_000),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 31_000),
            'prefix_funnel_tokens_total{stage="held"}': (0, 32_000),
            "predicted_hit_tokens_total": (0, 31_000),
            "delivered_hit_tokens_total": (0, 31_000),
        },
    ),
    "an independent A/B test (SL20): one request in seven is refused": (
        "engine_refuses",
        {'requests_total{class="chat",outcome="refused"}': (0, 166)},
    ),
    "vllm-project/vllm#17045 (IS01): a tenant reuses another's cache": (
        "salt_dropped",
        {'isolation_violations_total{kind="cross_tenant_hit"}': (0, 3)},
    ),
    "sgl-project/sglang#37160 (IS04): an outer tier drops the salt": (
        "salt_ignored",
        {
            'isolation_violations_total{kind="cross_tenant_hit"}': (0, 3),
            'isolation_findings_total{kind="salt_ignored"}': (0, 3),
        },
    ),
    "a time stamp in front of a system prompt": (
        "prefix_changed",
        {
            'named_prefix_request_share_ratio{prefix="support-bot",span="now"}': (0.01, 0.01),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 51_000),
            'prefix_funnel_tokens_total{stage="held"}': (0, 52_000),
            "predicted_hit_tokens_total": (0, 51_000),
            "delivered_hit_tokens_total": (0, 51_000),
        },
    ),
    "three workers joined, and a third of the sessions moved": (
        "keys_reshuffled",
        {
            'workers_changed{change="joined"}': (0, 3),
            "sessions_moved_ratio": (0.02, 0.31),
            "sticky_collisions_total": (0, 310),
        },
    ),
    "one tenant put its users' names first": (
        "one_tenant",
        {
            'tenant_hit_tokens_total{tenant="x"}': (0, 5_000),
            'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 55_000),
        },
    ),
    "smg-project/smg#2150 (RT43): replicas throw affinity away": (
        "affinity_lost",
        {"sticky_collisions_total": (0, 400)},
    ),
    "vllm-project/aibrix#673 (RT37): tokenising takes too long": (
        "slow_decisions",
        {
            'router_decision_seconds_bucket{step="total",le="0.005"}': (0, 5),
            'router_decision_seconds_bucket{step="total",le="0.01"}': (0, 10),
        },
    ),
}


HISTORY: dict[str, float] = {
    "hit-ratio-rising": 0.0,
    "tenant-growth": 1.0,
    "tenant-slower": 1.0,
    "decision-branches": 0.0,
}
"""Answers of the steps that compare with the last hour: nothing changed."""

CHANGED: dict[str, dict[str, float]] = {
    "one tenant's flood pushes out what others had": {"tenant-growth": 4.0},
}
"""What a case changes in them."""


def fleet(changes: Mapping[str, Pair | None]) -> dict[str, Pair]:
    """The healthy fleet's series with these changed, or taken away."""
    return {name: pair for name, pair in {**HEALTHY, **changes}.items() if pair is not None}


def pages(series: Mapping[str, Pair]) -> Snapshots:
    """The two pages, read five minutes apart."""
    snapshots = Snapshots()
    for moment in (0, 1):
        lines = (f"prefixwatch_{name} {pair[moment]}" for name, pair in series.items())
        snapshots.add_page("\n".join(lines) + "\n", 300.0 * moment)
    return snapshots
