"""Every signal that the exporter makes something of: what catalogue files translate a system's families into."""

from __future__ import annotations

from collections.abc import Mapping

OWN_PREFIX = "x_"
"""Signals of a user's own begin so; the fleet API shows them, nothing is derived from them."""

_BY_KIND = {
    "counter": """
        async_prefills degradation_state_seconds degradation_transitions evicted_bytes evicted_objects
        evicted_tokens external_hit_tokens external_query_tokens finished_computed_tokens finished_prompt_tokens
        finished_requests generation_tokens gpu_energy_joules kv_transfer_bytes kv_transfer_failures
        lookup_hit_objects lookup_objects moe_balance_count moe_balance_sum preemptions prefix_hit_tokens
        prefix_query_tokens prompt_tokens prompt_tokens_cached prompt_tokens_transferred retrieved_tokens
        routed_requests router_best_hit_tokens router_delivered_hit_tokens router_predicted_hit_tokens
        router_prompt_tokens refused_requests speculative_accepted_tokens speculative_draft_tokens
        untokenized_requests
    """,
    "gauge": """
        believed_blocks block_size_tokens cached_bytes degradation_state generation_tokens_per_second
        gpu_memory_bandwidth_ratio gpu_memory_free_bytes gpu_memory_used_bytes gpu_pcie_bytes_per_second
        gpu_power_watts gpu_tensor_active_ratio gpu_utilization_ratio gpu_xid_error identity_files_usable
        in_flight_requests index_gaps indexed_objects kv_capacity_blocks kv_capacity_bytes kv_usage_ratio kv_used_blocks
        kv_used_bytes oldest_in_flight_seconds prefill_backlog_tokens process_start_seconds registered_workers
        running_requests stored_objects syncing_workers waiting_requests warm_pool_utilization_ratio
        worker_kv_usage_ratio worker_up
    """,
    "histogram": """
        async_prefill_wait_seconds e2e_seconds inter_token_seconds kv_block_idle_before_evict kv_block_lifetime
        kv_block_reuse_gap kv_transfer prefill_seconds queue_seconds request_computed_tokens
        request_generation_tokens request_hit_tokens request_prompt_tokens router_decision router_wait_seconds
        tpot_seconds ttft_by_cache ttft_seconds
    """,
    "info": """
        cache_config
    """,
}

KIND_OF: Mapping[str, str] = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}
"""Signal → its kind."""
