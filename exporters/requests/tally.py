"""Counters and histograms that the exporter itself fills, by label values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily

from exporters.families import FAMILIES, counter, histogram
from kvcache.request_record import RequestRecord
from slo.buckets import BOUNDS

_LONGEST_TRACE_ID = 128 - len("trace_id")
"""OpenMetrics allows an exemplar's labels 128 characters, names included; a longer one spoils the whole page."""


class Tally:
    """One counter family. Raises KeyError for a name that isn't in the table of families."""

    def __init__(self, name: str) -> None:
        self.name = FAMILIES[name].name
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *labels: str) -> None:
        """0 makes the series appear: a rate only sees what is added to a series that is there."""
        self._sums[labels] = self._sums.get(labels, 0.0) + amount

    def value(self, *labels: str) -> float | None:
        """What was counted; None when there is no such series."""
        return self._sums.get(labels)

    def metric(self) -> CounterMetricFamily:
        family = counter(self.name)
        for labels, total in self._sums.items():
            family.add_metric(labels, total)
        return family


class Distribution:
    """One histogram: counts by bucket, their sum, and the last traced observation of each bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._exemplars: list[Exemplar | None] = [None] * len(self._bounds)
        self._total = 0.0

    def observe(self, value: float, of: RequestRecord | None = None) -> None:
        slot = bisect_left(self._bounds, value)
        self._counts[slot] += 1
        self._total += value
        if of is not None and 0 < len(of.trace_id) <= _LONGEST_TRACE_ID:
            self._exemplars[slot] = Exemplar({"trace_id": of.trace_id}, value, of.ended_unix_seconds)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        below = 0
        for bound, count, exemplar in zip(self._bounds, self._counts, self._exemplars, strict=True):
            below += count
            name = "+Inf" if math.isinf(bound) else repr(float(bound))
            buckets.append((name, below) if exemplar is None else (name, below, exemplar))
        family.add_metric(labels, buckets, self._total)


class Distributions:
    """One histogram family, with the bounds that objectives' thresholds are held to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bounds = BOUNDS[FAMILIES[name].full_name]
        self._by_labels: dict[tuple[str, ...], Distribution] = {}

    def observe(self, value: float, *labels: str, of: RequestRecord | None = None) -> None:
        """`of` is the request that the value can be traced to."""
        distribution = self._by_labels.get(labels)
        if distribution is None:
            distribution = self._by_labels[labels] = Distribution(self._bounds)
        distribution.observe(value, of)

    def metric(self) -> HistogramMetricFamily:
        family = histogram(self.name)
        for labels, distribution in self._by_labels.items():
            distribution.add_to(family, labels)
        return family
