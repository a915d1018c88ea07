"""Fast first tokens: within the false-alarm budget whatever the load does, and found where a cache is shared."""

from __future__ import annotations

import numpy as np
import pytest

from prefixwatch.kvcache.fast_first_tokens import MIN_REFERENCES, FastFirstTokens, bet

TOKENS = 9000


def check(watched: FastFirstTokens, seconds: float, tokens: int = TOKENS) -> bool | None:
    rank = watched.rank("w", tokens, seconds)
    return None if rank is None else watched.stake(rank)


def run(seed: int, *, shared: float, tests: int = 300, drift: bool = True) -> FastFirstTokens:
    """Twelve cold prompts of nobody between two that another tenant sent; the load rises and falls tenfold.

    `shared`: the share of the latter that hit, which takes a fifth of the time.
    """
    rng, watched = np.random.default_rng(seed), FastFirstTokens(0.01, seed=seed)
    for step in range(tests):
        load = 1.0 + 9.0 * abs(np.sin(step / 40.0)) if drift else 1.0
        for seconds in rng.lognormal(0.0, 0.6, 12) * load:
            watched.reference("w", TOKENS, float(seconds))
        hit = rng.random() < shared
        check(watched, float(rng.lognormal(0.0, 0.6) * load * (0.2 if hit else 1.0)))
    return watched


def test_without_a_shared_cache_at_most_one_run_in_a_hundred_alarms() -> None:
    assert sum(run(seed, shared=0.0, tests=150).alarms > 0 for seed in range(200)) <= 2


@pytest.mark.parametrize(("shared", "within"), [(1.0, 25), (0.5, 120)])
def test_a_shared_cache_is_found(shared: float, within: int) -> None:
    assert all(run(seed, shared=shared, tests=within).alarms > 0 for seed in range(20))


def test_slow_first_tokens_never_alarm() -> None:
    watched = FastFirstTokens()
    for _ in range(200):
        for k in range(MIN_REFERENCES):
            watched.reference("w", TOKENS, 1.0 + k / 100)
        assert check(watched, 5.0) is False
    assert watched.wealth < 1e-6


def test_without_references_nothing_is_judged() -> None:
    watched = FastFirstTokens()
    assert check(watched, 0.001) is None
    for _ in range(MIN_REFERENCES):
        watched.reference("w", TOKENS, 1.0)
    assert watched.rank("v", TOKENS, 0.001) is None
    assert check(watched, 0.001) is False
    assert check(watched, 0.001) is None, "a reference serves once"
    assert (watched.tests, watched.untested) == (1, 3)


def test_the_bet_is_fair() -> None:
    """Mean 1 over uniform ranks: 0.962 of it above 1e-12, for the payoff near 0 is large and rare."""
    edges = np.geomspace(1e-12, 1.0, 400_001)
    middles = np.sqrt(edges[1:] * edges[:-1])
    mean = float(np.sum([bet(p) for p in middles] * np.diff(edges)))
    assert mean == pytest.approx(1 - 1 / np.log(1e12), abs=0.002)
    assert bet(1.0) == pytest.approx(0.5)
    assert bet(1 - 1e-5) == pytest.approx(0.5, abs=1e-4)


def test_each_alarm_costs_the_next_one_double() -> None:
    watched = FastFirstTokens(0.01)
    needed = []
    while watched.alarms < 3:
        for _ in range(MIN_REFERENCES):
            watched.reference("w", TOKENS, 1.0)
        needed.append(watched.needed_wealth)
        check(watched, 0.01)
    assert sorted(set(needed)) == [200.0, 400.0, 800.0]


@pytest.mark.parametrize("budget", [0.0, 1.0, -1.0])
def test_impossible_budgets_are_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="false-alarm budget"):
        FastFirstTokens(budget)


@pytest.mark.parametrize(("tokens", "comparable"), [(9000, True), (11_250, True), (8999, False), (11_251, False)])
def test_references_are_at_most_as_long_as_the_prompt_and_not_much_shorter(tokens: int, comparable: bool) -> None:
    """Else a prompt would seem fast because it is short."""
    watched = FastFirstTokens()
    for _ in range(MIN_REFERENCES):
        watched.reference("w", TOKENS, 1.0)
    assert (check(watched, 0.001, tokens) is not None) is comparable
