"""The statistics, tested as statistics: do intervals cover what they claim, is noise left unannounced?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.loadgen.grading.resampling import MEAN, Statistic
from prefixwatch.loadgen.grading.statistics import (
    MIN_BLOCK_REQUESTS,
    MIN_BLOCKS,
    compare_paired,
    compare_unpaired,
    cut_blocks,
    holm,
    percentile,
    quantile_intervals,
)
from prefixwatch.slo.wilson import wilson

Floats = npt.NDArray[np.float64]

COMPARISONS = 250
REPEATS, REQUESTS = 3, 300
REPEAT_OF_REQUEST = np.repeat(np.arange(REPEATS), REQUESTS)
P95 = Statistic(0.95)


def queue_waits(rng: np.random.Generator, *, slower: float = 1.0, plans: int = 1) -> tuple[Floats, Floats]:
    """Waits plus service of two queues at half load, by comparison and request (Lindley's recursion).

    Both get the same arrivals and half of the same work in every repeat, as two policies on one plan do; the
    second's service times are `slower` times as long. Neighbours correlate through the queue. With `plans=REPEATS`
    every repeat has a plan of its own.
    """
    gaps = rng.exponential(1.0, (COMPARISONS, plans, REQUESTS))
    planned = rng.exponential(0.5, (COMPARISONS, plans, REQUESTS))
    sides = []
    for factor in (1.0, slower):
        service = factor * (planned + rng.exponential(0.5, (COMPARISONS, REPEATS, REQUESTS))) / 2
        wait = np.zeros((COMPARISONS, REPEATS))
        total = np.empty_like(service)
        for i in range(REQUESTS):
            total[:, :, i] = wait + service[:, :, i]
            wait = np.maximum(0.0, total[:, :, i] - gaps[:, :, i])
        sides.append(total.reshape(COMPARISONS, -1))
    return sides[0], sides[1]


@pytest.mark.parametrize("statistic", [MEAN, P95], ids=["mean", "p95"])
def test_intervals_of_equal_queues_cover_zero_about_as_often_as_they_say(statistic: Statistic) -> None:
    """250 A/A comparisons. Binomial spread of 95 % is ±2.8 points; 89…99 % also allows for the few blocks."""
    a, b = queue_waits(np.random.default_rng(11))

    found = [
        compare_paired(a[i], b[i], REPEAT_OF_REQUEST, statistic, seed=i, resamples=300) for i in range(COMPARISONS)
    ]

    covered = np.mean([r.ci95 is not None and r.ci95[0] <= 0 <= r.ci95[1] for r in found])
    announced = np.mean([r.p_value is not None and r.p_value < 0.05 for r in found])
    assert 0.89 <= covered <= 0.99
    assert announced <= 0.09


def test_resampling_single_requests_would_have_been_wrong() -> None:
    """Why blocks: the usual interval for paired differences, blind to the queue, misses zero far too often."""
    a, b = queue_waits(np.random.default_rng(11))
    difference = a - b

    half_width = 1.96 * difference.std(axis=1, ddof=1) / np.sqrt(difference.shape[1])

    assert np.mean(np.abs(difference.mean(axis=1)) <= half_width) < 0.8


@pytest.mark.parametrize("statistic", [MEAN, P95], ids=["mean", "p95"])
def test_a_true_difference_is_found(statistic: Statistic) -> None:
    a, b = queue_waits(np.random.default_rng(5), slower=1.4)

    found = [compare_paired(a[i], b[i], REPEAT_OF_REQUEST, statistic, seed=i, resamples=300) for i in range(60)]

    detected = [r for r in found if r.p_value is not None and r.p_value < 0.05 and r.difference is not None]
    assert len(detected) >= 54
    assert all(r.difference is not None and r.difference < 0 for r in detected)


def test_the_interval_of_the_p95_of_one_run_covers_the_true_one_about_as_often_as_it_says() -> None:
    """250 runs of one queue; the truth is the p95 of all of them together."""
    runs, _ = queue_waits(np.random.default_rng(13), plans=REPEATS)
    truth = np.percentile(runs, 95)

    found = [quantile_intervals(run, REPEAT_OF_REQUEST, [0.95], seed=i, resamples=300)[0] for i, run in enumerate(runs)]

    assert 0.85 <= np.mean([limits is not None and limits[0] <= truth <= limits[1] for limits in found]) <= 0.99


@pytest.mark.parametrize("statistic", [MEAN, P95], ids=["mean", "p95"])
def test_two_samples_of_the_same_queue_differ_about_as_rarely_as_they_say(statistic: Statistic) -> None:
    """Runs of different plans: nothing pairs up, and each side's blocks are drawn for themselves."""
    a, b = queue_waits(np.random.default_rng(12), plans=REPEATS)
    other = np.roll(b, 1, axis=0)

    found = [
        compare_unpaired(a[i], other[i], REPEAT_OF_REQUEST, REPEAT_OF_REQUEST, statistic, seed=i, resamples=300)
        for i in range(COMPARISONS)
    ]

    covered = np.mean([r.ci95 is not None and r.ci95[0] <= 0 <= r.ci95[1] for r in found])
    announced = np.mean([r.p_value is not None and r.p_value < 0.05 for r in found])
    assert 0.89 <= covered <= 0.99
    assert announced <= 0.09


def test_two_samples_of_different_lengths_show_a_true_difference() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.exponential(1, 900), rng.exponential(2, 400)

    found = compare_unpaired(a, b, np.repeat([0, 1, 2], 300), np.repeat([0, 1], 200), P95)

    assert found.difference == np.percentile(a, 95) - np.percentile(b, 95)
    assert found.ci95 is not None
    assert found.ci95[1] < 0
    assert found.p_value == 1 / 2001


def test_the_difference_is_that_of_the_exact_percentiles() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.exponential(1, 500), rng.exponential(2, 500)

    found = compare_paired(a, b, np.zeros(500, dtype=np.int64), P95)

    assert found.a == np.percentile(a, 95)
    assert found.difference == np.percentile(a, 95) - np.percentile(b, 95)
    assert found.ci95 is not None
    assert found.difference is not None
    assert found.ci95[0] < found.difference < found.ci95[1]


def test_no_difference_at_all_is_certain_to_be_none() -> None:
    """Hit tokens of traffic without shared prefixes: all zero on both sides."""
    for constant in (0.0, 0.1):
        same = np.full(200, constant)

        found = compare_paired(same, same, np.zeros(200, dtype=np.int64), MEAN)

        assert (found.difference, found.ci95, found.p_value) == (0.0, (0.0, 0.0), 1.0)


def test_the_seed_decides_the_result() -> None:
    a, b = (side[0] for side in queue_waits(np.random.default_rng(1)))

    first, same, other = (compare_paired(a, b, REPEAT_OF_REQUEST, P95, seed=seed, resamples=200) for seed in (4, 4, 5))

    assert first == same
    assert first.ci95 != other.ci95


def test_too_few_requests_give_no_interval_and_no_p_value() -> None:
    values = np.arange(MIN_BLOCKS * MIN_BLOCK_REQUESTS - 1, dtype=np.float64)

    found = compare_paired(values, values + 1, np.zeros(len(values), dtype=np.int64), MEAN)

    assert (found.difference, found.ci95, found.p_value) == (-1.0, None, None)


def test_one_side_without_values_is_unknown_not_zero() -> None:
    found = compare_paired(np.full(100, np.nan), np.ones(100), np.zeros(100, dtype=np.int64), MEAN)

    assert (found.a, found.b, found.difference, found.ci95) == (None, 1.0, None, None)


def test_large_logs_are_compared_on_thinned_ranks_without_losing_the_answer() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.exponential(1.0, 50_000), rng.exponential(1.1, 50_000)

    found = compare_paired(a, b, np.zeros(50_000, dtype=np.int64), P95, resamples=200)

    true_difference = np.log(20) * (1.0 - 1.1)
    assert found.ci95 is not None
    assert found.ci95[0] < true_difference < found.ci95[1] < 0
    assert found.ci95[1] - found.ci95[0] < 0.3


@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(1, 40))
@settings(max_examples=60)
def test_blocks_are_runs_of_neighbours_within_one_repeat(lengths: list[int], aim: int) -> None:
    repeats = np.repeat(np.arange(len(lengths)), lengths)

    blocks = cut_blocks(repeats, aim)

    assert set(np.diff(blocks).tolist()) <= {0, 1}
    assert all(len(set(repeats[blocks == block].tolist())) == 1 for block in set(blocks.tolist()))
    assert blocks[0] == 0


def test_percentiles_are_exact_and_ordered() -> None:
    """locustio/locust#1563 (LT14): no rounding to bins, so no percentile passes the maximum."""
    values = np.full(100, 1449.0)

    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [1449.0] * 4
    assert percentile(np.array([1.0, 2.0, np.nan, 4.0]), 50) == 2.0
    assert percentile(np.array([np.nan]), 50) is None


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_never_pass_the_maximum(values: list[float]) -> None:
    array = np.array(values)
    p50, p99 = percentile(array, 50), percentile(array, 99)

    assert p50 is not None
    assert p99 is not None
    assert min(values) <= p50 <= p99 <= max(values)


def test_wilson_interval_matches_published_values() -> None:
    """Newcombe, Statist. Med. 17 (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }

    for (good, total), limits in published.items():
        assert wilson(good, total) == pytest.approx(limits, abs=5e-5)
    assert wilson(0, 0) is None


def test_holm_multiplies_by_what_is_left_and_never_falls() -> None:
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
