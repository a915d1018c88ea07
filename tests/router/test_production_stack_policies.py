"""production-stack's session, prefixaware, kvaware and loadaware."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from uhashring import HashRing

from benchmarks.simulated import SharedPrefixWorkload, session_requests, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.kvcache.blocks import as_tokens
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.production_stack.loadaware_tokens import LoadAwareTokens
from prefixwatch.router.policies.production_stack.prefixaware import PrefixAware, text_path
from prefixwatch.router.policy import Fleet, RouteRequest, Worker
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from tests.router.fleets import BLOCK, a_fleet, a_request, serve

FALLBACKS = ["session", "kvaware", "loadaware", "loadaware_tokens"]


def a_text(text: str, **fields: Any) -> RouteRequest:
    return RouteRequest("r", 0, as_tokens([]), np.empty(0, dtype=np.uint64), BLOCK, text=text, **fields)


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_session_goes_where_uhashring_puts_it(name: str) -> None:
    policy, fleet, peer = make_policy(name), a_fleet([0] * 5), HashRing([f"w{k}" for k in range(5)])
    for k in range(200):
        decision = policy.choose(a_request(session=f"session-{k}"), fleet)
        assert (decision.worker, decision.reason) == (peer.get_node(f"session-{k}"), "session")


def test_the_ring_follows_the_candidates_and_moves_only_what_it_must() -> None:
    policy, whole = make_policy("session"), a_fleet([0] * 5)
    without = Fleet([worker for worker in whole.workers if worker.name != "w2"], whole.lookup, 0.0)
    sessions = [a_request(session=f"session-{k}") for k in range(200)]
    before = [policy.choose(request, whole).worker for request in sessions]
    during = [policy.choose(request, without).worker for request in sessions]
    policy.on_worker_removed("w2")
    after = [policy.choose(request, whole).worker for request in sessions]
    assert after == before
    assert all(now == then for now, then in zip(during, before, strict=True) if then != "w2")
    assert "w2" not in during


def test_without_a_session_a_worker_without_statistics_wins_then_the_lowest_rate_then_the_first() -> None:
    policy, fleet = make_policy("session"), a_fleet([9, 0, 0], now=50.0)
    policy.on_admit(a_request(), "w0", 0.0)
    policy.on_admit(a_request(), "w0", 50.0)
    assert [serve(policy, fleet, a_request()).worker for _ in range(2)] == ["w1", "w2"]
    decision = policy.choose(a_request(), fleet)
    assert (decision.worker, decision.reason) == ("w1", "lowest_rate")
    assert decision.scores == {"w0": 2 / 60, "w1": 1 / 60, "w2": 1 / 60}
    later = Fleet(fleet.workers, fleet.lookup, 61.0)
    assert policy.choose(a_request(), later).scores == {"w0": 1 / 60, "w1": 1 / 60, "w2": 1 / 60}


def test_prefixaware_chunks_are_128_characters_and_the_tail_has_its_own() -> None:
    first, second = text_path(a_text("a" * 300)), text_path(a_text("a" * 256 + "b" * 44))
    assert len(first) == len(second) == 3
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert text_path(a_text("a" * 300, tenant="other"))[0] != first[0]


def test_prefixaware_reads_32_tokens_as_a_chunk_where_there_is_no_text() -> None:
    assert len(text_path(a_request(1, 160))) == 5
    assert text_path(a_request(1, 160))[:4] == text_path(a_request(1, 128))


def test_prefixaware_draws_from_the_deepest_set_that_a_candidate_is_in() -> None:
    policy = make_policy("prefixaware")
    assert isinstance(policy, PrefixAware)
    prompt = "a" * 128 + "b" * 128
    for worker in ("w0", "w1"):
        policy.served.store(worker, text_path(a_text(prompt[:128])))
    policy.served.store("gone", text_path(a_text(prompt)))
    fleet = a_fleet([200, 0, 0])
    decisions = [policy.choose(a_text(f"{prompt[:128]}{k:0128}"), fleet) for k in range(200)]
    chosen = Counter(decision.worker for decision in decisions)
    assert {decision.reason for decision in decisions} == {"deepest_match"}
    assert set(chosen) == {"w0", "w1"}
    assert abs(chosen["w0"] - 100) < 40
    assert policy.choose(a_text(prompt), fleet).worker in {"w0", "w1"}


def test_prefixaware_below_the_minimum_match_goes_by_rate_and_still_notes_the_path() -> None:
    policy = make_policy("prefixaware", options={"prefix_min_match_length": 256})
    fleet, request = a_fleet([0, 0]), a_text("a" * 300)
    assert serve(policy, fleet, request).reason == "no_statistics"
    again = serve(policy, fleet, request)
    assert (again.worker, again.reason) == ("w0", "deepest_match")


def test_prefixaware_sends_a_hot_prefix_to_one_worker_whatever_its_load() -> None:
    policy, fleet = make_policy("prefixaware"), a_fleet([0, 0, 0])
    first = serve(policy, fleet, a_request()).worker
    busy = Fleet([replace(w, in_flight=500 if w.name == first else 0) for w in fleet.workers], fleet.lookup, 0.0)
    assert serve(policy, busy, a_request()).worker == first


def test_prefixaware_never_forgets_a_path() -> None:
    """vllm-project/production-stack#687, F-9: no eviction; `llmd_approx`'s LRU and the cache view are bounded."""
    policy, fleet = make_policy("prefixaware"), a_fleet([0])
    assert isinstance(policy, PrefixAware)
    for k in range(500):
        serve(policy, fleet, a_request(10_000 * k, 640))
    assert len(policy.served) == 500 * 20


