"""Histograms as Prometheus has them: cumulative counts at upper bounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound, ascending, +Inf last. `total` is the sum of the observations, if known."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float | None = None

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def mean(self) -> float | None:
        return self.total / self.count if self.total is not None and self.count > 0 else None

    def quantile(self, q: float) -> float | None:
        """The q-quantile, interpolated inside its bucket as Prometheus' histogram_quantile does.

        None without observations and when it lies beyond the last finite bound: there it isn't known.
        """
        if self.count <= 0:
            return None
        rank = q * self.count
        slot = bisect_left(self.counts, rank)
        upper = self.bounds[slot]
        if math.isinf(upper):
            return None
        lower = self.bounds[slot - 1] if slot else min(0.0, upper)
        below = self.counts[slot - 1] if slot else 0.0
        inside = self.counts[slot] - below
        return upper if inside <= 0 else lower + (upper - lower) * (rank - below) / inside

    def only_bucket(self) -> float | None:
        """The upper bound of the one bucket that all observations are in; None when there are several, or none."""
        slots = [i for i, inside in enumerate(self.per_bucket()) if inside > 0]
        return self.bounds[slots[0]] if len(slots) == 1 else None

    def per_bucket(self) -> list[float]:
        """Observations inside each bucket."""
        return [count - below for count, below in zip(self.counts, (0.0, *self.counts), strict=False)]

    def at_bounds(self, bounds: Sequence[float]) -> Histogram:
        """The same on a coarser grid; every one of `bounds` must be one of its own."""
        known = dict(zip(self.bounds, self.counts, strict=True))
        return Histogram(tuple(bounds), tuple(known[bound] for bound in bounds), self.total)


def merge(histograms: Iterable[Histogram]) -> Histogram | None:
    """Add histograms at the bounds that all of them have; None when there is none to add.

    Counts at a bound that only some have can't be added up: bounds that differ are dropped, and if only +Inf
    is left the sum still gives their number, and no quantile.
    """
    given = [histogram for histogram in histograms if histogram.counts]
    if not given:
        return None
    if all(histogram.bounds == given[0].bounds for histogram in given):
        return _add(given)
    common = sorted(set.intersection(*(set(histogram.bounds) for histogram in given)))
    return _add([histogram.at_bounds(common) for histogram in given])


def _add(histograms: Sequence[Histogram]) -> Histogram:
    """The sum of histograms that have the same bounds."""
    if len(histograms) == 1:
        return histograms[0]
    counts = tuple(np.array([histogram.counts for histogram in histograms]).sum(axis=0).tolist())
    totals = [histogram.total for histogram in histograms]
    total = None if any(one is None for one in totals) else sum(one for one in totals if one is not None)
    return Histogram(histograms[0].bounds, counts, total)
