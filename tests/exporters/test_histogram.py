"""Quantiles and sums of bucketed histograms."""

from __future__ import annotations

import math

import pytest

from prefixwatch.exporters.scraping.histogram import Histogram, merge

INF = math.inf


def test_quantiles_are_interpolated_as_prometheus_does() -> None:
    histogram = Histogram((1.0, 2.0, 4.0, INF), (10.0, 30.0, 40.0, 40.0), 70.0)
    assert histogram.quantile(0.5) == 1.5
    assert histogram.quantile(0.875) == 3.0
    assert histogram.mean() == 1.75


def test_a_quantile_beyond_the_last_bound_is_unknown() -> None:
    """vllm-project/vllm#15202 (EM22): not stuck at the bound."""
    assert Histogram((10.0, INF), (20.0, 100.0)).quantile(0.99) is None


def test_an_empty_histogram_has_no_quantile() -> None:
    assert Histogram((1.0, INF), (0.0, 0.0)).quantile(0.5) is None


@pytest.mark.parametrize(("counts", "bound"), [((5.0, 5.0, 5.0), 1.0), ((0.0, 0.0, 5.0), INF), ((1.0, 5.0, 5.0), None)])
def test_the_only_bucket(counts: tuple[float, ...], bound: float | None) -> None:
    assert Histogram((1.0, 2.0, INF), counts).only_bucket() == bound


def test_equal_bounds_are_added() -> None:
    one = Histogram((1.0, INF), (2.0, 5.0), 7.0)
    merged = merge([one, one])
    assert merged is not None
    assert merged == Histogram((1.0, INF), (4.0, 10.0), 14.0)


def test_different_bounds_are_added_only_where_both_have_one() -> None:
    """ray-project/ray#65892 (EM32): nothing in common but +Inf, so a count and no quantile."""
    a = Histogram((0.1, 1.0, INF), (10.0, 90.0, 100.0))
    b = Histogram((0.25, 2.0, INF), (10.0, 90.0, 100.0))
    merged = merge([a, b])
    assert merged is not None
    assert merged.counts == (200.0,)
    assert merged.quantile(0.5) is None


def test_the_common_grid_is_the_coarser_one() -> None:
    merged = merge([Histogram((1.0, 2.0, INF), (1.0, 2.0, 3.0)), Histogram((2.0, 4.0, INF), (5.0, 6.0, 7.0))])
    assert merged is not None
    assert (merged.bounds, merged.counts) == ((2.0, INF), (7.0, 10.0))


def test_nothing_merges_to_nothing() -> None:
    assert merge([]) is None
