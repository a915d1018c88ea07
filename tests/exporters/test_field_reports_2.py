"""Which tests show which case of the second batch of field reports, of all rooms; and the cases that no other test has.

A table that is held to the tests: every case has one, and every test in the table exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from prefixwatch.exporters.scraping.target import Target
from tests.exporters.test_field_reports import text_of

MakeTarget = Callable[..., Target]
DOCS = Path(__file__).parents[2] / "docs"

CASES: Mapping[str, tuple[str, ...]] = {
    "N01": (
        "exporters/test_unread_pages.py::test_a_store_s_hits_have_a_tier_whatever_its_backend_is_called",
        "exporters/test_unread_pages.py::test_a_tier_is_one_that_we_know_or_unknown",
    ),
    "N04": (
        "loadgen/test_recordings.py::test_sessions_with_delays_wait_for_the_answer_before",
        "loadgen/test_recordings.py::test_texts_and_lengths_alone_are_mooncake_rows_too",
        "loadgen/test_open_loop.py::test_a_turn_with_a_delay_is_due_that_long_after_the_answer_before",
    ),
    "N06": (
        "loadgen/test_recordings.py::test_azure_tables_have_times_and_lengths",
        "stack/test_trace.py::test_lengths_alone_share_nothing_and_say_so",
    ),
    "N07": (
        "loadgen/test_partial_blocks.py::test_ids_of_64_bits_stay_apart",
        "loadgen/test_partial_blocks.py::test_a_partial_block_of_one_row_is_not_the_full_one_of_another",
        "loadgen/test_partial_blocks.py::test_equal_ids_have_equal_lengths_afterwards",
    ),
    "N08": (
        "kvcache/test_feed.py::test_recurrent_groups_of_a_hybrid_model_are_ignored_whatever_their_shape",
        "kvcache/test_events.py::test_an_unreadable_event_still_says_which_group_it_is_of",
    ),
    "N09": ("kvcache/test_feed.py::test_adapters_share_nothing",),
    "N10": (
        "exporters/test_two_witnesses.py::test_what_a_prefill_engine_hands_over_is_no_hit",
        "exporters/test_two_witnesses.py::test_a_configured_role_says_so_at_any_share",
    ),
    "N11": ("exporters/test_renamed_families.py::test_a_second_connector_s_bytes_are_read_whatever_its_suffix",),
    "N12": ("exporters/test_several_on_one_page.py::test_workers_on_a_gateway_s_page_are_engines_of_their_own",),
    "N14": (
        "exporters/test_two_witnesses.py::test_lookups_that_waiting_requests_repeat_are_flagged",
        "exporters/test_two_witnesses.py::test_without_a_second_source_the_ratio_is_unknown_and_not_best",
    ),
    "N15": ("exporters/test_field_reports_2.py::test_the_docs_say_what_grafana_s_v2_dashboards_need",),
    "N16": (
        "loadgen/test_other_tools.py::test_the_same_run_reads_alike_from_every_tool",
        "loadgen/test_other_tools.py::test_grade_and_compare_take_them",
    ),
    "N17": (
        "loadgen/test_recordings.py::test_conversations_are_sessions_of_turns",
        "loadgen/test_recordings.py::test_packed_files_are_read",
        "loadgen/test_recording_kinds.py::test_a_file_of_each_kind_is_read_whole",
    ),
    "N18": (
        "loadgen/test_recordings.py::test_the_same_prompt_is_read_from_every_api",
        "loadgen/test_recordings.py::test_no_text_of_a_prompt_is_ever_lost",
    ),
    "N20": (
        "exporters/test_kv_events.py::test_every_rank_of_an_engine_is_heard_as_a_cache_of_its_own",
        "exporters/test_kv_events.py::test_a_page_of_more_engines_than_streams_lacks_ranks",
        "router/test_cache_view.py::test_a_worker_of_several_ranks_is_credited_with_what_all_of_them_hold",
    ),
    "N21": (
        "loadgen/grading/test_isolation_grades.py::test_what_nobody_sent_is_not_another_tenants",
        "loadgen/grading/test_summary.py::test_cached_tokens_that_nobody_sent_make_the_run_invalid_and_accuse_nobody",
        "exporters/test_record_witnesses.py::test_all_but_one_token_of_new_prompts_cached_is_no_cache",
    ),
    "N22": ("alerts/test_fleets.py::test_two_clusters_in_one_ruler_are_judged_apart",),
    "N24": (
        "kvcache/test_events.py::test_no_two_namespaces_have_one_root",
        "kvcache/test_events.py::test_an_extra_key_is_not_a_salt_of_the_same_text",
    ),
    "N25": ("alerts/test_slo_rules.py::test_a_histogram_is_cut_at_its_bound_classic_and_native",),
    "N26": ("alerts/test_fleets.py::test_mimirs_default_limits_are_kept",),
    "N27": (
        "alerts/test_alertmanager.py::test_one_fleet_never_silences_another",
        "alerts/test_inhibition.py::test_a_cause_silences_its_symptom_here_and_nowhere_else",
    ),
    "N28": ("loadgen/test_locustfile.py::test_failures_are_locusts_failures_and_percentiles_are_not_binned",),
    "N30": ("router/test_mixed_fleet.py::test_other_endpoints_pass_through_unread_and_are_counted",),
    "N31": ("exporters/test_renamed_families.py::test_llm_d_between_two_releases_had_another_prefix",),
    "N32": ("kvcache/test_events.py::test_no_two_namespaces_have_one_root",),
    "N33": ("stack/test_preflight.py::test_each_item_fails_by_its_own_evidence_alone",),
    "N34": (
        "exporters/test_field_reports_2.py::test_an_openmetrics_page_is_read_with_all_that_may_be_on_it",
        "exporters/test_exposition_formats.py::test_openmetrics_with_exemplars",
    ),
    "N35": (
        "loadgen/test_recordings.py::test_images_stay_at_their_place_and_tools_are_functions",
        "kvcache/test_media.py::test_prompts_with_different_pictures_differ_from_the_picture_on",
    ),
    "N36": (
        "router/test_mixed_fleet.py::test_an_image_is_part_of_the_hash_at_its_place",
        "kvcache/test_media.py::test_no_prediction_is_wrong_on_mixed_requests",
    ),
    "N37": ("kvcache/test_feed.py::test_a_block_of_two_copies_leaves_with_the_last",),
    "N38": ("loadgen/test_traffic_analysis.py::test_a_field_in_front_breaks_all_that_follows_and_is_pointed_at",),
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_shown_by_tests_that_exist(case: str) -> None:
    assert all(text_of(node) for node in CASES[case])


OPENMETRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# TYPE vllm:prefix_cache_queries counter
# UNIT vllm:prefix_cache_queries tokens
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0 # {trace_id="0af7"} 1.0 1700000000.123
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 400.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m",le="0.1"} 8 # {trace_id="0af7"} 0.067 1700000000.5
vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m",le="+Inf"} 10
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.2
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10
{"http.server.requests","engine"="0"} 5
# EOF
"""


