"""PromQL over a few pages: the same answers as Prometheus where both can answer."""

from __future__ import annotations

import math

import pytest

from prefixwatch.runbooks.promql import Sample, evaluate
from prefixwatch.runbooks.snapshots import Snapshots
from prefixwatch.slo.promql import QueryError

FIRST = """
hits_total{target="a"} 100
hits_total{target="b"} 50
queries_total{target="a"} 200
queries_total{target="b"} 100
load{worker="a"} 1
load{worker="b"} 5
up{target="a"} 1
wait_bucket{le="1.0"} 0
wait_bucket{le="5.0"} 0
wait_bucket{le="+Inf"} 0
"""
SECOND = """
hits_total{target="a"} 180
hits_total{target="b"} 20
queries_total{target="a"} 300
queries_total{target="b"} 40
load{worker="a"} 3
load{worker="b"} 5
wait_bucket{le="1.0"} 8
wait_bucket{le="5.0"} 10
wait_bucket{le="+Inf"} 10
"""


@pytest.fixture
def pages() -> Snapshots:
    snapshots = Snapshots()
    snapshots.add_page(FIRST, 100.0)
    snapshots.add_page(SECOND, 110.0)
    return snapshots


def test_a_restarted_counter_grew_by_what_it_has_since_before_series_are_summed(pages: Snapshots) -> None:
    """prometheus/prometheus#7074 (EM45): sums come after the resets of each series."""
    assert evaluate("sum(increase(hits_total[5m]))", pages) == [Sample({}, 80.0 + 20.0)]


def test_a_ratio_is_of_sums(pages: Snapshots) -> None:
    (ratio,) = evaluate("sum(rate(hits_total[5m])) / sum(rate(queries_total[5m]))", pages)
    assert ratio.value == pytest.approx((80 + 20) / (100 + 40))


def test_a_filter_leaves_nothing_to_divide_by_where_there_was_too_little(pages: Snapshots) -> None:
    assert evaluate("sum(increase(hits_total[5m])) / (sum(increase(queries_total[5m])) > 1000)", pages) == []


def test_a_series_that_left_the_page_is_not_answered_with_its_old_value(pages: Snapshots) -> None:
    assert evaluate("up", pages) == []


def test_series_on_both_sides_match_by_their_labels(pages: Snapshots) -> None:
    found = evaluate("increase(hits_total[5m]) / increase(queries_total[5m])", pages)
    assert {sample.labels["target"]: sample.value for sample in found} == {"a": 0.8, "b": 0.5}


def test_many_series_may_match_one(pages: Snapshots) -> None:
    found = evaluate("load / on () group_left () min(load)", pages)
    assert [sample.value for sample in found] == [1.0, pytest.approx(5 / 3)]


def test_a_range_covers_every_page(pages: Snapshots) -> None:
    assert evaluate('max_over_time(load{worker="a"}[1m]) - min_over_time(load{worker="a"}[1m])', pages)[0].value == 2.0


def test_a_quantile_is_linear_within_its_bucket(pages: Snapshots) -> None:
    (p90,) = evaluate("histogram_quantile(0.9, sum by (le) (rate(wait_bucket[5m])))", pages)
    assert p90.value == pytest.approx(1 + 4 * (9 - 8) / (10 - 8))


def test_a_histogram_without_observations_has_no_quantile() -> None:
    snapshots = Snapshots()
    snapshots.add_page('wait_bucket{le="1.0"} 0\nwait_bucket{le="+Inf"} 0\n', 1.0)
    assert math.isnan(evaluate("histogram_quantile(0.9, wait_bucket)", snapshots)[0].value)


def test_a_rate_needs_two_pages() -> None:
    snapshots = Snapshots()
    snapshots.add_page(FIRST, 1.0)
    assert evaluate("rate(hits_total[5m])", snapshots) == []


def test_comparisons_with_bool_answer_0_or_1(pages: Snapshots) -> None:
    assert [sample.value for sample in evaluate("load > bool 4", pages)] == [0.0, 1.0]


def test_matchers_are_anchored_regular_expressions(pages: Snapshots) -> None:
    assert evaluate('load{worker=~"a|c"}', pages)[0].labels == {"__name__": "load", "worker": "a"}
    assert evaluate('load{worker!~"[ab]"}', pages) == []


@pytest.mark.parametrize(
    "query", ["load offset 5m", "topk(1, load)", "deriv(load[5m])", "max_over_time(rate(load[1m])[5m:1m])"]
)
def test_what_needs_a_prometheus_is_refused(pages: Snapshots, query: str) -> None:
    with pytest.raises(QueryError):
        evaluate(query, pages)


def test_a_quantile_over_series_lies_between_the_nearest_ranks(pages: Snapshots) -> None:
    values = sorted(sample.value for sample in evaluate("load", pages))
    expected = values[0] + (values[1] - values[0]) * 0.25 * (len(values) - 1)
    assert evaluate("quantile(0.25, load)", pages)[0].value == pytest.approx(expected)


def test_an_ambiguous_match_is_refused(pages: Snapshots) -> None:
    with pytest.raises(QueryError, match="several series on the right"):
        evaluate("load / on () load", pages)
