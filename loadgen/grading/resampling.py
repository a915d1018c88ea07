"""A statistic of thousands of resamples of the same blocks of requests, at little cost.

Every block is summed up once; a resample is then a vector that says how often each block is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GRID_SIZE = 8192
"""Values among which a resampled quantile is looked up; see `_grid`."""
_GRID_SAMPLE = 1_000_000
"""Values out of which the grid is chosen, evenly through the run; all of them are counted."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """The mean of the requests' values, a quantile of them in (0, 1), or their sum."""

    quantile: float | None = None
    total: bool = False


MEAN = Statistic()
SUM = Statistic(total=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """A figure of requests, in plan order. NaN is "this request has no such figure"."""

    values: Floats
    """One a request, or as many as `counts` says."""
    counts: Ints | None = None
    """How many values each request has, where that isn't one: gaps between tokens."""
    weights: Floats | None = None
    """What a mean divides by, Σ values / Σ weights, where that isn't the number of values: a ratio of sums."""

    def __len__(self) -> int:
        return len(self.values) if self.counts is None else len(self.counts)

    def take(self, rows: Sequence[int]) -> Sample:
        """These requests of it."""
        chosen = np.asarray(rows, dtype=np.int64)
        if self.counts is None:
            return Sample(self.values[chosen], weights=None if self.weights is None else self.weights[chosen])
        counts = self.counts[chosen]
        firsts = (np.cumsum(self.counts) - self.counts)[chosen]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Sample(self.values[np.repeat(firsts, counts) + within], counts)

    def observe(self, statistic: Statistic) -> float | None:
        """The statistic itself; None without a single value."""
        known = self.values[~np.isnan(self.values)]
        if not len(known):
            return None
        if statistic.quantile is not None:
            return float(np.quantile(known, statistic.quantile))
        if statistic.total:
            return float(known.sum())
        if self.weights is None:
            return float(known.mean())
        total = float(self.weights[~np.isnan(self.values)].sum())
        return float(known.sum()) / total if total else None

    @property
    def known(self) -> int:
        """How many values there are."""
        return int((~np.isnan(self.values)).sum())

    def observe_all(self, statistics: Sequence[Statistic]) -> list[float | None]:
        """Several statistics; several quantiles cost little more than one."""
        quantiles = [each.quantile for each in statistics if each.quantile is not None]
        if len(quantiles) < len(statistics):
            return [self.observe(each) for each in statistics]
        known = self.values[~np.isnan(self.values)]
        return [float(value) for value in np.quantile(known, quantiles)] if len(known) else [None] * len(quantiles)

    def influence(self, statistic: Statistic, level: float) -> Floats:
        """How far each request moves the statistic away from `level`, up to a factor: what blocks are told apart by."""
        if statistic.quantile is None:
            away = self.values - (level if self.weights is None else level * self.weights)
        else:
            away = np.where(np.isnan(self.values), np.nan, (self.values > level) - (1.0 - statistic.quantile))
        away = np.nan_to_num(away)
        if self.counts is None:
            return np.asarray(away, dtype=np.float64)
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        return np.bincount(owners, weights=away, minlength=len(self.counts)).astype(np.float64)

    def cells(self, blocks: Ints) -> Ints:
        """Each value's block, from each request's."""
        return blocks if self.counts is None else np.repeat(blocks, self.counts)


def pooled_quantile(samples: Sequence[Sample], quantile: float) -> float:
    """A quantile of all of them together."""
    return float(np.nanquantile(np.concatenate([_thinned(sample.values) for sample in samples]), quantile))


class Tally(Protocol):
    """The values of all blocks, summed up so that thousands of resamples cost little."""

    def values(self, weights: Floats) -> Floats:
        """The statistic by resample; weights (resamples × blocks) say how often each block is in. NaN of nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _MeanTally:
    sums: Floats
    totals: Floats
    """Of the weights; of values that have none, their number."""

    def values(self, weights: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.asarray(_dot(weights, self.sums) / _dot(weights, self.totals), dtype=np.float64)


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


def tally_of(sides: Sequence[tuple[Sample, Ints]], count: int, statistic: Statistic) -> Tally:
    """Each side with the block of each of its requests; there are `count` blocks over all sides."""
    if statistic.quantile is None:
        return _mean_tally(sides, count)
    return quantile_tallies(sides, count, [statistic.quantile])[0]


def quantile_tallies(sides: Sequence[tuple[Sample, Ints]], count: int, quantiles: Sequence[float]) -> list[Tally]:
    """As `tally_of`, of several quantiles for little more than one."""
    grid = _grid(np.concatenate([_thinned(sample.values) for sample, _ in sides]), quantiles)
    ladder = np.zeros((len(grid), count))
    for sample, blocks in sides:
        cells, values = sample.cells(blocks), sample.values
        if (np.diff(cells) < 0).any():
            order = np.argsort(cells, kind="stable")
            cells, values = cells[order], values[order]
        starts = np.searchsorted(cells, np.arange(count + 1))
        for block in np.flatnonzero(np.diff(starts)):
            inside = values[starts[block] : starts[block + 1]]
            inside = np.sort(inside[~np.isnan(inside)])
            ladder[:, block] += np.searchsorted(inside, grid, side="right")
            ladder[-1, block] += len(inside) - np.searchsorted(inside, grid[-1], side="right")
    return [_QuantileTally(quantile, grid, ladder) for quantile in quantiles]


def _mean_tally(sides: Sequence[tuple[Sample, Ints]], count: int) -> _MeanTally:
    sums, totals = np.zeros(count), np.zeros(count)
    for sample, blocks in sides:
        known = ~np.isnan(sample.values)
        cells = sample.cells(blocks)[known]
        weights = None if sample.weights is None else sample.weights[known]
        sums += np.bincount(cells, weights=sample.values[known], minlength=count)
        totals += np.bincount(cells, weights=weights, minlength=count)
    return _MeanTally(sums, totals)


def _thinned(values: Floats) -> Floats:
    """At most `_GRID_SAMPLE` of them, evenly through the run."""
    return values[:: max(1, -(-len(values) // _GRID_SAMPLE))]


def _grid(values: Floats, quantiles: Sequence[float]) -> Floats:
    """The distinct values, thinned when they are too many: half of the grid over all ranks, half near the quantiles."""
    distinct = np.unique(values[~np.isnan(values)])
    if len(distinct) <= GRID_SIZE:
        return distinct
    each = GRID_SIZE // 2 // len(quantiles)
    near = [np.clip(np.linspace(quantile - 0.03, quantile + 0.03, each), 0, 1) for quantile in quantiles]
    ranks = np.concatenate([np.linspace(0, 1, GRID_SIZE // 2), *near]) * (len(distinct) - 1)
    return np.asarray(distinct[np.unique(ranks.round().astype(np.int64))], dtype=np.float64)
