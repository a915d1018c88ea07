"""The part of PromQL that runbook steps use, over a few snapshots of one metrics page: diagnosis without a Prometheus.

A range covers all snapshots, whatever its length says, and `increase` is exact instead of extrapolated. Everything
else is as in Prometheus, and tests hold both to the same answers. What isn't supported is refused, never guessed.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import promql_parser as ast

from prefixwatch.runbooks.snapshots import Series, Snapshots, increase
from prefixwatch.slo.promql import QueryError, parse


@dataclass(frozen=True, slots=True)
class Sample:
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


Vector = list[Sample]

_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else (math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a)),
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
    "avg": lambda values: math.fsum(values) / len(values),
    "count": lambda values: float(len(values)),
}
_OVER_TIME: dict[str, Callable[[list[float]], float]] = {
    "min_over_time": min,
    "max_over_time": max,
    "avg_over_time": lambda values: math.fsum(values) / len(values),
    "last_over_time": lambda values: values[-1],
    "count_over_time": lambda values: float(len(values)),
}


def evaluate(query: str, snapshots: Snapshots) -> Vector:
    """The query's instant vector at the newest snapshot; a number is a sample without labels."""
    answer = _Evaluator(snapshots).value(parse(query))
    return answer if isinstance(answer, list) else [Sample({}, answer)]


class _Evaluator:
    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def value(self, node: Any) -> Vector | float:
        match node:
            case ast.NumberLiteral():
                return float(node.val)
            case ast.ParenExpr():
                return self.value(node.expr)
            case ast.VectorSelector():
                return [Sample({"__name__": str(node.name), **s.labels}, s.latest) for s in self._select(node)]
            case ast.AggregateExpr():
                return self._aggregate(node)
            case ast.BinaryExpr():
                return _binary(str(node.op), self.value(node.lhs), self.value(node.rhs), node.modifier)
            case ast.Call():
                return self._call(node.func.name, node.args)
            case _:
                raise QueryError(f"{type(node).__name__} isn't supported without a Prometheus")

    def vector(self, node: Any) -> Vector:
        value = self.value(node)
        if not isinstance(value, list):
            raise QueryError("an instant vector is needed where a number stands")
        return value

    def _select(self, node: Any) -> list[Series]:
        if node.offset is not None or node.at is not None:
            raise QueryError("offset and @ need a Prometheus")
        return [series for series in self._snapshots.named(node.name) if _matches(series, node.matchers.matchers)]

    def _aggregate(self, node: Any) -> Vector:
        name = str(node.op)
        aggregate = _AGGREGATIONS.get(name)
        if name == "quantile":
            aggregate = partial(_of_values, float(node.param.val))
        if aggregate is None:
            raise QueryError(f"{name} isn't supported without a Prometheus")
        groups: dict[frozenset[tuple[str, str]], list[float]] = defaultdict(list)
        for sample in self.vector(node.expr):
            groups[_group(sample.labels, node.modifier)].append(sample.value)
        return [Sample(dict(labels), aggregate(values)) for labels, values in groups.items()]

    def _call(self, name: str, arguments: Sequence[Any]) -> Vector | float:
        if name in ("rate", "increase") or name in _OVER_TIME:
            if not isinstance(arguments[0], ast.MatrixSelector):
                raise QueryError(f"{name} of a subquery isn't supported without a Prometheus")
            return _over_range(name, self._select(arguments[0].vector_selector))
        if name == "histogram_quantile":
            quantile = self.value(arguments[0])
            assert isinstance(quantile, float)
            return _histogram_quantile(quantile, self.vector(arguments[1]))
        if name in ("clamp_min", "clamp_max"):
            limit = self.value(arguments[1])
            assert isinstance(limit, float)
            clamp = max if name == "clamp_min" else min
            return [Sample(_nameless(s.labels), clamp(s.value, limit)) for s in self.vector(arguments[0])]
        if name == "abs":
            return [Sample(_nameless(s.labels), abs(s.value)) for s in self.vector(arguments[0])]
        if name == "vector":
            number = self.value(arguments[0])
            assert isinstance(number, float)
            return [Sample({}, number)]
        raise QueryError(f"{name}() isn't supported without a Prometheus")


def _of_values(quantile: float, values: list[float]) -> float:
    """Linear between the two nearest ranks, as Prometheus' `quantile`."""
    ordered = sorted(values)
    rank = quantile * (len(ordered) - 1)
    lower = math.floor(rank)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] * (1 - (rank - lower)) + ordered[upper] * (rank - lower)


def _over_range(name: str, selected: Iterable[Series]) -> Vector:
    found = []
    for series in selected:
        if name in _OVER_TIME:
            value: float | None = _OVER_TIME[name]([point for _, point in series.points])
        else:
            value = increase(series.points)
            seconds = series.points[-1][0] - series.points[0][0]
            if value is not None and name == "rate":
                value = value / seconds
        if value is not None:
            found.append(Sample(dict(series.labels), value))
    return found


def _nameless(labels: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name != "__name__"}


def _matches(series: Series, matchers: Iterable[Any]) -> bool:
    return all(_match(matcher.op, series.labels.get(matcher.name, ""), matcher.value) for matcher in matchers)


