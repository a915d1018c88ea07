"""Metric families to be filled: rows of label values and a number, or a histogram.

They are prometheus_client's families to every reader, but a page is written from the rows themselves: a sample object
for each line costs more than all the rest of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from prometheus_client.core import Exemplar, Metric
from prometheus_client.samples import Sample

from prefixwatch.exporters.metrics_page.families import FAMILIES, NAMESPACE
from prefixwatch.exporters.scraping.histogram import Histogram

Buckets = Sequence[tuple[str, float] | tuple[str, float, Exemplar]]
"""Cumulative counts by upper bound, +Inf last, perhaps with an exemplar each."""


class Family(Metric):
    """A family of the table (`exporters.metrics_page.families`). Raises KeyError for a name that isn't in it."""

    def __init__(self, name: str) -> None:
        self.row = FAMILIES[name]
        self.name = NAMESPACE + name
        self.documentation = self.row.help
        self.type = self.row.kind
        self.unit = ""


class Rows(Family):
    """Of numbers: a counter, a gauge, quantiles."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sample_name = self.row.full_name
        self.values: list[tuple[Sequence[str], float]] = []

    def add_metric(self, labels: Sequence[str], value: float | None) -> None:
        """One series, by the values of the family's labels in their order; None is unknown and left out."""
        if value is not None:
            self.values.append((labels, value))

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        given = self.row.given
        return [Sample(self.sample_name, dict(zip(given, labels, strict=True)), value) for labels, value in self.values]


class Histograms(Family):
    """Of histograms, with the sum and the count where the sum is known."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.values: list[tuple[Sequence[str], Buckets, float | None]] = []

    def add_metric(self, labels: Sequence[str], buckets: Buckets, total: float | None) -> None:
        """One histogram, by the values of the family's labels in their order."""
        self.values.append((labels, buckets, total))

    def add(self, labels: Sequence[str], histogram: Histogram) -> None:
        """As `add_metric`."""
        buckets = list(zip(_bucket_names(histogram.bounds), histogram.counts, strict=True))
        self.values.append((labels, buckets, histogram.total))

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        found = []
        for values, buckets, total in self.values:
            labels = dict(zip(self.row.given, values, strict=True))
            for bound, count, *traced in buckets:
                exemplar = traced[0] if traced else None
                found.append(Sample(f"{self.name}_bucket", {**labels, "le": bound}, count, exemplar=exemplar))
            if total is not None:
                found.append(Sample(f"{self.name}_count", labels, buckets[-1][1]))
                found.append(Sample(f"{self.name}_sum", labels, total))
        return found


def rows(name: str, values: Iterable[tuple[Sequence[str], float | None]] = ()) -> Rows:
    """A family of numbers with these series. Raises KeyError for a name that isn't in the table."""
    family = Rows(name)
    family.values = [(labels, value) for labels, value in values if value is not None]
    return family


def histograms(name: str, values: Iterable[tuple[Sequence[str], Histogram]] = ()) -> Histograms:
    """A family of histograms with these series. Raises KeyError for a name that isn't in the table."""
    family = Histograms(name)
    for labels, histogram in values:
        family.add(labels, histogram)
    return family


def has_samples(family: Metric) -> bool:
    """Whether a family would have a sample on a page."""
    return bool(family.values if isinstance(family, Rows | Histograms) else family.samples)


@lru_cache
def _bucket_names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple("+Inf" if math.isinf(bound) else repr(bound) for bound in bounds)
