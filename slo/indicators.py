"""An OpenSLO indicator → the series that count its events; every error names the line of its query."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prefixwatch.documents import Document, KeyPath
from prefixwatch.documents.hints import did_you_mean
from prefixwatch.slo.buckets import BOUNDS, le_condition, nearest
from prefixwatch.slo.objective import SIGNS
from prefixwatch.slo.openslo import BUCKETS, Metric, ObjectiveSpec, RatioMetric
from prefixwatch.slo.promql import QueryError, Selector, is_rate, selector_of
from prefixwatch.slo.read import Library, Slo
from prefixwatch.slo.rule_model import HistogramIndicator, Indicator, RatioIndicator, ValueIndicator

KnownMetrics = Mapping[str, Sequence[str]]
"""The exporter's metrics and their labels: a name that begins with `prefixwatch_` must be among them."""

PROMETHEUS_LIKE = ("", "prometheus", "promql", "victoriametrics", "mimir", "thanos")
OPERATORS: Mapping[str, Literal["<=", "<", ">=", ">"]] = {"lte": "<=", "lt": "<", "gte": ">=", "gt": ">"}
_QUERY_KEYS = ("query", "promql")
_COUNTER_SUFFIXES = ("_total", "_count", "_sum", "_bucket")
_TARGET_LABELS = frozenset({"le", "job", "instance"})