@pytest.mark.parametrize(
    ("prompt_tokens", "depth", "reason"),
    [
        (2256, 16, "first_holder"),  # 256 ≥ 2256 − 2000
        (2257, 16, "no_statistics"),
        (160, 15, "no_statistics"),  # 240 tokens are no whole chunk
        (5000, 199, "first_holder"),  # 3184 → 12 chunks of 256 = 3072 ≥ 3000
        (5100, 199, "no_statistics"),
    ],
)
def test_kvaware_goes_to_the_holder_if_at_most_the_threshold_is_left(
    prompt_tokens: int, depth: int, reason: str
) -> None:
    decision = make_policy("kvaware").choose(a_request(1, prompt_tokens), a_fleet([0, 9], {"w1": depth}))
    assert decision.reason == reason
    assert decision.worker == ("w1" if reason == "first_holder" else "w0")


def test_kvaware_credits_the_first_holder_and_others_the_deepest() -> None:
    """production-stack#1055, LMCache#4471, F-8: two replicas of one prefix, of different depths."""
    request, hits = a_request(1, 1600), {"w1": 16, "w2": 96}
    first = make_policy("kvaware").choose(request, a_fleet([0, 0, 0], hits))
    assert (first.worker, first.hit_blocks) == ("w1", 16)
    for name in ("score", "affinity", "loadaware", "cache_aware"):
        assert make_policy(name).choose(request, a_fleet([0, 0, 0], hits)).worker == "w2"


def test_kvaware_gives_a_deep_replica_up_when_a_shallow_one_comes_first() -> None:
    decision = make_policy("kvaware").choose(a_request(1, 4800), a_fleet([0, 0, 0], {"w1": 16, "w2": 300}))
    assert (decision.worker, decision.reason) == ("w0", "no_statistics")


@pytest.mark.parametrize(
    ("beta", "scores", "worker", "reason"),
    [
        (1.0, (0.30, 0.60, 0.50), "w1", "hit_sacrificed"),
        (0.5, (0.60, 0.30, 0.50), "w0", "hit_deepest"),
    ],
)
def test_loadaware_equals_the_golden_vector(beta: float, scores: tuple[float, ...], worker: str, reason: str) -> None:
    golden = replace(a_request(1, 1000), block_size=100)
    decision = make_policy("loadaware", options={"beta": beta}).choose(golden, a_fleet([8, 2, 5], {"w0": 9, "w2": 5}))
    assert decision.scores == pytest.approx(dict(zip(("w0", "w1", "w2"), scores, strict=True)))
    assert (decision.worker, decision.reason) == (worker, reason)


def test_loadaware_counts_single_requests_in_full_while_the_fleet_is_nearly_idle() -> None:
    decision = make_policy("loadaware").choose(a_request(), a_fleet([1, 0, 0, 0], {"w0": 10}))
    assert decision.scores == {"w0": 1 - 0.75, "w1": 0.25, "w2": 0.25, "w3": 0.25}
    assert decision.worker == "w0"  # of equal scores the first name


