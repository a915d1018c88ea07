"""Our affinity policy: home, holders, load, share and hardware, each in prompt tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulated import SharedPrefixWorkload, session_requests, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.affinity import Affinity
from prefixwatch.router.policy import LoadReport, RouteRequest
from prefixwatch.simulator.runs import simulate_requests
from tests.router.fleets import BLOCK, a_fleet, a_request, serve

PLAIN: dict[str, Any] = {"hotspot_weight": 0.0, "home_ratio": 0.0}
ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 12_000), block_size=BLOCK, capacity_blocks=20_000)


def home_of(request: RouteRequest, workers: int = 3) -> str:
    return Affinity().choose(request, a_fleet([0] * workers)).worker


def test_every_replica_of_the_router_gives_a_miss_the_same_home() -> None:
    fleet, requests = a_fleet([0] * 8), [a_request(1000 * k) for k in range(50)]
    placed = [[Affinity(seed=seed).choose(request, fleet) for request in requests] for seed in (1, 2)]
    assert [d.worker for d in placed[0]] == [d.worker for d in placed[1]]
    assert {decision.reason for decision in placed[0]} == {"home"}
    assert len({decision.worker for decision in placed[0]}) > 5


def test_the_sticky_key_is_the_session_else_the_opening_within_the_tenant() -> None:
    policy, fleet = Affinity(), a_fleet([0] * 16)

    def homes(*requests: RouteRequest) -> set[str]:
        return {policy.choose(request, fleet).worker for request in requests}

    assert len(homes(*(a_request(1000 * k, session="s") for k in range(9)))) == 1
    assert len(homes(*(a_request(1, 256 + k) for k in range(9)))) == 1
    assert len(homes(*(a_request(session="s", tenant=f"t{k}") for k in range(9)))) > 4
    assert len(homes(*(a_request(1, session=f"s{k}") for k in range(9)))) > 4


def test_scores_are_values_less_load_and_hot_spots_in_tokens() -> None:
    request = a_request(1, 160)
    fleet = a_fleet([1, 0], {"w0": 5}, prefill_tokens=[64, 0])
    mean, patience = (64 + 256) / 2, 160
    price = patience / (patience + mean)
    decision = Affinity(**PLAIN).choose(request, fleet)
    assert decision.scores == pytest.approx({"w0": 160 + 80 - price * 160, "w1": 160 + price * 160})

    home = home_of(request, 2)
    decision = Affinity(hotspot_weight=0.0).choose(request, a_fleet([0, 0], {"w0": 2}))
    expected = {"w0": 160.0 + 32, "w1": 160.0}
    expected[home] += 0.5 * (160 - 32)
    assert decision.scores == pytest.approx(expected)

    policy = Affinity(home_ratio=0.0)
    for _ in range(8):
        policy.on_admit(request, "w0", 0.0)
    share = (8 + 4) / (8 + 4 + 4)
    decision = policy.choose(request, a_fleet([0, 0]))
    assert decision.scores == pytest.approx({"w0": 160 - 2 * 160 * (share - 0.5), "w1": 160})


def test_a_holder_of_more_than_a_third_beats_the_home() -> None:
    request = a_request(1, 1200 * BLOCK)
    home = home_of(request)
    holder = next(name for name in ("w0", "w1", "w2") if name != home)
    kept = Affinity().choose(request, a_fleet([0] * 3, {holder: 401}))
    left = Affinity().choose(request, a_fleet([0] * 3, {holder: 399}))
    assert (kept.worker, kept.reason) == (holder, "hit_deepest")
    assert (left.worker, left.reason) == (home, "home")


def test_the_deepest_of_several_holders_wins_and_of_equal_ones_the_less_loaded() -> None:
    request = a_request(1, 1600)
    assert Affinity(**PLAIN).choose(request, a_fleet([0, 0, 0], {"w1": 40, "w2": 90})).worker == "w2"
    assert Affinity(**PLAIN).choose(request, a_fleet([0, 2, 1], {"w1": 90, "w2": 90})).worker == "w2"


def test_a_busy_home_is_passed_over() -> None:
    request = a_request(1, 160)
    home = home_of(request)
    loads = [9 if name == home else 0 for name in ("w0", "w1", "w2")]
    decision = Affinity().choose(request, a_fleet(loads))
    assert decision.reason == "home_passed_over"
    assert decision.worker != home


def test_a_home_with_more_than_its_share_hands_on_along_the_ring() -> None:
    """F-11 (PrimeIntellect-ai/prime-rl#3255): one hot key. Its second home is as stable as the first."""
    policy, request = Affinity(), a_request(1, 160)
    placed = Counter(serve(policy, a_fleet([0, 0, 0, 0]), request).worker for _ in range(200))
    assert max(placed.values()) < 0.4 * 200
    first = home_of(request, 4)
    seconds = set()
    for _ in range(2):
        again = Affinity(hotspot_weight=0.0)
        for _ in range(40):
            again.on_admit(request, first, 0.0)
        seconds.add(again.choose(request, a_fleet([0, 0, 0, 0])).worker)
    assert len(seconds) == 1
    assert first not in seconds


def test_the_engine_is_taken_at_its_word_when_it_has_more_in_flight() -> None:
    """smg-project/smg#1621 (RT05): each of several routers sees only its own requests."""
    reports = [LoadReport(0.0, running=40, waiting=20), LoadReport(0.0, running=0, waiting=0)]
    policy = Affinity(**PLAIN)
    assert policy.choose(a_request(), a_fleet([20, 20], {"w0": 4}, report=reports)).worker == "w1"
    assert policy.choose(a_request(), a_fleet([20, 20], {"w0": 4})).worker == "w0"


def test_chance_differences_in_load_do_not_cost_a_long_prompt_its_cache() -> None:
    """smg-project/smg#2150 (RT43): Poisson(10) in flight a worker; prefix_hash_v1 trips 1 in 6 times."""
    request = a_request(1, 8192)
    loads = np.random.default_rng(1).poisson(10, size=(400, 4)).tolist()
    for name in ("affinity", "score"):
        policy = make_policy(name)
        kept = [policy.choose(request, a_fleet(row, {"w0": 460})).worker == "w0" for row in loads]
        assert sum(kept) > 0.99 * len(kept)


def test_hardware_is_a_preference_and_no_filter() -> None:
    hardware = {
        "w0": {"prefill_tokens_per_second": 4_000, "decode_tokens_per_second": 3_000},
        "w1": {"prefill_tokens_per_second": 16_000, "decode_tokens_per_second": 1_000},
    }
    policy = Affinity(**PLAIN, hardware=hardware)
    long_prompt, long_answer = a_request(1, 32_768), a_request(max_output_tokens=3000)
    assert policy.choose(long_prompt, a_fleet([0, 0])).scores == pytest.approx({"w0": 32_768 / 4, "w1": 32_768})
    assert policy.choose(long_answer, a_fleet([0, 0])).scores == pytest.approx({"w0": 160, "w1": 160 / 3})
    assert policy.choose(a_request(max_output_tokens=100), a_fleet([0, 0])).worker == "w1"
    neutral = policy.choose(a_request(max_output_tokens=1000), a_fleet([0, 0])).scores
    assert neutral["w0"] == neutral["w1"]
    assert policy.choose(long_prompt, a_fleet([0])).worker == "w0"
    unknown = policy.choose(long_prompt, a_fleet([0, 0, 0])).scores
    assert unknown["w2"] == unknown["w1"]


def test_an_unknown_hardware_property_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"policy affinity: .*hardware"):
        make_policy("affinity", options={"hardware": {"w0": {"prefill_tokens_per_second": "fast"}}})


