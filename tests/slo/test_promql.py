"""The counters that queries name, and lengths of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.slo.promql import QueryError, Selector, metric_names, selector_of

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
WORDS = {"by", "without", "on", "ignoring", "and", "or", "unless", "bool", "offset", "inf", "nan", "sum", "avg", "min"}
METRICS = st.from_regex(r"[a-z]{3,8}_total", fullmatch=True)
MATCHERS = st.tuples(NAMES.filter(lambda name: name not in WORDS and name != "__name__"), st.sampled_from(["=", "!="]),
                     st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8))  # fmt: skip


@given(METRICS, st.lists(MATCHERS, max_size=3, unique_by=lambda matcher: matcher[0]))
def test_a_selector_is_read_as_it_is_written(metric: str, matchers: list[tuple[str, str, str]]) -> None:
    selector = Selector(metric, tuple(matchers))

    found = selector_of(f"sum(rate({selector}[5m]))")

    assert found.metric == metric
    assert set(found.matchers) == set(matchers)


@pytest.mark.parametrize(
    "query",
    ["a_total", "sum(a_total)", "sum(rate(a_total[5m]))", "(sum(increase(a_total[1h])))", '{__name__="a_total"}',
     "sum(rate(a_total[{{.window}}]))", "sum(rate(a_total[$__rate_interval]))"],
)  # fmt: skip
def test_what_a_counter_may_be_wrapped_in(query: str) -> None:
    assert selector_of(query) == Selector("a_total", ())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("a_total / b_total", "is more than a counter"),
        ("sum by (job) (a_total)", "is more than a counter"),
        ("histogram_quantile(0.9, a_bucket)", "is more than a counter"),
        ('{job="x"}', "has no metric name"),
        ("a_total{", "not PromQL"),
        ("rate(a_total[5m] offset 1h)", "has offset or @: remove it"),
        ("sum(increase(a_total[5m] @ 100))", "has offset or @: remove it"),
    ],
)
def test_what_is_no_counter_says_what_to_write(query: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        selector_of(query)


def test_the_names_that_a_query_reads_in_order() -> None:
    query = "sum(rate(a_total[5m])) / (b > 1) or histogram_quantile(0.9, c_bucket) unless -max_over_time(d[1h:5m]) > 0"

    assert metric_names(query) == ["a_total", "b", "c_bucket", "d"]
