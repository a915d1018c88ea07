"""The audit's tests against the published data, scipy's figures, and audits whose truth is known."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.audit.statistics import (
    DOUBT_LEVEL,
    LEAK_LEVEL,
    auc_interval,
    critical_lead,
    ks_less,
    ks_power,
    leads,
    least_samples,
    rank_sum_p,
    resampled_power,
    separation,
    smallest_gap_sd,
    warm_share,
)

N = 250


def test_an_audit_without_a_leak_raises_no_alarm() -> None:
    """Issue 15: of 200 seeded audits at most 1 % are below 0.01 and none below 1e-8. Of 5,000, within error."""
    rng = np.random.default_rng(15)
    few = [ks_less(rng.normal(size=N), rng.normal(size=N)) for _ in range(200)]
    assert sum(p < DOUBT_LEVEL for p in few) <= 2
    assert min(few) > LEAK_LEVEL
    found = leads(rng.normal(size=(5_000, N)), rng.normal(size=(5_000, N)))
    assert (found >= critical_lead(N, DOUBT_LEVEL)).mean() <= 0.0142  # 0.01 and three standard errors
    assert not (found >= critical_lead(N, LEAK_LEVEL)).any()


def test_a_gap_of_one_standard_deviation_is_found() -> None:
    """Issue 15 and B5: at least 99 % at 250 + 250; less where the gap is smaller."""
    assert ks_power(1.0, N, np.random.default_rng(1), trials=2000) >= 0.99
    assert [ks_power(gap, N, np.random.default_rng(2), trials=2000) for gap in (0.5, 0.6, 0.7, 0.8)] == pytest.approx(
        [0.17, 0.43, 0.78, 0.96], abs=0.06
    )
    assert smallest_gap_sd(N) == pytest.approx(0.9, abs=0.1)
    assert smallest_gap_sd(least_samples(LEAK_LEVEL) - 1) is None


def test_more_victim_requests_defeat_the_dilution_by_replicas() -> None:
    """B3: with 8 replicas a gap of 3 sd is never found after 1 victim request, and always after 5 or 25."""
    shares = [warm_share(8, victim_requests) for victim_requests in (1, 5, 25)]
    powers = [ks_power(3.0, N, np.random.default_rng(3), warm_share=share, trials=200) for share in shares]
    assert powers == [0.0, 1.0, 1.0]
    assert warm_share(1, 1) == 1.0


@pytest.mark.parametrize(
    ("first", "second", "scipy"),
    [
        ([1.0, 2.0, 3.0], [2.5, 3.5, 4.5, 5.5], 0.11428571428571428),
        ([1.0, 1.0, 2.0], [1.0, 2.0, 2.0, 3.0], 0.45714285714285713),
        ([5.0, 6.0], [1.0, 2.0, 3.0], 1.0),
    ],
)
def test_small_samples_are_as_counted_by_hand(first: list[float], second: list[float], scipy: float) -> None:
    """Every order of the values is as probable as any other; scipy 1.17.1 gives the same."""
    assert ks_less(np.array(first), np.array(second)) == pytest.approx(scipy, rel=1e-9)


@pytest.mark.parametrize(("n", "m"), [(3, 4), (4, 4), (5, 2)])
def test_the_p_value_is_the_share_of_orders_with_such_a_lead(n: int, m: int) -> None:
    for first_places in combinations(range(n + m), n):
        second_places = [place for place in range(n + m) if place not in first_places]
        reached = sum(lead_of(other, n, m) >= lead_of(first_places, n, m) for other in combinations(range(n + m), n))
        p = ks_less(np.array(first_places, dtype=float), np.array(second_places, dtype=float))
        assert p == pytest.approx(reached / comb(n + m, n))


def lead_of(first_places: Sequence[int], n: int, m: int) -> int:
    walk = np.cumsum([m if place in first_places else -n for place in range(n + m)])
    return max(0, int(walk.max()))


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_a_p_value_depends_on_the_order_of_the_values_alone(n: int, m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=n), rng.normal(size=m)
    p = ks_less(first, second)
    assert 0 < p <= 1
    assert ks_less(np.exp(first), np.exp(second)) == pytest.approx(p)
    assert ks_less(first - 100, second) == pytest.approx(1 / comb(n + m, n))
    auc, low, high = auc_interval(first, second)
    assert low < auc < high or auc in (0.0, 1.0)
    assert auc + auc_interval(second, first)[0] == pytest.approx(1)


def test_the_interval_of_the_auc_covers_the_truth() -> None:
    """Two normals 1 sd apart: Φ(1/√2) = 0.760."""
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(400):
        _, low, high = auc_interval(rng.normal(size=60), rng.normal(size=60) + 1)
        covered += low <= 0.76025 <= high
    assert 0.93 <= covered / 400 <= 0.98


def test_the_order_of_answers_is_judged_against_random_order() -> None:
    assert rank_sum_p([1] * 7, 16) == pytest.approx(16.0**-7)
    assert rank_sum_p([1, 2], 4) == pytest.approx(3 / 16)
    assert rank_sum_p([4, 4], 4) == pytest.approx(1.0)
    rng = np.random.default_rng(5)
    assert np.mean([rank_sum_p(list(rng.integers(1, 17, 10)), 16) < DOUBT_LEVEL for _ in range(2000)]) <= 0.013


def test_the_power_of_what_was_measured_is_that_of_its_own_gap() -> None:
    rng = np.random.default_rng(6)
    cold = rng.normal(size=N)
    assert resampled_power(rng.normal(size=N) - 2, cold, rng) == 1.0
    assert resampled_power(rng.normal(size=N) - 0.1, cold, rng) < 0.05


PUBLISHED = json.loads((Path(__file__).parent / "published_timings.json").read_text(encoding="utf-8"))


def test_the_published_audit_gives_the_published_table() -> None:
    """B1: 7 of 19 audits across organisations, 4 of 6 within one, 18 of 37 of one user, at 1e-8. And B2 to B4."""
    found: dict[str, float] = {
        name: ks_less(np.array(hits) / 1e4, np.array(misses) / 1e4) for name, (hits, misses) in PUBLISHED.items()
    }
    level = {name: name.split("/")[1] for name in found}
    assert Counter(level.values()) == {"global": 19, "per_org": 6, "per_user": 37}
    leaks = [name for name, p in found.items() if p < LEAK_LEVEL]
    assert Counter(level[name] for name in leaks) == {"global": 7, "per_org": 4, "per_user": 18}
    assert len({name.split("/")[0] for name in leaks if level[name] == "global"}) == 7
    assert len({name.split("/")[0] for name in leaks if level[name] == "per_user"}) == 8


@pytest.mark.parametrize(
    ("name", "p_value", "auc"),
    [
        ("replicate/global", 8.566e-150, 1.0),
        ("perplexity/global", 5.305e-74, 0.829),
        ("fireworks/global", 9.012e-17, 0.6955),
    ],
)
def test_a_small_gap_can_be_as_certain_as_a_large_one(name: str, p_value: float, auc: float) -> None:
    """B2: fireworks' medians are 0.447 and 0.465 s, which no rule of thumb about medians would call a leak."""
    (own,) = (name_ for name_ in PUBLISHED if name_.startswith(name))
    hits, misses = PUBLISHED[own]
    found = separation(np.array(hits) / 1e4, np.array(misses) / 1e4)
    assert found.p_value == pytest.approx(p_value, rel=1e-3)
    assert found.auc == pytest.approx(auc, abs=1e-3)
    assert found.auc_low <= found.auc <= found.auc_high
    assert found.auc_low > 0.6
