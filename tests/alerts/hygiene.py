"""Faults of a PromQL expression that need no Prometheus to be seen: unknown names, raw counters, unguarded divisions,
missing comparisons. The checks follow dashboard-linter and pint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import promql_parser as ast

from prefixwatch.alerts.build import PROMETHEUS_OWN
from prefixwatch.exporters.metrics_page.families import FAMILIES
from prefixwatch.slo.promql import metric_names, walk

COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})
RANGE_FUNCTIONS = frozenset({"rate", "increase", "irate", "absent_over_time", "present_over_time", "resets"})
ALWAYS = frozenset({"job", "instance", "le", "__name__", "slo", "service"})


@dataclass(frozen=True, slots=True)
class Names:
    """Every name that a rule may use, with its labels, and which of them are counters."""

    labels: Mapping[str, Sequence[str]]
    counters: frozenset[str]


def exporter_names(recorded: Mapping[str, Sequence[str]]) -> Names:
    """The exporter's families, Prometheus' own series, and what rules record."""
    labels: dict[str, Sequence[str]] = {**PROMETHEUS_OWN, **recorded}
    counters = set()
    for family in FAMILIES.values():
        labels[family.full_name] = family.labels
        if family.kind == "counter":
            counters.add(family.full_name)
        if family.kind == "histogram":
            for suffix in ("_bucket", "_count", "_sum"):
                labels[family.full_name + suffix] = family.labels
                counters.add(family.full_name + suffix)
    return Names(labels, frozenset(counters))


def faults(expr: str, names: Names) -> list[str]:
    """What is wrong with an expression; empty when nothing is."""
    root = ast.parse(expr)
    return [*_unknown(root, names), *_raw_counters(root, names), *_unguarded(root), *_bool_less(root)]


def compares(expr: str) -> bool:
    """Whether an alert's expression can be false: a comparison, or `absent`."""
    return any(
        (isinstance(node, ast.BinaryExpr) and str(node.op) in COMPARISONS)
        or (isinstance(node, ast.Call) and node.func.name.startswith("absent"))
        for node, _ in walk(ast.parse(expr))
    )


def ranges(expr: str) -> list[float]:
    """Lengths of all ranges in seconds; of a subquery, its step."""
    found = []
    for node, _ in walk(ast.parse(expr)):
        if isinstance(node, ast.MatrixSelector):
            found.append(node.range.total_seconds())
        if isinstance(node, ast.SubqueryExpr) and node.step is not None:
            found.append(node.step.total_seconds())
    return found


def metrics(expr: str) -> set[str]:
    """Names of all series that an expression reads."""
    return set(metric_names(expr))


def _unknown(root: Any, names: Names) -> Iterator[str]:
    for node, _ in walk(root):
        if not isinstance(node, ast.VectorSelector):
            continue
        name = str(node.name)
        if name not in names.labels:
            yield f"no series is called {name}"
            continue
        for matcher in node.matchers.matchers:
            if matcher.name not in names.labels[name] and matcher.name not in ALWAYS:
                yield f"{name} has no label {matcher.name}"


def _raw_counters(root: Any, names: Names) -> Iterator[str]:
    for node, above in walk(root):
        if not isinstance(node, ast.VectorSelector) or node.name not in names.counters:
            continue
        if not any(isinstance(up, ast.Call) and up.func.name in RANGE_FUNCTIONS for up in above):
            yield f"{node.name} is a counter: take its rate or increase"


def _unguarded(root: Any) -> Iterator[str]:
    """A denominator that can be 0 makes NaN, which no comparison sees (SL01)."""
    for node, _ in walk(root):
        if isinstance(node, ast.BinaryExpr) and str(node.op) == "/" and not _is_guarded(node.rhs):
            yield f"unguarded division by {node.rhs.prettify()}: compare it with > 0"


def _is_guarded(node: Any) -> bool:
    inner = node
    while isinstance(inner, ast.ParenExpr):
        inner = inner.expr
    if isinstance(inner, ast.NumberLiteral):
        return inner.val != 0
    if isinstance(inner, ast.Call) and inner.func.name == "clamp_min":
        least = inner.args[1]
        return isinstance(least, ast.NumberLiteral) and least.val > 0
    return isinstance(inner, ast.BinaryExpr) and str(inner.op) in {">", ">="}


def _bool_less(root: Any) -> Iterator[str]:
    """A comparison whose result is counted needs `bool`, or it counts values."""
    for node, above in walk(root):
        if isinstance(node, ast.BinaryExpr) and str(node.op) in COMPARISONS and above:
            up = above[-1]
            if isinstance(up, ast.AggregateExpr) and str(up.op) in ("sum", "avg"):
                yield f"{node.prettify()} is added up by value: use bool"


TEMPLATE = re.compile(r"\{\{\s*([^}]+?)\s*\}\}")


def template_faults(text: str, labels: set[str]) -> list[str]:
    """Fields of an annotation that the alert doesn't have."""
    found = []
    for expression in TEMPLATE.findall(text):
        used = set(re.findall(r"\$labels\.(\w+)", expression))
        found += [f"the alert has no label {name}" for name in sorted(used - labels)]
        if not used and "$value" not in expression:
            found.append(f"{{{{ {expression} }}}} is neither the value nor a label")
    return found