def test_an_openmetrics_page_is_read_with_all_that_may_be_on_it(make_target: MakeTarget) -> None:
    """prometheus/client_golang#942 (N34): exemplars, `_created`, units, quoted names, and counters typed unknown."""
    made = make_target("e", OPENMETRICS)
    assert made.store is not None
    found = {name: made.store.total(name) for name in ("prefix_query_tokens", "prefix_hit_tokens")}
    assert found == {"prefix_query_tokens": 1000.0, "prefix_hit_tokens": 400.0}
    assert (made.store.total("ttft_seconds", "count"), made.store.total("ttft_seconds", "sum")) == (10.0, 1.2)
    flags = made.flags(0.0)
    assert not any(flags[flag] for flag in ("malformed_lines", "type_mismatch", "renamed_family", "family_twice"))
    tgi = make_target(
        "t", '# TYPE tgi_request_success unknown\ntgi_request_success{method="generate"} 12\ntgi_queue_size 3\n'
    )
    assert tgi.store is not None
    assert tgi.store.total("finished_requests") == 12.0
    assert not tgi.flags(0.0)["type_mismatch"]


def test_the_docs_say_what_grafana_s_v2_dashboards_need() -> None:
    """grafana/grafana#106381 (N15): feature toggles in Grafana 12, and applied through the API."""
    text = (DOCS / "dashboards.md").read_text()
    assert all(word in text for word in ("dashboardNewLayouts", "kubernetesDashboards", "grafanactl"))