def _match(op: Any, value: str, wanted: str) -> bool:
    if op in (ast.MatchOp.Equal, ast.MatchOp.NotEqual):
        return (value == wanted) == bool(op == ast.MatchOp.Equal)
    return (re.fullmatch(wanted, value) is not None) == bool(op == ast.MatchOp.Re)


def _group(labels: dict[str, str], modifier: Any) -> frozenset[tuple[str, str]]:
    if modifier is None:
        return frozenset()
    by = modifier.type == ast.AggModifierType.By
    return frozenset(item for item in labels.items() if (item[0] in modifier.labels) == by and item[0] != "__name__")


def _binary(op: str, left: Vector | float, right: Vector | float, modifier: Any) -> Vector | float:
    as_bool = bool(modifier and modifier.return_bool)
    if isinstance(left, float) and isinstance(right, float):
        return _ARITHMETIC[op](left, right) if op in _ARITHMETIC else float(_COMPARISONS[op](left, right))
    if isinstance(left, list) and isinstance(right, list):
        if op in ("and", "or", "unless"):
            return _set_operation(op, left, right, modifier)
        return _matched(op, left, right, modifier, as_bool=as_bool)
    found = []
    for sample in left if isinstance(left, list) else right:  # type: ignore[union-attr]  # one of the two is a vector
        a = sample.value if isinstance(left, list) else left
        b = sample.value if isinstance(right, list) else right
        found += _apply(op, a, b, sample.labels, sample.value, as_bool=as_bool)
    return found


def _apply(op: str, a: float, b: float, labels: dict[str, str], kept: float, *, as_bool: bool) -> Vector:
    """One pair: arithmetic and `bool` comparisons lose the metric's name, a filter keeps sample and name."""
    if op in _ARITHMETIC:
        return [Sample(_nameless(labels), _ARITHMETIC[op](a, b))]
    if op not in _COMPARISONS:
        raise QueryError(f"operator {op} isn't supported without a Prometheus")
    if as_bool:
        return [Sample(_nameless(labels), float(_COMPARISONS[op](a, b)))]
    return [Sample(labels, kept)] if _COMPARISONS[op](a, b) else []


def _signature(labels: dict[str, str], modifier: Any) -> frozenset[tuple[str, str]]:
    matching = modifier.matching if modifier else None
    if matching is None:
        return frozenset(_nameless(labels).items())
    on = matching.type == ast.LabelModifierType.Include
    return frozenset(item for item in _nameless(labels).items() if (item[0] in matching.labels) == on)


def _set_operation(op: str, left: Vector, right: Vector, modifier: Any) -> Vector:
    on_right = {_signature(sample.labels, modifier) for sample in right}
    if op == "or":
        on_left = {_signature(sample.labels, modifier) for sample in left}
        return left + [sample for sample in right if _signature(sample.labels, modifier) not in on_left]
    return [sample for sample in left if (_signature(sample.labels, modifier) in on_right) == (op == "and")]


def _matched(op: str, left: Vector, right: Vector, modifier: Any, *, as_bool: bool) -> Vector:
    """One-to-one, or many-to-one with group_left."""
    many = modifier is not None and modifier.card != ast.VectorMatchCardinality.OneToOne
    if many and modifier.card != ast.VectorMatchCardinality.ManyToOne:
        raise QueryError("group_right isn't supported without a Prometheus: turn the sides round")
    ones = {_signature(sample.labels, modifier): sample for sample in right}
    if len(ones) != len(right):
        raise QueryError("several series on the right match one on the left: aggregate, or match on more labels")
    found: Vector = []
    seen: set[frozenset[tuple[str, str]]] = set()
    for sample in left:
        signature = _signature(sample.labels, modifier)
        if signature not in ones:
            continue
        if not many and signature in seen:
            raise QueryError("several series on the left match one on the right: aggregate, or use group_left")
        seen.add(signature)
        labels = sample.labels if many or op in _COMPARISONS else dict(signature)
        found += _apply(op, sample.value, ones[signature].value, labels, sample.value, as_bool=as_bool)
    return found


def _histogram_quantile(quantile: float, buckets: Vector) -> Vector:
    """Linear within the bucket, the highest finite bound for what lies beyond it, NaN without observations."""
    groups: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = defaultdict(list)
    for sample in buckets:
        labels = _nameless(sample.labels)
        bound = float(labels.pop("le"))
        groups[frozenset(labels.items())].append((bound, sample.value))
    return [Sample(dict(labels), _quantile(quantile, _rising(sorted(found)))) for labels, found in groups.items()]


def _rising(buckets: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Cumulative counts that sink, from pages of different moments, are held up, as Prometheus does."""
    counts = accumulate((count for _, count in buckets), max)
    return [(bound, count) for (bound, _), count in zip(buckets, counts, strict=True)]


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    total = buckets[-1][1]
    if not total or not math.isinf(buckets[-1][0]) or len(buckets) < 2:
        return math.nan
    rank = quantile * total
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return buckets[-2][0]
            if bound <= 0:
                return bound
            return lower + (bound - lower) * (rank - below) / (count - below) if count > below else bound
        lower, below = bound, count
    return math.nan
