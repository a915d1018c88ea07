"""What nobody reports isn't low: a worker whose load is unknown is never preferred for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.router.policies import POLICIES, make_policy
from prefixwatch.router.policy import Fleet, LoadReport, Worker, known_or_highest, requests_at
from tests.router.fleets import a_request

REPORTING = [name for name, policy in POLICIES.items() if policy.needs.engine_load and not policy.needs.truth]
OPTIONS: dict[str, dict[str, Any]] = {"score": {"kv_capacity_tokens": 100_000, "kv_pressure_start_ratio": 0.0}}
FIGURES = ("running", "waiting", "kv_usage_ratio")


def report(**figures: Any) -> LoadReport:
    return LoadReport(1000.0, kv_capacity_tokens=100_000, generation_tokens_per_second=1000.0, **figures)


def choices(name: str, *reports: LoadReport | None) -> Counter[str]:
    """300 requests, none of which stays, over workers a, b, … with these reports."""
    policy = make_policy(name, seed=1, options=OPTIONS.get(name))
    found: Counter[str] = Counter()
    for number in range(300):
        workers = [Worker(chr(97 + k), report=given) for k, given in enumerate(reports)]
        fleet = Fleet(workers, lambda request: {}, 1000.0 + number * 60)
        found[policy.choose(a_request(1000 * number), fleet).worker] += 1
    return found


LIGHT, HEAVY = report(running=1, waiting=0, kv_usage_ratio=0.1), report(running=20, waiting=9, kv_usage_ratio=0.9)


@pytest.mark.parametrize("name", REPORTING)
@pytest.mark.parametrize("stale", [None, report()], ids=["no report", "a report without figures"])
def test_a_worker_of_unknown_load_is_not_preferred_to_a_light_one(name: str, stale: LoadReport | None) -> None:
    """smg-project/smg#1683: an engine that fell silent while idle drew all traffic."""
    found = choices(name, LIGHT, stale, HEAVY)
    assert found["b"] <= found["a"] + 60  # FlexLB goes by its own ledger: a third each, give or take 4 sigma


@pytest.mark.parametrize("name", ["llmd_precise", "llmd_approx", "least_load"])
@pytest.mark.parametrize("missing", FIGURES)
def test_one_figure_that_is_missing_makes_no_worker_light(name: str, missing: str) -> None:
    figures = {figure: value for figure, value in zip(FIGURES, (20, 9, 0.9), strict=True) if figure != missing}
    assert choices(name, LIGHT, report(**figures)) == {"a": 300}


@given(st.lists(st.none() | st.floats(0, 1e6), min_size=1, max_size=5), st.floats(0, 1))
def test_the_unknown_counts_as_the_highest_known(figures: list[float | None], otherwise: float) -> None:
    filled = known_or_highest(figures, otherwise)
    known = [figure for figure in figures if figure is not None]
    for given_figure, figure in zip(figures, filled, strict=True):
        assert figure == (max(known, default=otherwise) if given_figure is None else given_figure)


def test_requests_are_the_ledgers_or_the_engines_if_more() -> None:
    workers = [
        Worker("a", 3, report=report(running=1)),
        Worker("b", 1, report=report(running=4, waiting=2)),
        Worker("c"),
    ]
    assert requests_at(workers) == [3, 6, 6]
    assert requests_at([Worker("a", 3), Worker("b")]) == [3, 0]
