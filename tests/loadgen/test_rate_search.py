from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.grading.rate_search import RateSearch, Share


def search(start: float = 10, **options: float) -> RateSearch:
    given = {"low": 0.1, "high": 1000.0, "precision_ratio": 0.05, "repeats": 4, **options}
    return RateSearch(start, **given)  # type: ignore[arg-type]  # repeats is whole in every call


def run(found: RateSearch, capacity: float, requests: int = 2000) -> RateSearch:
    """A fleet that serves everything well up to its capacity, and a tenth of the rest."""
    while (rate := found.next_rate()) is not None:
        good = requests if rate <= capacity else int(requests * 0.1)
        found.note([Share("goodput", 0.95, good, requests)])
    return found


@given(st.floats(0.2, 900), st.floats(0.1, 1000))
def test_the_capacity_lies_between_the_passing_and_the_failing_rate(capacity: float, start: float) -> None:
    found = run(search(start), capacity)
    assert found.best is not None
    assert found.failing is not None
    assert found.best.rate <= capacity < found.failing.rate <= 1.05 * found.best.rate
    assert found.exit_code == 0
    assert len(found.steps) <= 25


def test_it_doubles_until_it_fails_and_then_bisects() -> None:
    found = run(search(precision_ratio=0.2), 50)
    assert [round(step.rate, 1) for step in found.steps] == [10, 20, 40, 80, 56.6, 47.6]
    assert found.statement().startswith("47.6 req/s meets every objective with 95 % confidence (goodput 100 % of 95 %")


def test_no_rate_that_meets_the_objectives_is_a_failure() -> None:
    found = run(search(low=5), 1)
    assert found.exit_code == 1
    assert found.as_json()["rate_per_second"] is None
    assert found.statement().startswith("no rate down to 5 req/s meets the objectives: goodput 10 % of 95 %")


def test_a_fleet_that_never_fails_leaves_the_question_open() -> None:
    found = run(search(high=30), 100)
    assert found.exit_code == 3
    assert found.statement().endswith("no higher rate was tried: raise search.max_per_second")


def test_an_open_verdict_is_run_again_and_its_requests_pooled() -> None:
    """97 of 100 could be 92 %; 388 of 400 could not."""
    found = search()
    for runs in (1, 2, 3):
        assert found.next_rate() == 10
        found.note([Share("goodput", 0.95, 97, 100)])
        assert found.steps[0].runs == runs
    found.note([Share("goodput", 0.95, 100, 100)])
    assert found.steps[0].verdict == "pass"
    assert found.next_rate() == 20


def test_what_stays_open_steers_by_what_was_measured_but_is_not_called_certain() -> None:
    found = search(repeats=2, high=10)
    for _ in range(2):
        found.note([Share("goodput", 0.95, 96, 100)])
    assert found.best is not None
    assert (found.best.verdict, found.exit_code) == ("likely_pass", 3)
    assert "as measured, not with confidence" in found.statement()


def test_the_worst_objective_decides() -> None:
    found = search()
    found.note([Share("ttft", 0.95, 1000, 1000), Share("availability", 0.99, 900, 1000)])
    assert found.steps[0].verdict == "fail"
    assert found.next_rate() == 5


def test_a_pass_by_chance_above_a_failing_rate_is_not_believed() -> None:
    found = search(precision_ratio=0.5)
    for good in (1000, 0, 1000):  # 10, 20, then 14.1 req/s
        found.note([Share("goodput", 0.95, good, 1000)])
    assert found.next_rate() is None
    assert found.best is not None
    assert found.best.rate == pytest.approx(14.14, abs=0.01)


def test_without_objectives_there_is_nothing_to_search() -> None:
    with pytest.raises(ValueError, match="needs objectives"):
        search().note([])


def test_the_confidence_is_kept_over_many_searches() -> None:
    """Noisy runs at a fleet whose goodput falls from 98 % by a point for each request a second above 40."""
    rng, too_high = np.random.default_rng(1), 0
    for _ in range(40):
        found = search(repeats=6)
        while (rate := found.next_rate()) is not None:
            share = 0.98 - max(0.0, rate - 40) / 100
            found.note([Share("goodput", 0.95, int(rng.binomial(600, share)), 600)])
        assert found.best is not None
        too_high += found.best.rate > 43.5  # there the share is half a point below the objective
    assert too_high <= 4