def test_paced_sessions_spread_and_stay() -> None:
    """AMD-AGI/Infera#103 (RT04): nothing is in flight at any decision; two workers, 56 sessions one after another."""
    paced = session_requests(56, 8, system_blocks=1, think_seconds=0.5)
    anonymous = [replace(request, session="") for request in paced]
    for requests in (paced, anonymous):
        run = simulate_requests(requests, policy="affinity", workers=2, engine=ENGINE, arrivals="serial")
        assert run.busiest_share < 0.65
        placed = [record.worker for record in run.records]
        stayed = [len(set(placed[k + 1 : k + 8])) == 1 for k in range(0, len(placed), 8)]
        assert sum(stayed) >= 0.9 * len(stayed)


def test_it_balances_a_hot_prefix_mix_at_almost_no_hit_loss() -> None:
    """vllm-project/production-stack#1035 (RT01): against the longest prefix whatever the load."""
    workload = SharedPrefixWorkload(
        requests=1500, rate_per_second=34, shared_blocks=8, unique_blocks=2, output_tokens=60, block_size=512
    )
    requests, engine = shared_prefix_requests(workload, seed=7), replace(ENGINE, block_size=512, capacity_blocks=1000)
    cache_only = {"index": "events", "balance_rel_threshold": 1e9}
    only = simulate_requests(requests, policy="cache_aware", workers=4, engine=engine, policy_options=cache_only)
    ours = simulate_requests(requests, policy="affinity", workers=4, engine=engine)
    assert only.token_hit_ratio is not None
    assert ours.token_hit_ratio is not None
    assert only.in_flight_max_over_mean is not None
    assert ours.in_flight_max_over_mean is not None
    assert ours.in_flight_max_over_mean < 0.8 * only.in_flight_max_over_mean
    assert ours.token_hit_ratio > only.token_hit_ratio - 0.015
