"""No query draws more series than a browser can take, on a fleet of 200 workers, 6 routers, 3 models and 50 tenants."""

from __future__ import annotations

import math
from typing import Any

import promql_parser as ast
import pytest

from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.queries.expressions import metrics_of, series_labels
from prefixwatch.dashboards.queries.inventory import Asked, Shown, everything_asked

MOST_SERIES = 500
MOST_LINES = 100
"""Of a panel that draws lines."""
MOST_PANELS = 87

DISTINCT = {
    "target": 206, "engine": 1, "worker": 206, "model": 3, "role": 1, "pool": 1, "namespace": 1, "cluster": 2,
    "tenant": 51, "cache": 4, "length": 5, "class": 4, "outcome": 6, "slo": 14, "service": 1, "policy": 3, "reason": 12,
    "tier": 5, "stage": 3, "step": 5, "kind": 3, "scope": 2, "result": 4, "flag": 30, "signal": 8, "quantile": 5,
    "latency": 4, "source": 4, "destination": 4, "prefix": 20, "dimension": 4, "gpu": 8, "discovery": 4, "le": 32,
    "temperature": 2, "finding": 5, "basis": 2, "figure": 8, "code": 5, "fault": 5, "label": 5, "job": 1, "instance": 2,
    "size": 5, "alertname": 60, "alertstate": 1, "severity": 2, "group": 8, "system": 4, "version": 3, "python": 1,
    "verdict": 2, "state": 5, "rule": 5, "certainty": 4, "file": 2, "trigger": 4, "why": 6, "part": 4,
}  # fmt: skip
"""Values of each label on the field fleet."""
_OF_A_TARGET = {"model", "role", "pool", "namespace", "cluster", "system", "version"}
"""Labels that a target has one value of."""


def _product(labels: set[str]) -> int:
    own = labels - _OF_A_TARGET if "target" in labels else labels
    return math.prod(DISTINCT[label] for label in own)


def most_series(node: Any) -> int:  # noqa: PLR0911  # one return per kind of node
    """An upper bound of the series that an expression has on the field fleet."""
    match node:
        case ast.AggregateExpr() if str(node.op) in {"topk", "bottomk"}:
            return min(int(getattr(node.param, "val", 0)), most_series(node.expr))
        case ast.AggregateExpr():
            by = set(node.modifier.labels) if node.modifier else set()
            return min(_product(by), most_series(node.expr))
        case ast.Call():
            found = [most_series(each) for each in node.args if not isinstance(each, ast.NumberLiteral)]
            return max(found, default=1) // (DISTINCT["le"] if node.func.name == "histogram_quantile" else 1) or 1
        case ast.ParenExpr() | ast.SubqueryExpr():
            return most_series(node.expr)
        case ast.MatrixSelector():
            return most_series(node.vector_selector)
        case ast.VectorSelector():
            name = str(node.name)
            return _product(set(series_labels()[name]) | ({"le"} if name.endswith("_bucket") else set()))
        case ast.BinaryExpr() if str(node.op) == "or":
            return most_series(node.lhs) + most_series(node.rhs)
        case ast.BinaryExpr():
            sides = [most_series(each) for each in (node.lhs, node.rhs) if not isinstance(each, ast.NumberLiteral)]
            return sides[0] if node.modifier is not None and len(sides) > 1 else max(sides)
        case _:
            return 1


def bound(asked: Asked) -> int:
    return most_series(ast.parse(Shown().expanded(asked.expr)))


@pytest.mark.parametrize(
    ("expr", "most"),
    [
        ("sum by (model) (rate(prefixwatch_requests_total[5m]))", 3),
        ("prefixwatch_scrape_age_seconds", 206),
        ("topk(10, prefixwatch_scrape_age_seconds)", 10),
        ("histogram_quantile(0.5, sum by (le, cache) (rate(prefixwatch_ttft_seconds_bucket[5m])))", 4),
        ("max by (target, signal) (prefixwatch_missing_signal)", 206 * 8),
    ],
)
def test_the_bound_counts_what_an_expression_keeps(expr: str, most: int) -> None:
    assert most_series(ast.parse(expr)) == most


PANELS = [
    one for one in everything_asked() if one.kind != "label values" and one.panel != "annotation" and not one.explains
]


@pytest.mark.parametrize("asked", PANELS, ids=str)
def test_no_query_has_more_series_than_a_browser_draws(asked: Asked) -> None:
    assert bound(asked) <= (MOST_LINES if asked.kind == "range" else MOST_SERIES), metrics_of(asked.expr)


def test_there_is_one_page_for_who_is_on_call_and_few_panels_in_all() -> None:
    boards = shipped()

    assert next(iter(boards.values())).title == "On call"
    assert sum(len(board.panels) for board in boards.values()) <= MOST_PANELS
