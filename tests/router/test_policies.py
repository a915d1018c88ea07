from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from prefixwatch.kvcache.blocks import as_tokens
from prefixwatch.router.policies import POLICIES, describe, make_policy
from prefixwatch.router.policies.least_load import kv_pressure_seconds
from prefixwatch.router.policies.sglang.prefix_hash import prefix_key
from prefixwatch.router.policy import Fleet, LoadReport, RouteRequest, Worker
from tests.router.fleets import BLOCK, a_fleet, a_request, serve_at_once

FIRST_ON_TIES = {"prefix_hash", "prefix_hash_v1", "cache_aware_v1", "mooncake"}
"""Deterministic by design or, for cache_aware_v1 and mooncake, the published fault F-1."""
BLIND_TO_REQUESTS_IN_FLIGHT = {
    *("prefix_hash", "prefix_hash_v1", "round_robin"),
    "prefixaware",  # no load term
    *("llmd_approx", "llmd_precise"),  # see load only as the engines last reported it
    *("flexlb_formula", "flexlb_learning"),  # what is still in the batch queue isn't counted
}


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.deterministic])
def test_a_deterministic_policy_ignores_its_seed(name: str) -> None:
    fleet, requests = a_fleet([3, 1, 2], {"w0": 4}), [a_request(k) for k in range(8)]
    assert serve_at_once(make_policy(name, seed=1), fleet, requests) == serve_at_once(
        make_policy(name, seed=2), fleet, requests
    )


@pytest.mark.parametrize("name", sorted(set(POLICIES) - FIRST_ON_TIES))
def test_an_idle_fleet_spreads_unique_prompts(name: str) -> None:
    """sgl-project/sglang#32983, F-1: deterministic ties send every miss on an idle fleet to one worker."""
    served = Counter(
        decision.worker
        for decision in serve_at_once(make_policy(name), a_fleet([0, 0, 0]), [a_request(1000 * k) for k in range(21)])
    )
    assert len(served) == 3
    assert max(served.values()) <= 14


@pytest.mark.parametrize("name", sorted(set(POLICIES) - BLIND_TO_REQUESTS_IN_FLIGHT))
def test_requests_in_flight_are_seen_before_the_next_decision(name: str) -> None:
    """sgl-project/sglang#15473 (RT03): eight concurrent long prompts split 4/4 (±1) over two workers."""
    policy, fleet = make_policy(name), a_fleet([0, 0])
    for k in range(8):
        request = a_request(100_000 * k, 32_768)
        chosen = policy.choose(request, fleet).worker
        policy.on_admit(request, chosen, 0.0)
        worker = next(worker for worker in fleet.workers if worker.name == chosen)
        worker.in_flight += 1
        worker.prefill_tokens += request.prompt_tokens
    assert abs(fleet.workers[0].in_flight - 4) <= 1


@pytest.mark.parametrize("name", ["cache_aware", "score", "least_load", "power_of_two"])
def test_a_miss_goes_by_load_and_not_by_the_size_of_the_cache(name: str) -> None:
    """sgl-project/sglang#14305 (RT02, F-3): A is cold and busy, B is full and idle; unique prompts go to B."""
    policy, fleet = make_policy(name), a_fleet([40, 0], served=[40, 10_000])
    assert {policy.choose(a_request(1000 * k), fleet).worker for k in range(100)} == {"w1"}


def test_an_unknown_name_lists_the_known_ones_and_the_closest() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'cache_awar': did you mean 'cache_aware'\?"):
        make_policy("cache_awar")


def test_an_unknown_option_or_a_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="policy score has no option 'betta'; it has prefill_tokens_per_second"):
        make_policy("score", options={"betta": 1})
    with pytest.raises(ValueError, match=r"policy score: .*float.*hotspot_weight"):
        make_policy("score", options={"hotspot_weight": "much"})


def test_the_description_is_complete_and_json_ready() -> None:
    by_name = {entry["name"]: entry for entry in describe()}
    assert list(by_name) == list(POLICIES)
    needs = {"tokens": True, "text": False, "events": False, "load": False, "history": True}
    assert by_name["cache_aware"]["needs"] == needs
    assert by_name["cache_aware"]["defaults"]["balance_abs_threshold"] == 64
    assert by_name["round_robin"]["deterministic"] is True
    assert all(entry["summary"] and entry["source"] and entry["reasons"] for entry in by_name.values())


