"""Metrics pages read one after another, as series: what a Prometheus would know after these scrapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(slots=True)
class Series:
    """One series; values in order of time, with its seconds on any one clock."""

    labels: Mapping[str, str]
    points: list[tuple[float, float]] = field(default_factory=list)

    @property
    def latest(self) -> float:
        return self.points[-1][1]


class Snapshots:
    """Series by metric name. A series that the newest page lacks is stale: it has no latest value."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, Series]] = defaultdict(dict)
        self._newest_seconds = 0.0

    def add_page(self, text: str, at_seconds: float) -> None:
        """One page in Prometheus' text format. Raises ValueError for text that isn't."""
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        self.add(((sample.name, sample.labels, sample.value) for sample in samples), at_seconds)

    def add(self, samples: Iterable[tuple[str, Mapping[str, str], float]], at_seconds: float) -> None:
        """The samples of one moment, later than those before."""
        self._newest_seconds = at_seconds
        for name, labels, value in samples:
            key = frozenset(labels.items())
            self._series[name].setdefault(key, Series(dict(labels))).points.append((at_seconds, value))

    def named(self, name: str) -> list[Series]:
        """The series of this name that the newest page has."""
        return [s for s in self._series.get(name, {}).values() if s.points[-1][0] == self._newest_seconds]


def increase(points: list[tuple[float, float]]) -> float | None:
    """How much a counter grew, a restart counting from zero; None from fewer than two points.

    Exact, where Prometheus extrapolates to the ends of its range.
    """
    if len(points) < 2:
        return None
    values = [value for _, value in points]
    return sum(later - earlier if later >= earlier else later for earlier, later in pairwise(values))
