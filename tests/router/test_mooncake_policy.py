from __future__ import annotations

from typing import Any

import pytest

from prefixwatch.router.policies import make_policy
from tests.router.fleets import a_fleet, a_request

PLAIN: dict[str, Any] = {
    "calibration": [[1000, 0, 1000.0], [2000, 0, 2000.0]],
    "transfer_base_ms": 10.0,
    "transfer_tokens_per_second": 4000.0,
}
"""1 ms a computed token; 10 ms and 0.25 ms a token for a transfer."""


def test_a_holder_that_is_close_enough_keeps_its_own_prefix() -> None:
    decision = make_policy("mooncake", options=PLAIN).choose(a_request(), a_fleet([0, 0], {"w0": 8, "w1": 4}))
    assert decision.scores == pytest.approx({"w0": 32, "w1": 96})  # 8 / 4 isn't above 2
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w0", "local_prefix", 8)


def test_beyond_the_threshold_the_missing_part_is_pulled() -> None:
    policy = make_policy("mooncake", options={**PLAIN, "balancing_threshold": 1.5})
    decision = policy.choose(a_request(), a_fleet([0, 0], {"w0": 8, "w1": 4}))
    assert decision.scores == pytest.approx({"w0": 32, "w1": 32 + 10 + 64 / 4})


def test_a_worker_with_nothing_exceeds_every_threshold() -> None:
    policy = make_policy("mooncake", options={**PLAIN, "balancing_threshold": 1e9})
    decision = policy.choose(a_request(), a_fleet([0, 0], {"w0": 8}))
    assert decision.scores == pytest.approx({"w0": 32, "w1": 32 + 10 + 128 / 4})


def test_nobody_with_anything_means_no_transfer() -> None:
    decision = make_policy("mooncake", options=PLAIN).choose(a_request(), a_fleet([0, 0]))
    assert decision.scores == pytest.approx({"w0": 160, "w1": 160})
    assert decision.reason == "miss"


def test_without_a_transfer_engine_each_has_its_own_prefix() -> None:
    policy = make_policy("mooncake", options={**PLAIN, "transfer_tokens_per_second": None})
    assert policy.choose(a_request(), a_fleet([0, 0], {"w0": 8})).scores == pytest.approx({"w0": 32, "w1": 160})


def test_the_queue_is_the_predicted_prefill_of_requests_without_a_first_token() -> None:
    policy = make_policy("mooncake", options=PLAIN)
    first, second = a_request(), a_request()
    for request in (first, second):
        assert policy.choose(request, a_fleet([0, 0], {"w0": 8})).worker == "w0"
        policy.on_admit(request, "w0", 0.0)
    decision = policy.choose(a_request(), a_fleet([0, 0], {"w0": 8}))
    assert decision.scores == pytest.approx({"w0": 64 + 32, "w1": 74})
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w1", "transfer", 0)
    policy.on_first_token(first, "w0", 1.0)
    policy.on_end(second, "w0", 1.0)
    assert policy.choose(a_request(), a_fleet([0, 0], {"w0": 8})).scores["w0"] == pytest.approx(32)


def test_an_idle_fleet_sends_every_miss_to_the_first_worker() -> None:
    """F-1, as the paper's first minimum has it."""
    policy = make_policy("mooncake")
    assert {policy.choose(a_request(1000 * k), a_fleet([0, 0, 0])).worker for k in range(21)} == {"w0"}


def test_a_calibration_that_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="policy mooncake: a calibration needs"):
        make_policy("mooncake", options={"calibration": [[1, 0, 1.0]]})