def test_round_robin_takes_turns_in_name_order_whatever_order_it_is_shown() -> None:
    policy = make_policy("round_robin")
    forwards, backwards = a_fleet([0, 0, 0]), Fleet(a_fleet([0, 0, 0]).workers[::-1], lambda request: {}, 0.0)
    order = [policy.choose(a_request(), fleet).worker for fleet in (forwards, backwards, forwards, backwards)]
    assert order == ["w0", "w1", "w2", "w0"]


def test_round_robin_keeps_a_turn_for_each_set_of_candidates() -> None:
    policy = make_policy("round_robin")
    three, two = a_fleet([0, 0, 0]), a_fleet([0, 0])
    order = [policy.choose(a_request(), fleet).worker for fleet in (three, two, three, two)]
    assert order == ["w0", "w0", "w1", "w1"]


@pytest.mark.parametrize(("usage", "seconds"), [(0.0, 0.0), (0.5, 0.15), (0.9, 1.35), (0.999, 149.85), (1.0, 149.85)])
def test_kv_pressure_equals_the_golden_vector(usage: float, seconds: float) -> None:
    assert kv_pressure_seconds(usage) == pytest.approx(seconds)


def test_least_load_adds_queue_and_kv_pressure_in_seconds() -> None:
    reports = [
        LoadReport(at_seconds=0.0, waiting_uncached_tokens=4000, kv_usage_ratio=0.5),
        LoadReport(at_seconds=0.0, waiting=3, kv_usage_ratio=0.0),
        LoadReport(at_seconds=0.0, waiting_uncached_tokens=300, generation_tokens_per_second=100.0),
    ]
    decision = make_policy("least_load").choose(a_request(), a_fleet([0, 0, 0], report=reports))
    assert decision.scores == {"w0": 2.15, "w1": pytest.approx(3 * 1024 / 2000), "w2": 3.15}  # usage as w0's
    assert (decision.worker, decision.reason) == ("w1", "least_drain_time")


def test_least_load_counts_what_it_sent_since_the_report() -> None:
    """smg#1683, F-6: between polls a stale report must not draw every arrival to one worker."""
    policy = make_policy("least_load")
    old = [LoadReport(at_seconds=1.0, waiting=0, kv_usage_ratio=0.1)] * 2
    policy.on_admit(a_request(prompt_tokens=2000), "w0", 2.0)
    assert policy.choose(a_request(), a_fleet([1, 0], report=old)).worker == "w1"
    fresh = [LoadReport(at_seconds=3.0, waiting=0, kv_usage_ratio=0.1)] * 2
    decision = policy.choose(a_request(), a_fleet([0, 0], report=fresh))
    assert decision.scores["w0"] == decision.scores["w1"]


def test_least_load_scores_a_worker_without_a_report_by_what_is_in_flight() -> None:
    reports = [None, LoadReport(at_seconds=0.0, waiting=0, generation_tokens_per_second=1024.0)]
    decision = make_policy("least_load").choose(a_request(), a_fleet([3, 9], report=reports))
    assert decision.scores == {"w0": 3.0, "w1": 0.0}


def test_least_load_without_any_report_joins_the_shortest_queue() -> None:
    decision = make_policy("least_load").choose(a_request(), a_fleet([3, 1, 2]))
    assert (decision.worker, decision.reason) == ("w1", "shortest_queue")


def test_power_of_two_goes_by_kv_usage_when_both_report_it() -> None:
    full, half = LoadReport(0.0, kv_usage_ratio=0.9), LoadReport(0.0, kv_usage_ratio=0.5)
    decision = make_policy("power_of_two").choose(a_request(), a_fleet([0, 9], report=[full, half]))
    assert (decision.worker, decision.reason) == ("w1", "lower_kv_usage")


def test_power_of_two_goes_by_requests_in_flight_otherwise() -> None:
    decision = make_policy("power_of_two").choose(
        a_request(), a_fleet([0, 9], report=[None, LoadReport(0.0, kv_usage_ratio=0.5)])
    )
    assert (decision.worker, decision.reason) == ("w0", "fewer_in_flight")
    assert make_policy("power_of_two").choose(a_request(), a_fleet([4])).reason == "only_worker"