class IndicatorReader:
    """Reads the indicators of one SLO."""

    def __init__(self, source: Slo, library: Library, known: KnownMetrics | None) -> None:
        self._source = source
        self._library = library
        self._known = known

    def read(self, position: int) -> tuple[Indicator, str]:
        """The indicator of an objective, and its events in words. Raises DocumentError."""
        spec, document, key = self._library.indicator(self._source, position)
        if spec.ratioMetric is not None:
            ratio = self._ratio(document, (*key, "ratioMetric"), spec.ratioMetric)
            side = f"good: {ratio.good}" if ratio.good else f"bad: {ratio.bad}"
            return ratio, f"{ratio.total} ({side})"
        if spec.thresholdMetric is None:
            raise document.error(key, "give exactly one of thresholdMetric and ratioMetric")
        return self._threshold(document, (*key, "thresholdMetric"), spec.thresholdMetric, position)

    def _ratio(self, document: Document[Any], key: KeyPath, metric: RatioMetric) -> RatioIndicator:
        if metric.total is None:
            raise document.error((*key, "raw"), "a raw ratio has no events to weigh: give good (or bad) and total")
        self._check_counters(document, key, metric)
        return RatioIndicator(
            total=self._selector(document, (*key, "total"), metric.total),
            good=None if metric.good is None else self._selector(document, (*key, "good"), metric.good),
            bad=None if metric.bad is None else self._selector(document, (*key, "bad"), metric.bad),
        )

    def _check_counters(self, document: Document[Any], key: KeyPath, metric: RatioMetric) -> None:
        """A gauge's values can't be added up. `counter: false` is correct for the rate of a counter."""
        for side in ("good", "bad", "total"):
            part: Metric | None = getattr(metric, side)
            if part is None or metric.counter:
                continue
            query = self._query(document, (*key, side), part)
            found = self._selector(document, (*key, side), part)
            named = metric.counter is None and found.metric.endswith(_COUNTER_SUFFIXES)
            if not named and not is_rate(query):
                text = f"gauges can't be added up over time: count events, counter: true (of {side}: {query!r})"
                raise document.error((*key, "counter"), text)

    def _threshold(self, document: Document[Any], key: KeyPath, metric: Metric, position: int) -> tuple[Indicator, str]:
        objective = self._source.content.spec.objectives[position]
        op, value = _comparison(self._source, objective, position)
        query = self._query(document, key, metric)
        words = f"{SIGNS[op]} {value:g}"
        occurrences = self._source.content.spec.budgetingMethod == "Occurrences"
        histogram = self._histogram(document, key, query, required=occurrences)
        if histogram is not None:
            self._check_bound(histogram, value, position)
            unit = " s" if histogram.metric.endswith("_seconds") else ""
            return HistogramIndicator(histogram, value, above=op in ("gte", "gt")), f"{histogram} {words}{unit}"
        return ValueIndicator(query, OPERATORS[op], value), f"the time with {query} {words}"

    def _histogram(self, document: Document[Any], key: KeyPath, query: str, *, required: bool) -> Selector | None:
        """The histogram that a query names; None where it names a value that time slices compare."""
        try:
            found = selector_of(query)
        except QueryError as error:
            if required:
                raise document.error((*key, "metricSource", "spec"), str(error)) from error
            return None
        base = _without_suffix(found)
        self._check_known(document, key, base if base.metric in BOUNDS else found)
        own_bounds = BUCKETS in self._source.content.metadata.annotations
        if base.metric in BOUNDS or own_bounds or found.metric.endswith("_bucket"):
            return base
        if required:
            raise document.error(
                (*key, "metricSource", "spec"),
                f"{query!r} gives values, not events: name a histogram's _bucket, list its bounds in {BUCKETS}, or use "
                "budgetingMethod: Timeslices",
            )
        return None

    def _check_bound(self, histogram: Selector, value: float, position: int) -> None:
        """A threshold between two bounds would count the wrong requests (sloth#506, EM22)."""
        bounds = self._bounds(histogram)
        if bounds is None or value in bounds:
            return
        text = _off_the_bounds(histogram.metric, value, bounds)
        raise self._source.error(("spec", "objectives", position, "value"), text)

    def _bounds(self, histogram: Selector) -> Sequence[float] | None:
        """None: not known, for a histogram of another exporter."""
        given = self._source.content.metadata.annotations.get(BUCKETS)
        if given is None:
            return BOUNDS.get(histogram.metric)
        try:
            return sorted(float(part) for part in given.split(",") if part.strip())
        except ValueError as error:
            key = ("metadata", "annotations", BUCKETS)
            raise self._source.error(key, f"{given!r} is not a list of numbers: write 0.1, 0.5, 1") from error

    def _selector(self, document: Document[Any], key: KeyPath, metric: Metric) -> Selector:
        query = self._query(document, key, metric)
        try:
            found = selector_of(query)
        except QueryError as error:
            raise document.error((*key, "metricSource", "spec"), str(error)) from error
        self._check_known(document, key, found)
        return Selector(found.metric, tuple(self._matcher(document, key, found, one) for one in found.matchers))

    def _matcher(
        self, document: Document[Any], key: KeyPath, found: Selector, matcher: tuple[str, str, str]
    ) -> tuple[str, str, str]:
        """A bucket's bound as every version of Prometheus writes it, if it is one of the histogram's (SL06, EM22)."""
        label, operator, text = matcher
        if label != "le" or operator != "=" or not _is_finite(text):
            return matcher
        bound, bounds = float(text), self._bounds(_without_suffix(found))
        if bounds is not None and bound not in bounds:
            raise document.error((*key, "metricSource", "spec", "query"), _off_the_bounds(found.metric, bound, bounds))
        return (label, *le_condition(bound))

    def _query(self, document: Document[Any], key: KeyPath, metric: Metric) -> str:
        source = metric.metricSource
        kind = self._library.source_type(document, source, (*key, "metricSource"))
        if kind not in PROMETHEUS_LIKE:
            text = f"{kind} is not supported: rules are written for Prometheus, use type: Prometheus"
            raise document.error((*key, "metricSource", "type"), text)
        query = next((source.spec[name] for name in _QUERY_KEYS if name in source.spec), None)
        if not isinstance(query, str):
            raise document.error((*key, "metricSource", "spec"), "has no query: add query: a PromQL text")
        return query

    def _check_known(self, document: Document[Any], key: KeyPath, found: Selector) -> None:
        if self._known is None or not found.metric.startswith("prefixwatch_"):
            return
        place = (*key, "metricSource", "spec", "query")
        name = found.metric
        if name not in self._known:
            hint = did_you_mean(name, self._known, "`prefixwatch exporter --once` prints those it has")
            raise document.error(place, f"the exporter has no metric {name}: {hint}")
        for label in sorted(found.labels - set(self._known[name]) - _TARGET_LABELS):
            text = f"{name} has no label '{label}': its labels are {', '.join(self._known[name]) or 'none'}"
            raise document.error(place, text)


def _comparison(source: Slo, objective: ObjectiveSpec, position: int) -> tuple[str, float]:
    if objective.op is None or objective.value is None:
        raise source.error(("spec", "objectives", position), "a thresholdMetric needs op and value here: add them")
    return objective.op, objective.value


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _off_the_bounds(metric: str, value: float, bounds: Sequence[float]) -> str:
    near = " or ".join(f"{bound:g}" for bound in nearest(bounds, value))
    listed = ", ".join(f"{bound:g}" for bound in bounds)
    return f"{value:g} is not a bucket bound of {metric}: use {near} (its bounds: {listed})"


def _without_suffix(found: Selector) -> Selector:
    for suffix in ("_bucket", "_count", "_sum"):
        if found.metric.endswith(suffix):
            without_le = tuple(matcher for matcher in found.matchers if matcher[0] != "le")
            return Selector(found.metric.removesuffix(suffix), without_le)
    return found
