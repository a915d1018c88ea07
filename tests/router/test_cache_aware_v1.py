"""The first generation of cache_aware: its rules, and the faults that its successors and our own policies lost."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.sglang.cache_aware_v1 import CacheAwareV1
from prefixwatch.router.policy import Fleet, LoadReport
from prefixwatch.simulator.runs import simulate_requests
from tests.router.fleets import BLOCK, a_fleet, a_request, serve

OURS = ["affinity", "score"]
WITHOUT_THE_SWITCH = ["affinity", "cache_aware", "score"]


def warm(policy: CacheAwareV1, owners: dict[str, int], workers: int) -> None:
    """Each worker is the only candidate when its prompt, which starts at this token, comes."""
    for name, first_token in owners.items():
        fleet = a_fleet([0] * workers)
        only = Fleet([worker for worker in fleet.workers if worker.name == name], fleet.lookup, 0.0)
        serve(policy, only, a_request(first_token))


def test_default_sets() -> None:
    def figures(**options: Any) -> tuple[float | None, ...]:
        chosen = CacheAwareV1(**options).options
        return (
            chosen.cache_threshold,
            chosen.balance_abs_threshold,
            chosen.balance_rel_threshold,
            chosen.eviction_interval_seconds,
            chosen.max_tree_size,
        )

    assert figures() == (0.3, 64, 1.5, 60, 67_108_864)
    assert figures(defaults="struct") == (0.5, 32, 1.1, 30, 10_000)
    assert figures(defaults="struct", max_tree_size=99) == (0.5, 32, 1.1, 30, 99)


@pytest.mark.parametrize(
    ("in_flight", "reason"),
    [
        ([64, 0], "cache_hit"),  # 64 is not above 64
        ([65, 0], "imbalanced"),
        ([196, 130], "imbalanced"),  # 66 > 64 and 196 > 1.5 · 130
        ([195, 130], "cache_hit"),  # 195 ≤ 1.5 · 130
    ],
)
def test_the_fleet_is_imbalanced_by_both_margins(in_flight: list[int], reason: str) -> None:
    policy = CacheAwareV1()
    warm(policy, {"w0": 1}, 2)
    decision = policy.choose(a_request(1), a_fleet(in_flight))
    assert (decision.worker, decision.reason) == ("w0" if reason == "cache_hit" else "w1", reason)


def test_when_imbalanced_the_least_by_load_then_requests_served_then_position_takes_it_and_is_noted() -> None:
    policy = CacheAwareV1()
    assert policy.choose(a_request(), a_fleet([90, 1, 1, 1], served=[0, 7, 4, 4])).worker == "w2"
    assert policy.choose(a_request(), a_fleet([0, 0, 0, 0])).worker == "w2"


def test_the_match_must_exceed_the_threshold() -> None:
    policy = CacheAwareV1(cache_threshold=0.5)
    warm(policy, {"w1": 1}, 2)
    at = policy.choose(a_request(1, 320), a_fleet([0, 1]))
    assert (at.worker, at.reason) == ("w0", "below_threshold")
    policy = CacheAwareV1(cache_threshold=0.5)
    warm(policy, {"w1": 1}, 2)
    above = policy.choose(a_request(1, 319), a_fleet([0, 1]))
    assert (above.worker, above.reason, above.hit_blocks) == ("w1", "cache_hit", 10)


def test_the_first_to_get_the_deepest_block_owns_it_while_it_is_there() -> None:
    """As sglang-router 0.3.2 and vllm-router 0.1.17 were seen to do it (tests/peers)."""
    for owner, second in (("first", "w2"), ("least_loaded", "w0")):
        policy = CacheAwareV1(owner=owner)
        warm(policy, {"w2": 1}, 3)
        assert policy.choose(a_request(1), a_fleet([0, 0, 90])).reason == "imbalanced"  # w0 gets it as well
        assert policy.choose(a_request(1), a_fleet([8, 0, 9])).worker == second
        policy.on_worker_removed("w2")
        assert policy.choose(a_request(1), a_fleet([9, 0, 0])).worker == "w0"


def test_by_events_the_most_blocks_win_then_the_lower_load_then_the_position() -> None:
    policy, hits = CacheAwareV1(index="events"), {"w1": 3, "w2": 3, "w3": 2}
    assert policy.choose(a_request(), a_fleet([0, 5, 4, 0], hits)).worker == "w2"
    assert policy.choose(a_request(), a_fleet([0, 4, 4, 0], hits)).worker == "w1"
    miss = policy.choose(a_request(), a_fleet([2, 1, 1, 3]))
    assert (miss.worker, miss.reason) == ("w1", "miss_least_load")


def test_kv_pressure_is_off_by_default_and_switches_locality_off_for_all() -> None:
    reports = [LoadReport(0.0, kv_usage_ratio=1.0), LoadReport(0.0, kv_usage_ratio=0.1)]
    for spread, reason in ((1.0, "cache_hit"), (0.8, "kv_pressure")):
        policy = CacheAwareV1(kv_spread_threshold=spread)
        warm(policy, {"w0": 1}, 2)
        assert policy.choose(a_request(1), a_fleet([1, 0], report=reports)).reason == reason


def test_the_tree_is_trimmed_at_each_interval_tails_first() -> None:
    policy = CacheAwareV1(max_tree_size=12 * BLOCK, eviction_interval_seconds=30)
    for k, now in enumerate((0.0, 29.0)):
        policy.choose(a_request(10_000 * k), a_fleet([0], now=now))
    assert policy.sent.count("w0") == 20
    policy.choose(a_request(90_000, BLOCK), a_fleet([0], now=30.0))
    assert policy.sent.count("w0") == 13
    assert policy.choose(a_request(0), a_fleet([0], now=31.0)).reason == "below_threshold"  # 2 of 10 blocks are left
    assert policy.choose(a_request(10_000), a_fleet([0], now=31.0)).hit_blocks == 10


def test_every_miss_on_an_idle_fleet_goes_to_the_first_worker() -> None:
    """sgl-project/sglang#32983, F-1; the others spread (test_policies.py)."""
    policy = CacheAwareV1()
    placed = {serve(policy, a_fleet([0, 0, 0]), a_request(1000 * k)).worker for k in range(21)}
    assert placed == {"w0"}


