"""Policies that see tiers beyond the GPU credit them at a discount, and decide on pulls where the fleet makes them."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Fleet, LowerTiers
from tests.router.fleets import BLOCK, a_fleet, a_request

WARM = LowerTiers(host_blocks=4, disk_blocks=2, shared_blocks=3)
PROMPT_BLOCKS = 10


def tiered(found: dict[str, LowerTiers], hits: dict[str, int] | None = None) -> Fleet:
    fleet = a_fleet([0, 0], hits)
    fleet.lower_tiers = lambda request, depths: found
    return fleet


def pulling(hits: dict[str, int], token_ms: float, latency_ms: float = 0.0) -> Fleet:
    fleet = a_fleet([0, 0], hits)
    fleet.pull_seconds = lambda tokens: (latency_ms + tokens * token_ms) / 1e3 if tokens else 0.0
    return fleet


@pytest.mark.parametrize(
    ("options", "credit"),
    [({}, 4 * 0.75 + 2 * 0.25), ({"shared_credit": 0.5}, 3.5 + 1.5), ({"host_credit": 0.0, "disk_credit": 1.0}, 2.0)],
)
def test_dynamo_takes_the_credited_blocks_off_the_prefill(options: dict[str, float], credit: float) -> None:
    """Its own default ignores the shared store."""
    decision = make_policy("dynamo_kv", options=options).choose(a_request(), tiered({"w1": WARM}))
    assert decision.worker == "w1"
    assert decision.scores["w0"] - decision.scores["w1"] == pytest.approx(credit)


def test_scores_credit_is_the_prefill_time_of_the_discounted_tokens() -> None:
    decision = make_policy("score", options={"prefill_tokens_per_second": 1000.0}).choose(
        a_request(), tiered({"w1": WARM})
    )
    gain_ms = (4 * 0.75 + 2 * 0.25 + 3 * 0.5) * BLOCK * 1.0
    assert decision.scores["w1"] - decision.scores["w0"] == pytest.approx(gain_ms)
    assert decision.pulls is None  # the worker decides on what is in its tiers


@pytest.mark.parametrize(("token_ms", "pulls"), [(0.5, True), (1.5, False)])
def test_score_asks_for_the_pull_that_saves_time(token_ms: float, pulls: bool) -> None:
    """1 ms a computed token; w1 is the only one free of a queue, w0 holds half of the prompt."""
    fleet = pulling({"w0": 5}, token_ms)
    fleet.workers[0].prefill_tokens = 100_000
    decision = make_policy("score", options={"prefill_tokens_per_second": 1000.0}).choose(a_request(), fleet)
    assert (decision.worker, decision.pulls) == ("w1", pulls)


def test_mooncake_reckons_with_what_a_pull_really_takes() -> None:
    options: dict[str, Any] = {"calibration": [[1000, 0, 1000.0], [2000, 0, 2000.0]], "transfer_base_ms": 1e6}
    policy = make_policy("mooncake", options=options)
    decision = policy.choose(a_request(), pulling({"w0": 8}, 0.25, latency_ms=10.0))
    assert decision.scores == pytest.approx({"w0": 32, "w1": 32 + 10 + 128 / 4})
    assert decision.pulls is False
    assert make_policy("mooncake", options=options).choose(a_request(), a_fleet([0, 0], {"w0": 8})).pulls is None


def test_mooncakes_best_prefix_is_what_the_store_has_behind_a_workers_own() -> None:
    fleet = pulling({"w0": 2}, 0.0, latency_ms=10.0)
    fleet.lower_tiers = lambda request, depths: {"w0": LowerTiers(shared_blocks=6), "w1": LowerTiers(shared_blocks=8)}
    decision = make_policy("mooncake", options={"calibration": [[1000, 0, 1000.0], [2000, 0, 2000.0]]}).choose(
        a_request(), fleet
    )
    assert decision.scores == pytest.approx({"w0": 32 + 10, "w1": 32 + 10})
    assert (decision.reason, decision.pulls) == ("transfer", True)
