"""A statistic of thousands of resamples of the same blocks of values, at little cost.

Every block is summed up once; a resample is then a vector that says how often each block is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GRID_SIZE = 8192
"""Values among which a resampled quantile is looked up; see `_grid`."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """What is compared: the mean of the requests' values, or a quantile of them in (0, 1)."""

    quantile: float | None = None


MEAN = Statistic()


class Tally(Protocol):
    """The values of all blocks, summed up so that thousands of resamples cost little."""

    def values(self, weights: Floats) -> Floats:
        """The statistic by resample; weights (resamples × blocks) say how often each block is in. NaN of nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _MeanTally:
    sums: Floats
    counts: Floats

    def values(self, weights: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.asarray(_dot(weights, self.sums) / _dot(weights, self.counts), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _QuantileTally:
    quantile: float
    grid: Floats
    ladder: Floats
    """Values of each block at or below each grid value: grid × blocks of both sides."""

    def values(self, weights: Floats) -> Floats:
        counts = _dot(weights, self.ladder[-1])
        rank = (counts - 1) * self.quantile
        below = np.floor(rank)
        low = self._values_at(weights, below)
        high = self._values_at(weights, np.minimum(below + 1, counts - 1))
        return np.where(counts > 0, low + (high - low) * (rank - below), np.nan)

    def _values_at(self, weights: Floats, rank: Floats) -> Floats:
        """The value at this rank, counted from 0, of each resample: all of them bisect the grid in step."""
        first, last = np.zeros(len(rank), dtype=np.int64), np.full(len(rank), len(self.grid) - 1)
        for _ in range(len(self.grid).bit_length()):
            middle = (first + last) // 2
            reached = _dot(weights, self.ladder[middle]) > rank
            last = np.where(reached, middle, last)
            first = np.where(reached, first, np.minimum(middle + 1, last))
        return np.asarray(self.grid[last], dtype=np.float64)


def _dot(weights: Floats, values: Floats) -> Floats:
    """Row by row; not BLAS, whose threads would fight over the machine that is being measured."""
    return np.asarray(np.einsum("rk,k->r" if values.ndim == 1 else "rk,rk->r", weights, values), dtype=np.float64)


def tally_of(values: Floats, cells: Ints, count: int, statistic: Statistic) -> Tally:
    """`cells` gives each value's block; there are `count` of them, those of the first side first."""
    known = ~np.isnan(values)
    values, cells = values[known], cells[known]
    if statistic.quantile is None:
        sums = np.bincount(cells, weights=values, minlength=count)
        return _MeanTally(np.asarray(sums, dtype=np.float64), np.bincount(cells, minlength=count).astype(np.float64))
    grid = _grid(values, statistic.quantile)
    position = np.minimum(np.searchsorted(grid, values), len(grid) - 1)
    histogram = np.bincount(position * count + cells, minlength=len(grid) * count)
    ladder = np.cumsum(histogram.reshape(len(grid), count), axis=0, dtype=np.float64)
    return _QuantileTally(statistic.quantile, grid, ladder)


def _grid(values: Floats, quantile: float) -> Floats:
    """The distinct values, thinned when they are too many: half of the grid over all ranks, half near the quantile."""
    distinct = np.unique(values)
    if len(distinct) <= GRID_SIZE:
        return distinct
    near = np.clip(np.linspace(quantile - 0.03, quantile + 0.03, GRID_SIZE // 2), 0, 1)
    ranks = np.concatenate([np.linspace(0, 1, GRID_SIZE // 2), near]) * (len(distinct) - 1)
    return np.asarray(distinct[np.unique(ranks.round().astype(np.int64))], dtype=np.float64)