def test_one_hot_worker_turns_affinity_off_for_all() -> None:
    """sgl-project/sglang#32195, smg-project/smg#2161, F-2, RT44: worker 3 is hot, prefix Q is warm on worker 5."""
    loads, q = [2, 2, 2, 120, 2, 2, 2, 2], a_request(5000)
    policy = CacheAwareV1()
    warm(policy, {"w3": 1, "w5": 5000}, 8)
    lost = policy.choose(q, a_fleet(loads))
    assert (lost.worker, lost.reason) == ("w0", "imbalanced")
    for name in WITHOUT_THE_SWITCH:
        assert make_policy(name).choose(q, a_fleet(loads, {"w5": 10})).worker == "w5"
        assert make_policy(name).choose(a_request(), a_fleet(loads, {"w3": 10})).worker != "w3"


@pytest.mark.parametrize("threshold", [200, 1000])
def test_a_large_threshold_lets_one_worker_queue_instead(threshold: int) -> None:
    """smg-project/smg#2161 (RT44), the other side: hot prefix P stays on its worker of 120 in flight."""
    policy = CacheAwareV1(balance_abs_threshold=threshold)
    warm(policy, {"w3": 1}, 8)
    assert policy.choose(a_request(1), a_fleet([2, 2, 2, 120, 2, 2, 2, 2])).worker == "w3"


def test_an_unhealthy_owners_requests_all_go_to_the_first_worker_and_are_not_noted() -> None:
    """F-12: a burst while the owners of eight prefixes are down."""
    policy = CacheAwareV1()
    warm(policy, {"w3": 1}, 4)
    for k in range(1, 8):
        warm(policy, {"w3": 1000 * k}, 4)
    without = Fleet(a_fleet([0, 0, 0]).workers, lambda request: {}, 0.0)
    first = [1, *(1000 * k for k in range(1, 8))]
    burst = [policy.choose(a_request(token), without) for token in first * 3]
    assert {(decision.worker, decision.reason) for decision in burst} == {("w0", "owner_unhealthy")}
    assert policy.choose(a_request(1), a_fleet([0, 0, 0, 0])).worker == "w3"
    for name in OURS:
        ours = make_policy(name)
        assert len({serve(ours, without, a_request(token)).worker for token in first * 3}) == 3


STEP_TIME = StepTime(base_s=0.01, per_prefill_token_s=1 / 12_000)


def test_hits_fall_when_load_trips_the_switch() -> None:
    """sgl-project/sglang#32195 (RT06): a hot-prefix mix at 1 and at 10 requests a second, absolute threshold 4.

    A third of the decisions become `imbalanced`, hits fall from 0.68 to 0.55; `affinity` and `score` keep 0.69.
    """
    small = EngineConfig(STEP_TIME, block_size=512, capacity_blocks=60)
    touchy = {"balance_abs_threshold": 4, "balance_rel_threshold": 1.1}
    hits: dict[tuple[str, float], float] = {}
    tripped: dict[float, float] = {}
    for rate in (1.0, 10.0):
        workload = SharedPrefixWorkload(
            requests=600, rate_per_second=rate, shared_blocks=8, unique_blocks=2, output_tokens=120, block_size=512
        )
        requests = shared_prefix_requests(workload, seed=7)
        for name, options in (("cache_aware_v1", touchy), *((name, None) for name in OURS)):
            run = simulate_requests(requests, policy=name, workers=4, engine=small, policy_options=options)
            assert run.token_hit_ratio is not None
            hits[name, rate] = run.token_hit_ratio
            if options:
                tripped[rate] = sum(record.reason == "imbalanced" for record in run.records) / len(run.records)
    assert tripped[1.0] < 0.01
    assert tripped[10.0] > 0.3
    assert hits["cache_aware_v1", 10.0] < 0.85 * hits["cache_aware_v1", 1.0]
    for name in OURS:
        assert hits[name, 10.0] > 0.95 * hits[name, 1.0]
