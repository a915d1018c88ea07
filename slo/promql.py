"""The counters that an indicator's query names, whatever it is wrapped in.

OpenSLO leaves the form of a query open: a bare counter, `sum(counter)`, `sum(rate(counter[5m]))`, or Sloth's
`[{{.window}}]`. Rules need the counter alone, and put their own windows around it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import promql_parser as ast

_PLACEHOLDER = re.compile(r"\{\{\s*\.window\s*\}\}|\$__rate_interval|\$window")
_UNWRAPPED = ("rate", "increase", "irate")


class QueryError(Exception):
    """A query that no counter can be taken from; says why and what to write."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric and its matchers, e.g. `requests_total{code="500"}`."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator (=, !=, =~, !~), value."""

    def __str__(self) -> str:
        return self.with_suffix("")

    def with_suffix(self, suffix: str, *extra: str) -> str:
        """The selector of `metric` + suffix with further matchers written as PromQL has them."""
        inner = [f"{label}{op}{_quoted(value)}" for label, op, value in self.matchers] + list(extra)
        return f"{self.metric}{suffix}{{{', '.join(inner)}}}" if inner else f"{self.metric}{suffix}"

    @property
    def labels(self) -> set[str]:
        return {label for label, _, _ in self.matchers}


def selector_of(query: str) -> Selector:
    """The one counter of a query. Raises QueryError."""
    found = _unwrap(_parse(query), query)
    matchers = [(str(m.name), _operator(m.op), str(m.value)) for m in found.matchers.matchers]
    named = [value for label, op, value in matchers if label == "__name__" and op == "="]
    name = found.name or next(iter(named), None)
    if not name:
        raise QueryError(f'{query!r} has no metric\'s name: write metric{{label="value"}}')
    return Selector(str(name), tuple(matcher for matcher in matchers if matcher[0] != "__name__"))


def is_rate(query: str) -> bool:
    """Whether the query takes a counter's rate or increase. Raises QueryError."""
    return _has_rate(_parse(query))


def _has_rate(node: ast.Expr) -> bool:
    match node:
        case ast.Call():
            return node.func.name in _UNWRAPPED
        case ast.ParenExpr() | ast.AggregateExpr():
            return _has_rate(node.expr)
        case ast.BinaryExpr():
            return _has_rate(node.lhs)
    return False


def _parse(query: str) -> ast.Expr:
    text = _PLACEHOLDER.sub("5m", query)
    try:
        return ast.parse(text)
    except ValueError as error:
        raise QueryError(f"{query!r} is no PromQL: {error}") from error


def _unwrap(node: ast.Expr, query: str) -> ast.VectorSelector:
    match node:
        case ast.VectorSelector() if node.offset is not None or node.at is not None:
            raise QueryError(f"{query!r} asks for another time: rules put their own windows around it, take it out")
        case ast.VectorSelector():
            return node
        case ast.BinaryExpr() if str(node.op) == "or" and _is_zero(node.rhs):
            return _unwrap(node.lhs, query)
        case ast.ParenExpr():
            return _unwrap(node.expr, query)
        case ast.MatrixSelector():
            return node.vector_selector
        case ast.AggregateExpr() if str(node.op) == "sum" and node.modifier is None:
            return _unwrap(node.expr, query)
        case ast.Call() if node.func.name in _UNWRAPPED:
            return _unwrap(node.args[0], query)
    raise QueryError(
        f"{query!r} is more than a counter: give metric{{label='value'}}, or that within sum() and rate(); "
        "make a recording rule of the rest and name it here"
    )


def _is_zero(node: ast.Expr) -> bool:
    """`vector(0)`, which others add for a counter that doesn't exist before its first event: rules do so anyway."""
    return (
        isinstance(node, ast.Call)
        and node.func.name == "vector"
        and isinstance(node.args[0], ast.NumberLiteral)
        and node.args[0].val == 0
    )


def _operator(op: object) -> str:
    name = str(op)
    return {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}[name]


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