def golden_fleet(*in_flight: int) -> Fleet:
    return Fleet([Worker(f"http://w{k}:8000", load) for k, load in enumerate(in_flight)], lambda request: {}, 0.0)


def test_prefix_hash_key_and_home_equal_the_golden_vector() -> None:
    request = a_request(1, 48)
    assert prefix_key(request.tokens) == "590a1f69acd5cad2"
    assert make_policy("prefix_hash").choose(request, golden_fleet(0, 0, 0, 0)).worker == "http://w0:8000"


def test_prefix_hash_finds_the_next_home_when_the_first_is_not_a_candidate() -> None:
    policy = make_policy("prefix_hash")
    whole = golden_fleet(0, 0, 0, 0)
    policy.choose(a_request(1, 48), whole)
    without_home = Fleet(whole.workers[1:], whole.lookup, 0.0)
    assert policy.choose(a_request(1, 48), without_home).worker == "http://w1:8000"
    policy.on_worker_removed("http://w0:8000")
    assert policy.choose(a_request(1, 48), without_home).worker == "http://w1:8000"


def test_prefix_hash_reads_the_first_256_tokens_only() -> None:
    longer = as_tokens([*range(256), 7, 8, 9])
    assert prefix_key(longer) == prefix_key(as_tokens(range(256)))


@pytest.mark.parametrize(
    ("name", "in_flight", "worker", "reason"),
    [
        ("prefix_hash_v1", (0, 0, 0, 0), 0, "ring_hit"),
        ("prefix_hash_v1", (3, 2, 2, 2), 0, "ring_hit"),  # 3 ≤ 10/4 · 1.25
        ("prefix_hash_v1", (4, 2, 1, 2), 2, "load_balance_walk"),  # 4 > 10/4 · 1.25
        ("prefix_hash", (4, 2, 1, 2), 0, "ring_hit"),
        ("prefix_hash", (14, 1, 1, 1), 0, "ring_hit"),  # 14 ≤ 18/4 + 10
        ("prefix_hash", (15, 1, 1, 1), 1, "load_balance_walk"),  # 15 > 19/4 + 10; first of the equally loaded
    ],
)
def test_prefix_hash_spills_to_the_least_loaded_worker_that_passes(
    name: str, in_flight: tuple[int, ...], worker: int, reason: str
) -> None:
    decision = make_policy(name).choose(a_request(1, 48), golden_fleet(*in_flight))
    assert (decision.worker, decision.reason) == (f"http://w{worker}:8000", reason)


def test_the_absolute_margin_stops_false_trips_on_small_counts() -> None:
    """smg-project/smg#2150 (RT43): Poisson(10) in flight a worker: the relative test alone trips about 1 in 6."""
    loads = np.random.default_rng(1).poisson(10, size=(400, 4))

    def trips(name: str) -> float:
        policy = make_policy(name)
        decisions = [policy.choose(a_request(1, 48), golden_fleet(*map(int, row))) for row in loads]
        return sum(decision.reason != "ring_hit" for decision in decisions) / len(decisions)

    assert 0.10 < trips("prefix_hash_v1") < 0.25
    assert trips("prefix_hash") < 0.01


def test_prefix_hash_without_token_ids_goes_to_the_least_loaded() -> None:
    bare = RouteRequest("r", 100, as_tokens([]), np.array([1], dtype=np.uint64), BLOCK)
    decision = make_policy("prefix_hash").choose(bare, a_fleet([2, 1, 1]))
    assert (decision.worker, decision.reason) == ("w1", "no_tokens")


def test_cache_aware_default_sets() -> None:
    def thresholds(**options: Any) -> tuple[float, float, float]:
        chosen = make_policy("cache_aware", options=options).options
        return chosen.cache_threshold, chosen.balance_abs_threshold, chosen.balance_rel_threshold

    assert thresholds() == (0.3, 64, 1.5)
    assert thresholds(defaults="struct") == (0.5, 32, 1.1)
    assert thresholds(defaults="struct", cache_threshold=0.2) == (0.2, 32, 1.1)