def test_loadaware_ties_go_to_the_first_name_whatever_the_order() -> None:
    fleet = a_fleet([0, 0, 0], {"w1": 5, "w2": 5})
    turned = Fleet(fleet.workers[::-1], fleet.lookup, 0.0)
    assert make_policy("loadaware").choose(a_request(), turned).worker == "w1"


def test_loadaware_on_a_full_miss_ignores_load() -> None:
    policy, fleet = make_policy("loadaware"), a_fleet([90, 0])
    assert policy.choose(a_request(), fleet).worker == "w0"
    assert policy.choose(a_request(session="s"), fleet).reason == "session"


def test_loadaware_tokens_counts_prefill_and_gamma_times_output() -> None:
    policy = make_policy("loadaware_tokens", options={"beta": 0.1, "gamma": 0.5})
    policy.on_admit(a_request(max_output_tokens=400), "w0", 0.0)
    policy.on_admit(a_request(), "w1", 0.0)  # no limit: 256
    fleet = a_fleet([1, 1], {"w0": 5}, prefill_tokens=[100, 0])
    decision = policy.choose(a_request(), fleet)
    mean = (300 + 128) / 2
    assert decision.scores == pytest.approx({"w0": 0.5 - 0.1 * (300 - mean) / mean, "w1": 0.1 * (mean - 128) / mean})


def test_loadaware_tokens_takes_finished_requests_off_once_and_only_at_their_own_worker() -> None:
    policy, request = LoadAwareTokens(), a_request(max_output_tokens=400)
    policy.on_admit(request, "w0", 0.0)
    policy.on_worker_removed("w0")
    successor = a_request(max_output_tokens=100)
    policy.on_admit(successor, "w0", 1.0)
    policy.on_end(request, "w0", 2.0)
    assert policy._loads([Worker("w0")]) == [100]
    for _ in range(2):
        policy.on_end(successor, "w0", 3.0)
    assert policy._loads([Worker("w0")]) == [0]


PREFILL_TOKENS_PER_SECOND = 12_000.0
STEP_TIME = StepTime(base_s=0.01, per_prefill_token_s=1 / PREFILL_TOKENS_PER_SECOND)
BIG_BLOCKS = EngineConfig(STEP_TIME, block_size=512, capacity_blocks=1000)


def imbalance(result: SimulationResult) -> float:
    assert result.in_flight_max_over_mean is not None
    return result.in_flight_max_over_mean


def test_loadaware_balances_the_fleet_at_almost_no_hit_loss() -> None:
    """vllm-project/production-stack#1035 (RT01): Zipf(1.1) over 20 groups, 4096 shared + 1024 unique tokens.

    beta 0 is cache-only placement: its busiest worker has 2.00 times the mean in flight here, beta 0.5 gives 1.58
    at 1.1 points of hits, beta 1 1.41 at 2.4.
    """
    workload = SharedPrefixWorkload(
        requests=600, rate_per_second=30, shared_blocks=8, unique_blocks=2, output_tokens=60, block_size=512
    )
    requests = shared_prefix_requests(workload, seed=7)
    only, published, default = (
        simulate_requests(requests, policy="loadaware", workers=4, engine=BIG_BLOCKS, policy_options={"beta": beta})
        for beta in (0.0, 0.5, 1.0)
    )
    assert only.token_hit_ratio is not None
    for weighed, imbalance_ratio, hit_points in ((published, 0.85, 1.5), (default, 0.75, 3.0)):
        assert weighed.token_hit_ratio is not None
        assert imbalance(weighed) < imbalance_ratio * imbalance(only)
        assert 100 * (only.token_hit_ratio - weighed.token_hit_ratio) < hit_points


def test_paced_sessions_end_up_on_one_worker_where_only_requests_in_flight_count() -> None:
    """AMD-AGI/Infera#103 (RT04): the load term is 0 at every decision. `affinity` and `score` spread them."""
    paced = [replace(request, session="") for request in session_requests(28, 8, system_blocks=16, think_seconds=0.5)]
    engine = EngineConfig(STEP_TIME, block_size=BLOCK, capacity_blocks=20_000)
    shares = {
        policy: simulate_requests(paced, policy=policy, workers=2, engine=engine, arrivals="serial").busiest_share
        for policy in ("loadaware", "kvaware", "prefixaware", "affinity", "score")
    }
    assert shares["loadaware"] == shares["kvaware"] == shares["prefixaware"] == 1
    assert max(shares["affinity"], shares["score"]) < 0.7
