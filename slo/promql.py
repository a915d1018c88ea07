"""PromQL as a syntax tree: walked, and reduced to the counter that an indicator's query names.

OpenSLO leaves the form of a query open: a bare counter, `sum(counter)`, `sum(rate(counter[5m]))`, or Sloth's
`[{{.window}}]`. Rules need the counter alone, and put their own windows around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as ast

_PLACEHOLDER = re.compile(r"\{\{\s*\.window\s*\}\}|\$__rate_interval|\$window")
_UNWRAPPED = ("rate", "increase", "irate")
_OPERATORS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}
_PARTS = ("lhs", "rhs", "expr", "param", "vector_selector", "args")


class QueryError(Exception):
    """A query that can't be parsed or isn't supported; the message says why and what to write."""


def parse(query: str) -> Any:
    """The syntax tree. Raises QueryError with the query."""
    try:
        return ast.parse(query)
    except ValueError as error:
        raise QueryError(f"not PromQL: {query}: {error}") from error


def walk(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each node with its ancestors, outermost first; operands in the order in which they are written."""
    yield node, above
    for part in _PARTS:
        below = getattr(node, part, None)
        for child in below if isinstance(below, list) else [] if below is None else [below]:
            yield from walk(child, (*above, node))


def metric_names(query: str) -> list[str]:
    """Every metric that a query selects, in order of appearance. Raises QueryError."""
    nodes = (node for node, _ in walk(parse(query)) if isinstance(node, ast.VectorSelector))
    return list(dict.fromkeys(str(node.name) for node in nodes if node.name))


def closing(query: str, start: int) -> int:
    """The position just behind the parenthesis that closes the one before `start`; quoted text is skipped."""
    depth, quoted = 1, False
    for position in range(start, len(query)):
        character = query[position]
        if character == '"' and query[position - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return position + 1
    raise QueryError(f"a parenthesis isn't closed: {query[start:]}")


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric and its matchers, e.g. `requests_total{code="500"}`."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator (=, !=, =~, !~), value."""

    def __str__(self) -> str:
        return self.with_suffix("")

    def with_suffix(self, suffix: str, *extra: str) -> str:
        """The selector of `metric` + suffix with additional matchers, written as in PromQL."""
        inner = [f"{label}{op}{_quoted(value)}" for label, op, value in self.matchers] + list(extra)
        return f"{self.metric}{suffix}{{{', '.join(inner)}}}" if inner else f"{self.metric}{suffix}"

    @property
    def labels(self) -> set[str]:
        return {label for label, _, _ in self.matchers}


def selector_of(query: str) -> Selector:
    """The one counter of a query. Raises QueryError."""
    found = _unwrap(parse(_PLACEHOLDER.sub("5m", query)), query)
    matchers = [(str(m.name), _OPERATORS[str(m.op)], str(m.value)) for m in found.matchers.matchers]
    named = [value for label, op, value in matchers if label == "__name__" and op == "="]
    name = found.name or next(iter(named), None)
    if not name:
        raise QueryError(f'{query!r} has no metric name: write metric{{label="value"}}')
    return Selector(str(name), tuple(matcher for matcher in matchers if matcher[0] != "__name__"))


def is_rate(query: str) -> bool:
    """Whether the query takes a counter's rate or increase. Raises QueryError."""
    nodes = walk(parse(_PLACEHOLDER.sub("5m", query)))
    return any(isinstance(node, ast.Call) and node.func.name in _UNWRAPPED for node, _ in nodes)


def _unwrap(node: Any, query: str) -> ast.VectorSelector:
    match node:
        case ast.VectorSelector():
            if node.offset is not None or node.at is not None:
                raise QueryError(f"{query!r} has offset or @: remove it, as rules put their own windows around it")
            return node
        case ast.MatrixSelector():
            return _unwrap(node.vector_selector, query)
        case ast.BinaryExpr() if str(node.op) == "or" and _is_zero(node.rhs):
            return _unwrap(node.lhs, query)
        case ast.ParenExpr():
            return _unwrap(node.expr, query)
        case ast.AggregateExpr() if str(node.op) == "sum" and node.modifier is None:
            return _unwrap(node.expr, query)
        case ast.Call() if node.func.name in _UNWRAPPED:
            return _unwrap(node.args[0], query)
    raise QueryError(
        f"{query!r} is more than a counter: give metric{{label='value'}}, or that within sum() and rate(); "
        "make a recording rule of the rest and name it here"
    )


def _is_zero(node: Any) -> bool:
    """`vector(0)`, which others add for a counter that doesn't exist before its first event; our rules do so anyway."""
    return (
        isinstance(node, ast.Call)
        and node.func.name == "vector"
        and isinstance(node.args[0], ast.NumberLiteral)
        and node.args[0].val == 0
    )


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
