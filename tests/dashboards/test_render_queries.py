"""Targets of a panel's JSON as the queries that Grafana sends."""

from __future__ import annotations

from typing import Any

import promql_parser
import pytest

from prefixwatch.dashboards.build import RUNBOOKS
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.grafana.classic import classic, targets
from tests.dashboards.render.queries import View, Window, queries, step_seconds, variables_of

HOUR = Window(0.0, 3600.0, 15.0)


def panel(**target: Any) -> dict[str, Any]:
    return {"targets": [{"refId": "A", "expr": "x", **target}]}


def test_variables_and_intervals_are_put_in() -> None:
    given = panel(expr='rate(x{worker=~"$worker", tenant=~"${tenant:regex}"}[$__rate_interval])')

    (query,) = queries(given, View(HOUR, {"worker": ".*", "tenant": "acme"}), 1000)

    assert query.expr == 'rate(x{worker=~".*", tenant=~"acme"}[60s])', "four scrapes of 15 s"


def test_a_targets_own_interval_takes_the_place_of_the_scrape_interval() -> None:
    """Grafana's rule, so that the dashboard's variable can tell how often the exporter is scraped (SL08)."""
    view = View(HOUR, {"scrape": "1m"})

    (query,) = queries(panel(expr="rate(x[$__rate_interval])", interval="${scrape}"), view, 1000)

    assert query.step_seconds == 60.0
    assert query.expr == "rate(x[240s])"


def test_a_range_is_rounded_up_to_a_usual_step() -> None:
    assert step_seconds(HOUR, 1000, 1.0) == 5.0
    assert step_seconds(HOUR, 1000, 15.0) == 15.0
    assert step_seconds(Window(0.0, 30 * 86400.0, 15.0), 600, 15.0) == 7200.0


def test_an_interval_that_is_no_duration_is_told() -> None:
    with pytest.raises(ValueError, match="'often' is not a duration such as 30s or 1m30s"):
        queries(panel(interval="often"), View(HOUR, {}), 1000)


def test_format_and_legend_are_the_targets() -> None:
    given = panel(format="table", instant=True, range=False, legendFormat="{{slo}}")

    (query,) = queries(given, View(HOUR, {}), 1000)

    assert (query.form, query.instant, query.legend, query.alone) == ("table", True, "{{slo}}", True)


def test_hidden_targets_are_not_asked() -> None:
    assert queries(panel(hide=True), View(HOUR, {}), 1000) == []


@pytest.mark.parametrize("name", list(shipped()))
def test_nothing_of_grafana_is_left_in_a_shipped_query(name: str) -> None:
    model = classic(shipped()[name], RUNBOOKS)
    view = View(HOUR, variables_of(model))

    for shown, _ in targets(model["panels"]):
        for query in queries(shown, view, 600):
            assert "$" not in query.expr
            promql_parser.parse(query.expr)