def test_cache_aware_match_must_exceed_the_threshold() -> None:
    policy = make_policy("cache_aware", options={"cache_threshold": 0.5})
    at_threshold = policy.choose(a_request(), a_fleet([1, 0], {"w0": 5}))
    above = policy.choose(a_request(), a_fleet([1, 0], {"w0": 6}))
    assert (at_threshold.worker, at_threshold.reason, at_threshold.hit_blocks) == ("w1", "below_threshold", 0)
    assert (above.worker, above.reason, above.hit_blocks) == ("w0", "cache_hit", 6)


def test_cache_aware_by_events_takes_any_match() -> None:
    policy = make_policy("cache_aware", options={"index": "events"})
    assert policy.choose(a_request(), a_fleet([1, 0], {"w0": 1})).reason == "cache_hit"
    assert policy.choose(a_request(), a_fleet([1, 0])).reason == "miss_least_load"


def test_cache_aware_takes_the_least_loaded_of_the_deepest_holders() -> None:
    decision = make_policy("cache_aware").choose(a_request(), a_fleet([3, 2, 0], {"w0": 8, "w1": 8, "w2": 7}))
    assert (decision.worker, decision.hit_blocks) == ("w1", 8)


def test_cache_aware_decides_each_request_by_itself() -> None:
    """smg-project/smg#2161 (RT44): hot prefix P leaves its overloaded worker, Q keeps its own warm worker.

    Also sgl-project/sglang#32195 (RT06, F-2): one hot worker doesn't turn affinity off for everyone.
    """
    policy, loads = make_policy("cache_aware"), [2, 2, 2, 120, 2, 2, 2, 2]
    hot = policy.choose(a_request(1), a_fleet(loads, {"w3": 9}))
    other = policy.choose(a_request(2), a_fleet(loads, {"w5": 9}))
    assert hot.reason == "spill_overloaded"
    assert hot.worker != "w3"
    assert (other.worker, other.reason) == ("w5", "cache_hit")


@pytest.mark.parametrize(
    ("in_flight", "options", "reason"),
    [
        ([6, 0, 0], {}, "cache_hit"),  # 6 ≤ 2 + 4, the least margin
        ([7, 0, 0], {}, "spill_overloaded"),
        ([4, 0, 0], {"balance_abs_threshold": 1}, "spill_overloaded"),  # unless it is set lower
        ([30, 16, 14, 4], {"balance_rel_threshold": 1.0}, "spill_overloaded"),  # 30 > 16 + 2 · √16
        ([24, 16, 14, 10], {"balance_rel_threshold": 1.0}, "cache_hit"),
        ([400, 300, 300, 300], {}, "cache_hit"),  # ≤ 1.5 × mean
        ([2200, 1200, 1200, 1200], {}, "spill_overloaded"),  # > 1450 + 64, where two deviations are 76
        ([2260, 2180, 2180, 2180], {"balance_rel_threshold": 1.0}, "cache_hit"),  # 2260 ≤ 2200 + 64
    ],
)
def test_cache_aware_keeps_an_owner_within_either_margin(
    in_flight: list[int], options: dict[str, float], reason: str
) -> None:
    policy = make_policy("cache_aware", options=options)
    assert policy.choose(a_request(), a_fleet(in_flight, {"w0": 9})).reason == reason


def test_cache_aware_under_kv_pressure_ignores_locality() -> None:
    policy = make_policy("cache_aware", options={"kv_overload_threshold": 0.9})
    reports = [LoadReport(0.0, kv_usage_ratio=0.95), LoadReport(0.0, kv_usage_ratio=0.1)]
    decision = policy.choose(a_request(), a_fleet([1, 0], {"w0": 10}, report=reports))
    assert (decision.worker, decision.reason) == ("w1", "kv_pressure")


def test_cache_aware_overlap_decay_discounts_a_worker_with_prefill_waiting() -> None:
    policy = make_policy("cache_aware", options={"overlap_decay": 1.0})
    waiting = a_fleet([1, 1], {"w0": 10, "w1": 6}, prefill_tokens=[160, 0])  # 10 / (1 + 160/160) < 6
    assert policy.choose(a_request(), waiting).worker == "w1"


