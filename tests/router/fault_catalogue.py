"""Which test shows each published routing fault, and which shows that our own policies don't have it.

F-1 … F-18 are this project's catalogue of faults in published policies; RT… are field reports about routers. A fault
that no policy could show (it sits in the proxy, the ledger or the KV-event feed) says where it is tested instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Tests are `room/module::function`. `elsewhere` is why no policy of ours shows the fault as published."""

    what: str
    shown: tuple[str, ...] = ()
    """On the policy as its authors wrote it."""
    free: tuple[str, ...] = ()
    """On `score` and `affinity`, or on the part that takes the fault's place."""
    elsewhere: str = ""


ROUTER_ITSELF = "no policy's doing: the router that all policies share is tested for it"
EVENT_FEED = "no policy's doing: the KV-event feed that all policies share is tested for it"

CATALOGUE: dict[str, Fault] = {
    "F-1": Fault(
        "misses on an idle fleet all go to one worker",
        shown=(
            "router/test_cache_aware_v1::test_every_miss_on_an_idle_fleet_goes_to_the_first_worker",
            "router/test_mooncake_policy::test_an_idle_fleet_sends_every_miss_to_the_first_worker",
        ),
        free=("router/test_policies::test_an_idle_fleet_spreads_unique_prompts",),
    ),
    "F-2": Fault(
        "one hot worker switches locality off for all",
        shown=("router/test_cache_aware_v1::test_one_hot_worker_turns_affinity_off_for_all",),
        free=(
            "router/test_cache_aware_v1::test_one_hot_worker_turns_affinity_off_for_all",
            "router/test_policies::test_cache_aware_decides_each_request_by_itself",
        ),
    ),
    "F-3": Fault(
        "a new worker's small tree draws every miss",
        shown=("router/test_published_faults::test_by_the_smallest_tree_a_worker_that_just_joined_gets_every_miss",),
        free=(
            "router/test_published_faults::test_by_the_smallest_tree_a_worker_that_just_joined_gets_every_miss",
            "router/test_policies::test_a_miss_goes_by_load_and_not_by_the_size_of_the_cache",
        ),
    ),
    "F-4": Fault(
        "load isn't counted on some path",
        free=(
            "router/test_published_faults::test_load_is_counted_and_given_back_on_every_path",
            "router/test_proxy::test_after_a_storm_of_aborts_every_gauge_is_back_at_zero",
        ),
        elsewhere=ROUTER_ITSELF,
    ),
    "F-5": Fault(
        "thresholds in requests scale with the number of routers",
        shown=(
            "router/test_published_faults::test_three_routers_each_stay_below_a_threshold_that_the_fleet_is_over",
            "simulator/test_multi_router::test_counters_of_one_replica_see_only_its_share",
            "simulator/test_multi_router::test_routers_that_only_know_what_they_routed_lose_hits",
        ),
        free=(
            "router/test_published_faults::test_three_routers_each_stay_below_a_threshold_that_the_fleet_is_over",
            "router/test_affinity::test_every_replica_of_the_router_gives_a_miss_the_same_home",
            "simulator/test_multi_router::test_routers_that_hear_the_engines_lose_next_to_nothing",
        ),
    ),
    "F-6": Fault(
        "stale load reports make a herd",
        shown=("router/test_llmd_policies::test_requests_since_the_last_report_are_not_seen",),
        free=(
            "router/test_llmd_policies::test_requests_since_the_last_report_are_not_seen",
            "router/test_policies::test_least_load_counts_what_it_sent_since_the_report",
            "router/test_stale_reports::test_a_report_too_old_is_no_report",
        ),
    ),
    "F-7": Fault(
        "hits behind a hole are counted",
        shown=("router/test_llmd_policies::test_approx_counts_hashes_without_their_predecessors",),
        free=("router/test_llmd_policies::test_the_block_index_counts_only_what_can_be_reused",),
    ),
    "F-8": Fault(
        "the first holder is credited, not the deepest",
        shown=("router/test_production_stack_policies::test_kvaware_credits_the_first_holder_and_others_the_deepest",),
        free=("router/test_production_stack_policies::test_kvaware_credits_the_first_holder_and_others_the_deepest",),
    ),
    "F-9": Fault(
        "the routing history grows without bound",
        shown=("router/test_production_stack_policies::test_prefixaware_never_forgets_a_path",),
        free=(
            "router/test_cache_view::test_history_forgets_the_least_recent_tail_first",
            "router/test_llmd_policies::test_the_lru_is_bounded_and_loses_heads_first",
        ),
    ),
    "F-10": Fault(
        "events in other encodings, with gaps, unknown parents, after restarts",
        free=(
            "kvcache/test_events::test_maps_and_arrays_say_the_same",
            "kvcache/test_feed_sequence::test_a_gap_asks_for_a_replay_and_changes_nothing_meanwhile",
            "kvcache/test_feed_sequence::test_a_sequence_that_runs_backwards_is_a_new_engine",
            "kvcache/test_feed::test_a_block_whose_parent_never_comes_is_dropped_and_counted",
            "kvcache/test_feed::test_any_order_of_lives_ends_the_same",
        ),
        elsewhere=EVENT_FEED,
    ),
    "F-11": Fault(
        "a consistent hash pins a saturated worker",
        shown=("router/test_published_faults::test_a_session_stays_with_a_saturated_worker",),
        free=(
            "router/test_published_faults::test_a_session_stays_with_a_saturated_worker",
            "router/test_affinity::test_a_home_with_more_than_its_share_hands_on_along_the_ring",
        ),
    ),
    "F-12": Fault(
        "an unhealthy owner's requests all go to the first worker",
        shown=(
            "router/test_cache_aware_v1::test_an_unhealthy_owners_requests_all_go_to_the_first_worker_and_are_not_noted",
        ),
        free=(
            "router/test_cache_aware_v1::test_an_unhealthy_owners_requests_all_go_to_the_first_worker_and_are_not_noted",
        ),
    ),
    "F-13": Fault(
        "simultaneous cold requests for one prefix compute it on every worker",
        shown=("router/test_flexlb::test_a_burst_with_a_new_prefix_is_prefilled_on_every_worker",),
        free=(
            "router/test_published_faults::test_a_cold_burst_for_one_prefix_is_not_computed_everywhere",
            "router/test_oracle::test_a_burst_with_a_new_prefix_is_not_prefilled_everywhere",
        ),
    ),
    "F-14": Fault(
        "block sizes that don't match go unnoticed",
        free=(
            "kvcache/test_feed::test_sizes_that_do_not_divide_are_refused_by_name",
            "kvcache/test_subscriber::test_a_block_size_that_does_not_fit_is_said_and_credits_nothing",
        ),
        elsewhere=EVENT_FEED,
    ),
    "F-15": Fault(
        "tokenising holds up the event loop",
        free=("router/test_proxy::test_a_long_prompt_does_not_hold_up_the_others",),
        elsewhere=ROUTER_ITSELF,
    ),
    "F-16": Fault(
        "batches that run side by side are taken as one after another",
        shown=("router/test_flexlb::test_two_parallel_batches_are_taken_as_served_one_after_another",),
        free=("router/test_policies::test_score_is_hit_less_queue_in_milliseconds",),
    ),
    "F-17": Fault(
        "the learning predictor stays blind to the cache",
        shown=(
            "router/test_prefill_predictor::test_the_learning_predictor_stays_blind_to_the_cache_for_hundreds_of_batches",
        ),
        free=("router/test_prefill_predictor::test_calibration_recovers_base_tokens_and_attention",),
    ),
    "F-18": Fault(
        "a position among the candidates is taken for a worker",
        free=("router/test_preble::test_of_several_holders_the_cheaper_one_is_chosen_by_name_and_not_by_position",),
        elsewhere="fixed in our Preble and said so in its description: kept, it would only show a slip of the pen",
    ),
    "RT01": Fault(
        "placement by cache alone queues a popular prefix at one engine",
        shown=(
            "router/test_production_stack_policies::test_loadaware_balances_the_fleet_at_almost_no_hit_loss",
            "router/test_production_stack_policies::test_prefixaware_sends_a_hot_prefix_to_one_worker_whatever_its_load",
        ),
        free=(
            "router/test_affinity::test_it_balances_a_hot_prefix_mix_at_almost_no_hit_loss",
            "simulator/test_simulate::test_weighing_load_against_cache_balances_the_fleet_at_almost_no_hit_loss",
        ),
    ),
    "RT02": Fault(
        "on a miss the smallest tree wins, however busy",
        shown=("router/test_published_faults::test_by_the_smallest_tree_a_worker_that_just_joined_gets_every_miss",),
        free=("router/test_policies::test_a_miss_goes_by_load_and_not_by_the_size_of_the_cache",),
    ),
    "RT03": Fault(
        "load counts only once the answer has begun",
        free=(
            "router/test_policies::test_requests_in_flight_are_seen_before_the_next_decision",
            "router/test_ledger::test_a_request_counts_from_admission_to_its_end",
            "router/test_proxy::test_concurrent_cold_requests_split_evenly",
            "router/test_flexlb::test_without_batch_queue_and_cache_requests_in_flight_are_seen",
        ),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT04": Fault(
        "paced sessions, nothing in flight, all on one worker",
        shown=(
            "router/test_production_stack_policies"
            "::test_paced_sessions_end_up_on_one_worker_where_only_requests_in_flight_count",
        ),
        free=(
            "router/test_affinity::test_paced_sessions_spread_and_stay",
            "router/test_policies::test_score_spreads_paced_sessions",
        ),
    ),
    "RT05": Fault(
        "each of several routers sees its own requests only",
        shown=("router/test_published_faults::test_three_routers_each_stay_below_a_threshold_that_the_fleet_is_over",),
        free=(
            "router/test_affinity::test_the_engine_is_taken_at_its_word_when_it_has_more_in_flight",
            "router/test_policies::test_score_takes_the_engine_at_its_word_when_it_has_more_in_flight",
        ),
    ),
    "RT06": Fault(
        "hits collapse just when load is high",
        shown=("router/test_cache_aware_v1::test_hits_fall_when_load_trips_the_switch",),
        free=("router/test_cache_aware_v1::test_hits_fall_when_load_trips_the_switch",),
    ),
    "RT09": Fault(
        "token-id prompts are keyed by their length",
        free=(
            "kvcache/test_blocks::test_prompts_of_equal_length_differ_by_content",
            "router/test_proxy::test_token_id_prompts_are_used_as_they_are",
        ),
        elsewhere="no policy reads a prompt: all get the blocks and tokens that the router makes of it",
    ),
    "RT11": Fault(
        "part of a second tier's chunk is credited",
        free=(
            "kvcache/test_index::test_credit_comes_in_whole_retrieval_units",
            "kvcache/test_feed::test_a_tiers_large_chunks_are_credited_whole",
        ),
        elsewhere=EVENT_FEED,
    ),
    "RT12": Fault(
        "a partial last block is credited whole",
        free=(
            "kvcache/test_index::test_a_match_never_exceeds_the_prompt",
            "kvcache/test_blocks::test_a_partial_last_block_is_no_match",
        ),
        elsewhere="no policy counts blocks itself: all get the depths that the index finds",
    ),
    "RT14": Fault(
        "gaps in the event stream are ignored",
        free=(
            "kvcache/test_feed_sequence::test_a_gap_asks_for_a_replay_and_changes_nothing_meanwhile",
            "kvcache/test_subscriber::test_a_gap_is_filled_from_the_replay",
        ),
        elsewhere=EVENT_FEED,
    ),
    "RT16": Fault(
        "a cleared cache still draws its prefixes",
        free=(
            "kvcache/test_feed_sequence::test_a_cleared_cache_is_believed",
            "router/test_router_kv_events::test_the_router_predicts_what_the_engine_says_it_holds",
        ),
        elsewhere=EVENT_FEED,
    ),
    "RT17": Fault(
        "a restarted worker keeps its placements",
        free=(
            "kvcache/test_subscriber::test_a_restarted_engine_is_noticed_before_it_says_anything",
            "router/test_worker_health::test_a_refused_connection_means_that_its_cache_is_gone",
            "router/test_cache_view::test_a_removed_worker_is_forgotten_at_once",
            "router/test_every_policy::test_nothing_is_kept_of_workers_that_left",
        ),
        elsewhere="every policy is told that a worker left, and tested to forget it",
    ),
    "RT18": Fault(
        "a late removal erases what was stored since",
        free=("kvcache/test_feed::test_a_late_removal_of_an_earlier_life_erases_nothing",),
        elsewhere=EVENT_FEED,
    ),
    "RT19": Fault(
        "a dead worker stays a candidate",
        free=(
            "router/test_proxy_faults::test_a_killed_engine_leaves_the_candidates_with_the_first_refusal",
            "router/test_worker_health::test_a_failed_request_takes_it_out_at_once_and_has_it_probed",
        ),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT22": Fault(
        "errors and aborts leak requests in flight",
        free=("router/test_proxy::test_after_a_storm_of_aborts_every_gauge_is_back_at_zero",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT23": Fault(
        "a worker that rejoins drives its counter below zero",
        free=(
            "router/test_ledger::test_a_worker_that_rejoins_under_its_name_starts_at_zero",
            "router/test_every_policy::test_a_worker_may_leave_while_requests_are_out_and_come_back",
        ),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT24": Fault(
        "long requests drop out of the account by age",
        shown=("router/test_dynamo_kv::test_a_request_that_never_ends_leaves_the_books_after_300_seconds",),
        free=("router/test_ledger::test_a_long_request_is_kept_until_its_stream_ends",),
    ),
    "RT26": Fault(
        "a pool of 100 connections caps the fleet",
        free=("router/test_proxy::test_150_streams_run_at_once",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT27": Fault(
        "the list of models fails with any worker down",
        free=("router/test_proxy::test_models_of_healthy_engines_are_merged",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT30": Fault(
        "large prompts are refused with 413",
        free=("router/test_proxy::test_large_bodies_pass",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT31": Fault(
        "the stream is buffered on its way",
        free=("router/test_proxy::test_each_event_is_passed_on_at_once",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT32": Fault(
        "characters split between two reads are damaged",
        free=("router/test_proxy::test_characters_split_between_two_reads_survive",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT36": Fault(
        "only choosing is timed, not the way through the router",
        free=("router/test_published_faults::test_the_whole_way_through_the_router_is_timed",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT37": Fault(
        "tokenising takes its time unseen",
        free=("router/test_published_faults::test_the_whole_way_through_the_router_is_timed",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT38": Fault(
        "TTFT is taken from the last chunk",
        free=("router/test_proxy::test_ttft_is_the_first_content_and_not_the_last_chunk",),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT39": Fault(
        "some requests hang without an error",
        free=(
            "router/test_published_faults::test_a_request_that_hangs_shows_by_its_age_and_ends_at_its_deadline",
            "router/test_proxy_faults::test_a_stream_that_falls_silent_times_out",
        ),
        elsewhere=ROUTER_ITSELF,
    ),
    "RT40": Fault(
        "a first block that all prompts share gathers them on one worker",
        shown=(
            "simulator/test_simulate::test_a_common_first_block_gathers_the_fleet_on_one_worker_unless_load_counts",
        ),
        free=("simulator/test_simulate::test_a_common_first_block_gathers_the_fleet_on_one_worker_unless_load_counts",),
    ),
    "RT43": Fault(
        "a purely relative overload test trips by chance",
        shown=("router/test_policies::test_the_absolute_margin_stops_false_trips_on_small_counts",),
        free=("router/test_affinity::test_chance_differences_in_load_do_not_cost_a_long_prompt_its_cache",),
    ),
    "RT44": Fault(
        "no value of a fleet-wide switch is right",
        shown=(
            "router/test_cache_aware_v1::test_one_hot_worker_turns_affinity_off_for_all",
            "router/test_cache_aware_v1::test_a_large_threshold_lets_one_worker_queue_instead",
        ),
        free=(
            "router/test_cache_aware_v1::test_one_hot_worker_turns_affinity_off_for_all",
            "router/test_policies::test_cache_aware_decides_each_request_by_itself",
        ),
    ),
}
