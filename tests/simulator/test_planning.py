"""The search for the smallest fleet, and the bound of instant scaling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.grading.model import ObjectiveGrade
from prefixwatch.simulator.planning import Trial, first_guess, ideal_engine_hours, prefill_engine_hours, smallest_fleet


def a_trial(workers: int, seed: int, *, ok: bool | None) -> Trial:
    met = ObjectiveGrade(
        name="ttft", rule="", objective=0.95, measured=1.0, ok=ok, ci95=None, good=1, total=1, excluded=0
    )
    return Trial(workers, seed, (met,), 0.5)


@given(need=st.integers(1, 100), first=st.integers(1, 120), seeds=st.integers(1, 3))
def test_the_answer_holds_in_every_run_and_one_engine_fewer_does_not(need: int, first: int, seeds: int) -> None:
    plan = smallest_fleet(
        lambda workers, seed: a_trial(workers, seed, ok=workers >= need - (seed == 0)),
        range(seeds),
        first=first,
        largest=128,
    )
    needed = need - 1 if seeds == 1 and need > 1 else need
    assert plan.workers == needed
    assert [trial.holds for trial in plan.of_size(needed)] == [True] * seeds
    if needed > 1:
        assert not all(trial.holds for trial in plan.of_size(needed - 1))
        assert plan.of_size(needed - 1)


def test_without_a_fleet_that_holds_the_largest_one_was_tried() -> None:
    plan = smallest_fleet(lambda workers, seed: a_trial(workers, seed, ok=False), [0], first=3, largest=10)
    assert (plan.workers, [trial.workers for trial in plan.trials]) == (None, [3, 6, 10])


def test_an_objective_without_requests_is_not_met() -> None:
    assert not a_trial(1, 0, ok=None).holds


def test_instant_scaling_follows_the_rate() -> None:
    """Peak: 4 requests in a minute need 8 engines. A minute with 1 needs 2, with none none; the last is short."""
    arrivals = [0.0, 1.0, 2.0, 3.0, 60.0, 200.0]
    assert ideal_engine_hours(arrivals, 8) == pytest.approx((8 * 60 + 2 * 60 + 2 * 20) / 3600)


def test_the_first_guess_computes_the_traffic_without_waiting() -> None:
    assert (first_guess(250.0, 100.0), first_guess(1.0, 100.0), first_guess(1.0, 0.0)) == (3, 1, 1)


def test_what_ten_points_of_hits_save_is_the_prefill_of_those_tokens() -> None:
    """1 ms per token computed: 100 + 50 tokens of two prompts; of a third all but the last token is cached already."""

    def prefill_s(prompt: int, cached: int) -> float:
        return (prompt - cached) / 1000

    saved = prefill_engine_hours([(1000, 0), (500, 250), (100, 99)], prefill_s, 0.1)

    assert saved == pytest.approx(0.15 / 3600)