def test_cache_aware_temperature_draws_among_holders() -> None:
    policy = make_policy("cache_aware", options={"selection_temperature": 1.0})
    drawn = Counter(policy.choose(a_request(), a_fleet([0, 0], {"w0": 10, "w1": 5})).worker for _ in range(2000))
    assert drawn["w1"] / drawn["w0"] == pytest.approx(math.exp(-1), rel=0.2)


PLAIN = {
    "prefill_tokens_per_second": 1000.0,
    "decode_ms_per_request": 5.0,
    "hotspot_weight": 0.0,
    "queue_patience": 1e15,
}
"""1 ms a token, queues in full milliseconds."""


def test_score_is_hit_less_queue_in_milliseconds() -> None:
    fleet = a_fleet([2, 0, 1], {"w0": 5, "w2": 3}, prefill_tokens=[100, 0, 0])
    decision = make_policy("score", options=PLAIN).choose(a_request(), fleet)
    assert decision.scores == pytest.approx({"w0": 80 - 100 - 10, "w1": 0, "w2": 48 - 5})
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w2", "hit_sacrificed", 3)


def test_score_takes_the_engine_at_its_word_when_it_has_more_in_flight() -> None:
    """smg-project/smg#1621 (RT05): each of several routers sees only its own requests."""
    reports = [LoadReport(0.0, running=40, waiting=20), LoadReport(0.0, running=0, waiting=0)]
    decision = make_policy("score", options=PLAIN).choose(a_request(), a_fleet([20, 0], {"w0": 10}, report=reports))
    assert decision.scores == pytest.approx({"w0": 160 - 300, "w1": 0})


def test_score_weighs_queues_by_their_relative_length_when_every_worker_has_one() -> None:
    policy = make_policy("score", options={**PLAIN, "queue_patience": 0.25})
    decision = policy.choose(a_request(), a_fleet([800, 792], {"w0": 10}))
    gain = 40 / (40 + 3980)  # patience 0.25 · 160 ms; mean queue 3980 ms
    assert decision.scores == pytest.approx({"w0": 160 - gain * 4000, "w1": -gain * 3960})
    assert decision.reason == "hit_deepest"


def test_score_with_transfer_credits_what_can_be_pulled() -> None:
    policy = make_policy("score", options={**PLAIN, "transfer_tokens_per_second": 2000.0})
    assert policy.choose(a_request(), a_fleet([0, 0], {"w0": 10})).scores == {"w0": 160, "w1": 80}


def test_score_prices_memory_pressure_where_capacity_and_usage_are_known() -> None:
    policy = make_policy("score", options={**PLAIN, "kv_capacity_tokens": 1600})
    reports = [LoadReport(0.0, kv_usage_ratio=0.9), None]
    decision = policy.choose(a_request(), a_fleet([0, 0], report=reports))
    assert decision.scores == {"w0": pytest.approx(-160 * 0.5), "w1": pytest.approx(-160 * 0.5)}  # as far as is known


def test_score_spreads_paced_sessions() -> None:
    """AMD-AGI/Infera#103 (RT04): nothing is ever in flight at a decision, and a shared opening must not take all.

    Two workers, 56 sessions of 8 turns one after another, all with the same opening; a session stays where it began.
    """
    policy, held, turns = make_policy("score"), Counter[tuple[str, int]](), Counter[str]()
    for session in range(56):
        placed = []
        for turn in range(8):
            hits = {w: (5 if held[w, -1] else 0) + held[w, session] for w in ("w0", "w1")}
            now = 0.5 * (8 * session + turn)
            decision = policy.choose(a_request(prompt_tokens=1600), a_fleet([0, 0], hits, now))
            policy.on_admit(a_request(), decision.worker, now)
            held[decision.worker, -1], held[decision.worker, session] = 1, 90
            placed.append(decision.worker)
        turns.update(placed)
        assert len(set(placed[1:])) == 1
    assert max(turns.values()) / turns.total() < 0.6


def test_score_forgets_a_worker_that_left() -> None:
    policy = make_policy("score")
    for _ in range(50):
        policy.on_admit(a_request(), "w0", 0.0)
    policy.on_worker_removed("w0")
    scores = policy.choose(a_request(), a_fleet([0, 0], now=61.0)).scores
    assert scores["w0"] == scores["w1"]
