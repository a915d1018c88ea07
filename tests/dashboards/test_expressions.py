"""Macros and filters: what a definition writes, and what Grafana sends."""

from __future__ import annotations

import promql_parser
import pytest

from prefixwatch.dashboards.queries.expressions import expanded, finished, rate_interval_seconds, recorded
from prefixwatch.dashboards.queries.inventory import Shown
from prefixwatch.documents import DocumentError

HITS = "prefixwatch_prefix_hit_tokens_total"


def test_a_ratio_has_no_value_where_nothing_was_asked() -> None:
    """slok/sloth#531 (SL01): 0/0 is NaN, and NaN is neither a number nor a gap."""
    assert expanded("$ratio(sum(a), sum(b))") == "(sum(a)) / ((sum(b)) > 0)"


def test_macros_stand_in_macros() -> None:
    text = expanded("$share($ratio(x, y), $ratio(z, w))")

    assert text == "((x) / ((y) > 0)) / on () group_left () (((z) / ((w) > 0)) > 0)"


def test_a_quantile_is_of_classic_and_of_native_histograms() -> None:
    text = expanded('$quantile(0.9, prefixwatch_ttft_seconds{cache="hit"}, length)')

    assert text == (
        "((histogram_quantile(0.9, sum by (le, length)"
        ' (rate(prefixwatch_ttft_seconds_bucket{cache="hit"}[$__rate_interval]))))'
        ' and on (length) (sum by (length) (rate(prefixwatch_ttft_seconds_count{cache="hit"}[$__rate_interval])) > 0))'
        " or histogram_quantile(0.9, sum by (length)"
        ' (rate(prefixwatch_ttft_seconds{cache="hit"}[$__rate_interval])))'
    )
    promql_parser.parse(text.replace("$__rate_interval", "5m"))


def test_observations_are_counted_of_classic_and_of_native_histograms() -> None:
    text = expanded("$observed(prefixwatch_kv_transfer_seconds, source)")

    assert text == (
        "(sum by (source) (rate(prefixwatch_kv_transfer_seconds_count[$__rate_interval]))"
        " or histogram_count(sum by (source) (rate(prefixwatch_kv_transfer_seconds[$__rate_interval]))))"
    )
    promql_parser.parse(text.replace("$__rate_interval", "5m"))


def test_both_is_the_lower_of_two() -> None:
    assert expanded("$both(a, b)") == "((a) <= (b) or (b) < (a))"


def test_a_parenthesis_that_stays_open_is_told_with_its_place() -> None:
    with pytest.raises(DocumentError, match=r"Cache: Reuse: a parenthesis isn't closed: sum\(a, b"):
        finished("$ratio(sum(a, b", [], "Cache: Reuse")


@pytest.mark.parametrize(
    ("expr", "variables", "wanted"),
    [
        (f"sum({HITS})", [], f'sum({HITS}{{cluster=~"$cluster", job=~"$job", model=~"$model"}})'),
        (
            f'{HITS}{{tier="gpu"}}',
            ["worker"],
            f'{HITS}{{tier="gpu", cluster=~"$cluster", job=~"$job", model=~"$model", target=~"$worker"}}',
        ),
        (
            "max(prefixwatch:prefix_hit:ratio_rate5m)",
            ["worker"],
            'max(prefixwatch:prefix_hit:ratio_rate5m{cluster=~"$cluster", model=~"$model"})',
        ),
        (
            'prefixwatch_target_up{target="a"}',
            ["worker"],
            'prefixwatch_target_up{target="a", cluster=~"$cluster", job=~"$job", model=~"$model"}',
        ),
    ],
    ids=["collected labels", "own matchers stay", "a rule's series has no job", "a label that is given stays"],
)
def test_selectors_are_filtered_by_labels_that_they_have(expr: str, variables: list[str], wanted: str) -> None:
    assert finished(expr, variables, "x") == wanted


def test_a_rules_series_has_the_labels_that_its_rule_keeps() -> None:
    assert recorded()["prefixwatch:worker_prefix_blocks:ratio"] == ("cluster", "model", "target")
    assert recorded()["prefixwatch:cold_prefill_seconds:p99"] == ("cluster", "model")
    assert recorded()["prefixwatch:slo_bad_ratio:increase1h"] == ("service", "slo")


@pytest.mark.parametrize(("step", "scrape", "wanted"), [(15.0, 15.0, 60.0), (300.0, 15.0, 315.0), (9.0, 60.0, 240.0)])
def test_the_rate_interval_is_grafanas(step: float, scrape: float, wanted: float) -> None:
    assert rate_interval_seconds(step, scrape) == wanted


def test_all_of_a_variable_is_a_pattern_and_the_longest_name_goes_first() -> None:
    shown = Shown(range_seconds=600.0, chosen={"worker": "a|b"})

    assert shown.expanded('x{target=~"$worker", job=~"$job"}[$__range]') == 'x{target=~"a|b", job=~".*"}[600000ms]'
