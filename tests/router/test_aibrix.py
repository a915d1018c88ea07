from __future__ import annotations

from collections import Counter

import pytest

from prefixwatch.router.policies import make_policy
from tests.router.fleets import a_fleet, a_request


def test_the_longest_match_within_one_deviation_of_the_mean_wins() -> None:
    policy = make_policy("aibrix_prefix_cache")
    decision = policy.choose(a_request(), a_fleet([4, 3, 3], {"w0": 8, "w1": 5}))  # limit 3.33 + 0.58
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w1", "prefix_match", 5)
    decision = policy.choose(a_request(), a_fleet([3, 2, 4], {"w0": 8, "w1": 5}))  # limit 3 + 1
    assert decision.worker == "w0"


def test_without_a_holder_that_is_quiet_enough_the_fewest_requests_win() -> None:
    decision = make_policy("aibrix_prefix_cache").choose(a_request(), a_fleet([7, 1, 2], {"w0": 8}))
    assert (decision.worker, decision.reason) == ("w1", "prefix_match_skipped")


@pytest.mark.parametrize(
    ("in_flight", "options", "imbalanced"),
    [
        ([8, 0, 0], {}, False),
        ([9, 0, 0], {}, True),
        ([9, 0, 8], {"imbalance_factor": 2.0}, False),  # 9 ≤ 2 · (5.67 + 1)
        ([20, 0, 0], {"imbalance_factor": 2.0}, True),
    ],
)
def test_a_spread_above_eight_narrows_the_match_to_the_least_loaded(
    in_flight: list[int], options: dict[str, float], imbalanced: bool
) -> None:
    policy = make_policy("aibrix_prefix_cache", options={"deviation_factor": 9.0, **options})
    decision = policy.choose(a_request(), a_fleet(in_flight, {"w0": 8}))
    assert (decision.reason, decision.worker == "w0") == (
        ("imbalanced", False) if imbalanced else ("prefix_match", True)
    )


def test_a_holder_among_the_least_loaded_still_wins() -> None:
    decision = make_policy("aibrix_prefix_cache").choose(a_request(), a_fleet([30, 0, 0], {"w0": 8, "w2": 3}))
    assert (decision.worker, decision.reason) == ("w2", "prefix_match")


def test_equal_matches_go_by_requests_and_then_at_random() -> None:
    policy = make_policy("aibrix_prefix_cache")
    assert policy.choose(a_request(), a_fleet([2, 1, 2], {"w0": 8, "w1": 8})).worker == "w1"
    drawn = Counter(policy.choose(a_request(), a_fleet([1, 1, 1], {"w0": 8, "w2": 8})).worker for _ in range(400))
    assert set(drawn) == {"w0", "w2"}
    assert 140 < drawn["w0"] < 260


def test_one_worker_alone_takes_all() -> None:
    assert make_policy("aibrix_prefix_cache").choose(a_request(), a_fleet([50])).reason == "least_request"
