"""FlexLB's decode strategy: filters, weights and what counts as KV in use."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.flexlb.decode import selection_weights
from prefixwatch.router.policy import Fleet, LoadReport, NoWorkers, Policy
from tests.router.fleets import a_fleet, a_request


def in_use(*used_tokens: int, at_seconds: float = 0.0, capacity_tokens: int = 100_000) -> list[LoadReport]:
    return [
        LoadReport(at_seconds, kv_usage_ratio=used / capacity_tokens, kv_capacity_tokens=capacity_tokens)
        for used in used_tokens
    ]


def drawn(policy: Policy, fleet: Fleet, times: int) -> Counter[str]:
    return Counter(policy.choose(a_request(), fleet).worker for _ in range(times))


def scores(policy: Policy, **fleet: Any) -> dict[str, float]:
    return dict(policy.choose(a_request(), a_fleet([0, 0], **fleet)).scores)


def test_weights_are_exponential_in_the_tokens_beyond_the_least_used() -> None:
    assert selection_weights([5000, 6000, 7000]) == [1.0, math.exp(-1), math.exp(-2)]
    assert selection_weights([10**9, 10**9 + 10**7]) == [1.0, 0.0]
    assert selection_weights([3000, 9000], decay_per_token=0.0) == [1.0, 1.0]


def test_workers_are_drawn_in_proportion_to_their_weights() -> None:
    """A thousand and two thousand tokens more: 1 : 1/e : 1/e², 66.5 %, 24.5 % and 9.0 % of the draws."""
    found = drawn(make_policy("flexlb_decode", seed=1), a_fleet([0, 0, 0], report=in_use(5000, 6000, 7000)), 10_000)
    assert [found[f"w{k}"] / 10_000 for k in range(3)] == pytest.approx([0.6652, 0.2447, 0.0900], abs=0.012)


def test_a_seed_repeats_the_draws() -> None:
    fleet = a_fleet([0, 0, 0], report=in_use(5000, 5500, 6000))
    first, second = (make_policy("flexlb_decode", seed=7) for _ in range(2))
    assert [first.choose(a_request(), fleet) for _ in range(50)] == [
        second.choose(a_request(), fleet) for _ in range(50)
    ]


def test_equal_use_is_drawn_uniformly() -> None:
    policy, fleet = make_policy("flexlb_decode", seed=1), a_fleet([1, 2], report=in_use(4000, 4000))
    assert policy.choose(a_request(), fleet).reason == "tie_random"
    assert 0.47 < drawn(policy, fleet, 4000)["w0"] / 4000 < 0.53


def test_a_worker_without_room_for_the_prompt_is_out() -> None:
    policy, request = make_policy("flexlb_decode"), a_request(prompt_tokens=160)
    decision = policy.choose(request, a_fleet([0, 0], report=in_use(841, 840, capacity_tokens=1000)))
    assert (decision.worker, decision.reason) == ("w1", "only_candidate")
    with pytest.raises(NoWorkers, match="no decode worker has room"):
        policy.choose(request, a_fleet([0, 0], report=in_use(841, 900, capacity_tokens=1000)))


def test_hotspots_and_imbalance_are_more_than_three_times_the_mean() -> None:
    """Means are whole numbers: loads 0 0 0 9 3 have mean 2, so 9 is a hotspot; loads 0 0 9 have mean 3, and 9 isn't."""
    policy = make_policy("flexlb_decode", seed=1)
    kept = drawn(policy, a_fleet([0, 0, 0, 9, 3], report=in_use(0, 0, 0, 0, 0)), 200)
    assert kept["w3"] == 0
    assert kept["w4"] > 0
    assert drawn(policy, a_fleet([0, 0, 9], report=in_use(0, 0, 0)), 200)["w2"] > 0
    options = {"decay_per_token": 1e-9}
    uneven = a_fleet([0] * 4, report=in_use(0, 0, 0, 40_000))
    assert drawn(make_policy("flexlb_decode", seed=1, options=options), uneven, 200)["w3"] == 0


def test_requests_sent_are_reserved_until_a_report_covers_them() -> None:
    """Prompt and at most 1,000 tokens of output; the report after the first token counts them itself."""
    policy, request = make_policy("flexlb_decode"), a_request(prompt_tokens=160, max_output_tokens=4000)
    old = in_use(5000, 5000, at_seconds=1.0)
    policy.on_admit(request, "w0", 2.0)
    assert scores(policy, report=old) == {"w0": 6160, "w1": 5000}
    policy.on_first_token(request, "w0", 3.0)
    assert scores(policy, report=old) == {"w0": 6160, "w1": 5000}
    assert scores(policy, report=in_use(5160, 5000, at_seconds=4.0)) == {"w0": 5160, "w1": 5000}
    policy.on_end(request, "w0", 5.0)
    assert scores(policy, report=in_use(5000, 5000, at_seconds=6.0)) == {"w0": 5000, "w1": 5000}


def test_without_reports_requests_stay_reserved_to_their_end() -> None:
    policy, request = make_policy("flexlb_decode"), a_request(prompt_tokens=160, max_output_tokens=40)
    policy.on_admit(request, "w0", 2.0)
    policy.on_first_token(request, "w0", 3.0)
    silent = [LoadReport(4.0, running=1, waiting=0)] * 2
    assert scores(policy, report=silent) == {"w0": 200, "w1": 0}
    policy.on_end(request, "w0", 5.0)
    assert scores(policy, report=silent) == {"w0": 0, "w1": 0}


def test_a_reservation_is_at_most_what_the_worker_holds() -> None:
    policy, request = make_policy("flexlb_decode"), a_request(prompt_tokens=160, max_output_tokens=900)
    reports = in_use(0, 0, capacity_tokens=1000)
    policy.choose(request, a_fleet([0, 0], report=reports))
    policy.on_admit(request, "w0", 0.0)
    assert scores(policy, report=reports) == {"w0": 1000, "w1": 0}


def test_cached_prefixes_are_not_looked_at() -> None:
    policy = make_policy("flexlb_decode", seed=3)
    assert not policy.needs.cache_view
    found = drawn(policy, a_fleet([0, 0], {"w0": 10}, report=in_use(90_000, 10_000)), 50)
    assert found == {"w1": 50}
