"""Which test shows which field report and which trap of real systems' names: a table that is held to the tests.

The reports are those of the collection whose tests concern the exporter. A test that shows one cites it in its own
text, with its id and its source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

OF_THE_EXPORTER = """
EM01 EM02 EM03 EM04 EM06 EM07 EM09 EM11 EM12 EM14 EM15 EM17 EM18 EM20 EM21 EM22 EM23 EM25 EM27 EM29 EM31 EM32 EM33 EM34
EM40 EM41 EM43 EM44 EM45 EM46 EM47 EM48 EM50 IS06 IS08 LT05 LT27 RT01 RT04 RT05 RT12 RT14 RT16 RT17 RT22 RT36 RT37 RT38
RT43 RT44 SL05 SL06 SL14 SL16 SL20 SL21 SL22
"""

REPORTS: Mapping[str, tuple[str, ...]] = {
    "EM01": (
        "exporters/test_quality.py::test_hits_after_preemptions_are_shown_and_flagged",
        "exporters/test_quality.py::test_the_headline_ratio_comes_from_the_tokens_really_computed",
    ),
    "EM02": (
        "exporters/test_vllm_signals.py::test_tokens_from_a_kv_connector_are_a_tier_of_their_own",
        "exporters/test_vllm_signals.py::test_the_external_caches_queries_are_never_added",
    ),
    "EM03": ("exporters/test_quality.py::test_lookups_that_were_booked_twice_are_flagged",),
    "EM04": (
        "exporters/test_quality.py::test_an_external_cache_that_is_asked_alone_is_no_collapse",
        "exporters/test_quality.py::test_prompts_that_never_looked_into_the_cache_are_flagged",
    ),
    "EM06": ("exporters/test_quality.py::test_the_block_size_explains_hits_of_zero",),
    "EM07": (
        "exporters/test_vllm_signals.py::test_the_usage_gauge_under_its_old_its_new_and_both_names",
        "exporters/test_vllm_signals.py::test_a_usage_gauge_under_no_known_name_is_absent_and_flagged",
    ),
    "EM09": ("exporters/test_vllm_signals.py::test_neither_created_gauges_nor_deprecated_twins_are_added",),
    "EM11": ("exporters/test_engine_names.py::test_both_spellings_of_sglang_are_one",),
    "EM12": (
        "exporters/test_engine_names.py::test_both_spellings_of_sglang_are_one",
        "exporters/test_engine_names.py::test_a_fleet_of_mixed_releases_shows_all_its_engines",
    ),
    "EM14": ("exporters/test_quality.py::test_a_gauge_of_the_last_rank_alone_is_flagged",),
    "EM15": (
        "exporters/test_vllm_signals.py::test_engines_of_one_endpoint_are_summed_and_kept_apart",
        "exporters/test_exporter_fleet.py::test_hotspots_inside_one_endpoint",
    ),
    "EM17": (
        "exporters/test_target_faults.py",
        "exporters/test_engine_text.py::test_a_target_that_is_down_repeats_no_number_of_its_own",
    ),
    "EM18": (
        "exporters/test_exporter_scrape.py::test_faulty_targets_leave_the_others_right",
        "exporters/test_exporter_scrape.py::"
        "test_a_stalled_target_has_one_scrape_in_flight_and_the_others_keep_their_pace",
    ),
    "EM20": ("exporters/test_quality.py::test_first_tokens_faster_than_light_are_flagged",),
    "EM21": ("exporters/test_quality.py::test_fewer_first_tokens_than_finished_requests_are_flagged",),
    "EM22": ("exporters/test_histogram.py::test_a_quantile_beyond_the_last_bound_is_unknown",),
    "EM23": (
        "exporters/test_canonical_labels.py::test_a_model_that_a_system_doesnt_know_is_the_configured_one",
        "exporters/test_target_faults.py",
        "exporters/test_exporter_scrape.py::test_what_is_no_metrics_page_is_called_what_it_is",
    ),
    "EM25": ("exporters/test_canonical_labels.py::test_a_model_by_its_path_is_the_model_by_its_name",),
    "EM27": ("exporters/test_cache_captures.py::test_lmcaches_live_counter_is_read_and_the_dead_one_flagged",),
    "EM29": (
        "exporters/test_cache_captures.py::test_lmcaches_tiers_add_up_and_stay_out_of_the_engines_ratio",
        "exporters/test_engine_text.py::test_what_a_kv_store_holds_of_what_it_is_asked_for",
    ),
    "EM31": (
        "exporters/test_engine_names.py::test_a_replica_that_ray_shows_though_it_exited_has_no_requests_any_more",
        "exporters/test_exporter_fleet.py::test_a_target_that_failed_has_no_load_and_no_frozen_numbers",
        "exporters/test_kv_events.py::test_what_an_engine_that_is_cut_off_holds_is_unknown",
    ),
    "EM32": (
        "exporters/test_histogram.py::test_different_bounds_are_added_only_where_both_have_one",
        "exporters/test_engine_text.py::test_waits_with_different_bounds_are_added_where_they_meet_and_say_so",
    ),
    "EM33": ("exporters/test_vllm_signals.py::test_client_chosen_model_names_are_bounded",),
    "EM34": ("exporters/test_captures.py::test_an_lora_page_counts_each_token_once",),
    "EM40": ("exporters/test_target_authentication.py",),
    "EM41": ("exporters/test_vllm_signals.py::test_usage_stays_a_ratio_however_small",),
    "EM43": (
        "exporters/test_engine_names.py::test_tensorrt_llms_hit_ratio_is_of_tokens",
        "exporters/test_cache_captures.py::test_mooncakes_objects_never_enter_a_token_ratio",
        "exporters/test_engine_captures.py::test_no_system_reads_a_gauge_of_a_ratio_as_tokens",
    ),
    "EM45": (
        "exporters/test_window.py::test_a_restart_of_one_engine_is_no_spike_in_the_sum",
        "exporters/test_exporter_fleet.py::test_a_restarted_routers_histograms_go_on",
    ),
    "EM46": (
        "exporters/test_window.py::test_the_window_is_of_this_run_not_of_the_engines_life",
        "exporters/test_window.py::test_a_reset_begins_a_new_window",
    ),
    "EM47": ("exporters/test_quality.py::test_an_engines_own_rate_is_never_compared",),
    "EM48": ("exporters/test_canonical_labels.py::test_ranks_that_dont_report_are_told_and_not_made_up",),
    "EM50": ("exporters/test_canonical_labels.py::test_a_scale_by_model_family",),
    "LT27": ("exporters/test_source_only_systems.py::test_llm_ds_time_to_first_token_is_of_streams",),
    "RT01": ("exporters/test_exporter_fleet.py::test_a_fleet_that_waits_for_one_worker_is_hot",),
    "RT04": ("exporters/test_exporter_fleet.py::test_one_worker_gets_all_though_nothing_is_in_flight",),
    "RT05": ("exporters/test_exporter_fleet.py::test_engines_tell_the_hotspot_that_no_router_replica_sees",),
    "RT12": ("exporters/test_quality.py::test_more_hits_than_lookups_are_no_ratio",),
    "RT36": ("exporters/test_exporter_fleet.py::test_the_steps_of_a_decision_stay_apart",),
    "RT37": ("exporters/test_exporter_fleet.py::test_the_steps_of_a_decision_stay_apart",),
    "RT38": ("exporters/test_quality.py::test_a_first_token_at_the_end_of_the_answer_is_flagged",),
    "SL06": ("exporters/test_engine_text.py::test_bounds_are_spelled_as_prometheus_3_stores_them",),
    "SL14": ("exporters/test_engine_text.py::test_no_page_makes_a_family_that_the_table_doesnt_have",),
    "SL16": ("exporters/test_quality.py::test_a_first_token_that_leaves_out_the_wait_is_flagged",),
    "SL21": ("exporters/test_quality.py::test_more_hits_than_lookups_are_no_ratio",),
    # Reports whose right behaviour another part of the exporter, or another room, has to show.
    "EM44": ("loadgen/grading/test_grade.py",),  # usage of single requests; the exporter never sees a cache write
    "IS06": ("kvcache/test_feed.py", "kvcache/test_blocks.py"),  # the key of the index
    "LT05": ("openai_api/test_answer.py", "loadgen/test_http_client.py"),  # what a stream's first token is
    "RT14": ("exporters/test_kv_events.py", "kvcache/test_subscriber.py"),
    "RT16": ("exporters/test_kv_events.py", "router/test_router_kv_events.py"),
    "RT17": ("exporters/test_kv_events.py", "router/test_worker_health.py"),
    "RT22": ("exporters/test_cache_value.py",),  # the in-flight leak detector
    "RT43": ("router/test_affinity.py",),  # affinity that is given up, by the router's reason
    "RT44": ("router/test_policies.py",),
    "SL20": ("exporters/test_request_ledger.py",),  # refused requests are bad ones
    "IS08": (
        "exporters/test_isolation_cost.py::test_ten_tenants_salts_make_54_000_of_60_000_tokens_copies",
        "exporters/test_isolation_cost.py::test_what_salts_cost_an_engine_is_what_it_hits_without_them",
        "exporters/test_request_ledger.py::test_a_salt_for_each_request_shows_as_a_tenant_that_never_hits",
    ),
    "SL05": (
        "exporters/test_request_ledger.py::"
        "test_counters_begin_at_0_when_records_are_read_so_that_the_first_bad_one_is_an_increase",
    ),
    "SL22": ("exporters/test_exporter_app.py", "exporters/test_window.py"),
}

TRAPS: Mapping[int, tuple[str, ...]] = {
    1: (
        "exporters/test_router_captures.py::test_a_duration_that_ends_at_the_headers_is_no_latency",
        "peers/test_exporter_peers.py::test_a_routers_placements_are_the_requests_that_arrived",
    ),
    2: (
        "exporters/test_captures.py::test_the_router_is_blind_while_the_engines_hit",
        "exporters/test_router_tokens.py::test_a_router_that_a_salt_blinds_expects_nothing_of_all_that_is_delivered",
    ),
    3: ("exporters/test_router_captures.py::test_dynamos_three_hit_rates_are_told_apart",),
    4: ("exporters/test_captures.py::test_worker_ids_of_two_spellings_are_never_joined",),
    5: (
        "exporters/test_engine_names.py::test_tgi_has_queues_and_no_prefix_cache",
        "exporters/test_engine_names.py::test_vllm_under_ray_is_counted_once_and_by_worker",
        "exporters/test_cache_captures.py::test_mooncakes_master_counts_objects_and_bytes",
    ),
    6: ("exporters/test_router_captures.py::test_a_router_that_repeats_vllm_names_is_no_engine_of_the_fleet",),
    7: (
        "exporters/test_engine_captures.py::test_a_dynamo_worker_in_tensorrt_llms_dress",
        "exporters/test_engine_names.py::test_sglangs_cached_tokens_by_where_they_were",
        "exporters/test_engine_names.py::test_sglangs_older_names",
        "exporters/test_source_only_systems.py::test_sglangs_router_before_its_rename",
    ),
    8: (
        "exporters/test_engine_captures.py::test_a_dynamo_worker_in_sglangs_dress",
        "exporters/test_engine_captures.py::test_a_worker_is_its_engine_once_the_engines_names_show_up",
        "exporters/test_cache_captures.py::test_lmcaches_idle_server_has_no_hits_yet",
    ),
    9: (
        "exporters/test_captures.py::test_nothing_of_a_captured_page_looks_like_another_unit",
        "exporters/test_engine_names.py::test_sglangs_transfer_times_become_seconds",
        "exporters/test_source_only_systems.py::test_mooncakes_client_counts_in_microseconds",
        "exporters/test_source_only_systems.py::test_sglangs_megabytes_are_bytes_and_ranks_are_not_added",
        "exporters/test_source_only_systems.py::test_dcgms_percent_mebibytes_and_millijoules",
    ),
    10: (
        "exporters/test_router_captures.py::test_a_health_gauge_that_ignores_the_circuit_breaker_is_not_taken",
        "exporters/test_router_captures.py::test_model_unknown_is_a_value_like_any_other",
    ),
    11: (
        "exporters/test_captures.py::test_ids_that_change_with_every_start_are_no_labels",
        "exporters/test_source_only_systems.py::test_aibrixs_request_ids_are_never_labels",
    ),
    12: (
        "exporters/test_router_captures.py::test_first_tokens_that_dynamo_missed_raise_a_flag",
        "exporters/test_captures.py::test_two_workers_and_the_frontend_agree_on_the_requests",
        "peers/test_exporter_peers.py::test_dynamos_frontend_and_workers_say_what_was_sent",
    ),
}


def text_of(node: str) -> str:
    """The source of a test, or of a whole file. Fails when there is no such test."""
    path, _, name = node.partition("::")
    source = (TESTS / path).read_text()
    if not name:
        return source
    found = [
        one
        for one in ast.walk(ast.parse(source))
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name
    ]
    assert found, f"there is no {node}"
    return ast.get_source_segment(source, found[0]) or ""


def test_no_report_is_left_out() -> None:
    assert sorted(REPORTS) == sorted(OF_THE_EXPORTER.split())


@pytest.mark.parametrize("report", sorted(REPORTS))
def test_a_report_is_shown_by_tests_that_cite_it(report: str) -> None:
    for node in REPORTS[report]:
        assert re.search(rf"\b{report}\b", text_of(node)), f"{node} doesn't cite {report}"


def test_no_trap_is_left_out() -> None:
    assert list(TRAPS) == list(range(1, 13))


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_shown_by_tests_that_cite_it(trap: int) -> None:
    for node in TRAPS[trap]:
        assert re.search(rf"[Tt]raps? (\d+ and )?{trap}\b|[Tt]raps {trap}\b", text_of(node)), f"{node}: trap {trap}"
