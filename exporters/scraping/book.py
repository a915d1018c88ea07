"""Where a target's counters are kept, and the canonical series that they add up in.

Targets of one kind have the same series, so they share one book: it is the largest part of what is known of a target
and doesn't change with its numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from prefixwatch.exporters.scraping.histogram import Histogram
from prefixwatch.exporters.scraping.window import Indices, Vector

LabelSet = tuple[tuple[str, str], ...]

_NO_RANGE = -1


@dataclass(frozen=True, slots=True)
class Group:
    """A canonical series: several of a target's series may add up in it."""

    signal: str
    labels: LabelSet
    part: str = "value"
    """`value`, or a histogram's `bucket`, `range` (a bucket that counts itself alone), `sum` or `count`."""
    bound: float = math.nan
    """A bucket's upper bound, in the signal's unit."""
    low: float = math.nan
    """A range's lower bound."""

    def label(self, name: str) -> str | None:
        return dict(self.labels).get(name)


@dataclass(frozen=True, slots=True)
class Entry:
    """One counter: the canonical series that it is part of, its own identity, and what scales it to that unit."""

    group: Group
    identity: Hashable
    scale: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Where one histogram's buckets and sum are in the totals."""

    labels: Mapping[str, str]
    bounds: tuple[float, ...]
    buckets: Indices
    sum: int | None
    cumulative: bool = True

    def histogram(self, vector: Vector) -> Histogram:
        counts = vector[self.buckets]
        if not self.cumulative:
            counts = np.cumsum(np.where(self.buckets == _NO_RANGE, 0.0, counts))
        return Histogram(self.bounds, tuple(counts.tolist()), None if self.sum is None else float(vector[self.sum]))


class Book:
    """Counters in the order in which they showed up; never changed. `Book.of` gives equal ones as one object."""

    _known: ClassVar[WeakValueDictionary[tuple[Entry, ...], Book]] = WeakValueDictionary()

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self.groups: dict[Group, int] = {}
        self._places = {(entry.group.signal, entry.identity): place for place, entry in enumerate(entries)}
        for entry in entries:
            self.groups.setdefault(entry.group, len(self.groups))
        self._group_of_place = np.array([self.groups[entry.group] for entry in entries], dtype=np.intp)
        self._scales = np.array([entry.scale for entry in entries], dtype=np.float64)
        by_signal: dict[str, list[tuple[Group, int]]] = defaultdict(list)
        for group, index in self.groups.items():
            by_signal[group.signal].append((group, index))
        self.by_signal: Mapping[str, Sequence[tuple[Group, int]]] = dict(by_signal)
        parts: dict[tuple[str, str], int] = {}
        for group in self.groups:
            parts.setdefault((group.signal, "count" if group.part == "range" else group.part), len(parts))
        self._parts = tuple(parts)
        self._part_of_group = np.array(
            [parts[group.signal, "count" if group.part == "range" else group.part] for group in self.groups],
            dtype=np.intp,
        )
        self.grids = {signal: _grids(groups) for signal, groups in self.by_signal.items()}
        self._labelled: dict[tuple[str, tuple[str, ...]], Sequence[tuple[tuple[str, ...], int]]] = {}
        self._labelled_grids: dict[tuple[str, tuple[str, ...]], Sequence[tuple[tuple[str, ...], Grid]]] = {}

    @classmethod
    def of(cls, entries: tuple[Entry, ...]) -> Book:
        book = cls._known.get(entries)
        if book is None:
            book = cls._known[entries] = cls(entries)
        return book

    def labelled(self, signal: str, labels: tuple[str, ...]) -> Sequence[tuple[tuple[str, ...], int]]:
        """A counter's series: the values of these labels, empty for one that a series lacks, and its place in the
        totals."""
        key = signal, labels
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = [
                (tuple(group.label(label) or "" for label in labels), place)
                for group, place in self.by_signal.get(signal, ())
                if group.part == "value"
            ]
        return found

    def labelled_grids(self, signal: str, labels: tuple[str, ...]) -> Sequence[tuple[tuple[str, ...], Grid]]:
        """The same of a histogram."""
        key = signal, labels
        found = self._labelled_grids.get(key)
        if found is None:
            found = self._labelled_grids[key] = [
                (tuple(grid.labels.get(label, "") for label in labels), grid) for grid in self.grids.get(signal, ())
            ]
        return found

    def sums(self, totals: Vector) -> dict[tuple[str, str], float]:
        """Sums of the totals by signal and part: `value`, `bucket`, `sum` or `count`, to which ranges add up."""
        return dict(zip(self._parts, np.bincount(self._part_of_group, totals, len(self._parts)).tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.entries)

    def with_entries(self, entries: Iterable[Entry]) -> Book:
        """This book, and what isn't in it yet after what is."""
        places = self._places
        new = {
            key: entry for entry in entries if (key := (entry.group.signal, entry.identity)) not in places
        }  # a counter that shows up twice has one place
        return Book.of((*self.entries, *new.values())) if new else self

    def places(self, entries: Iterable[Entry]) -> Indices:
        """Where these counters are; all of them are in the book."""
        return np.array([self._places[entry.group.signal, entry.identity] for entry in entries], dtype=np.intp)

    def scaled(self, places: Indices, counters: Vector) -> Vector:
        """Values of the counters at these places, in their groups' units."""
        return counters * self._scales[places]

    def groups_without(self, known: npt.NDArray[np.bool_]) -> frozenset[int]:
        """Groups of which no counter is known."""
        if known.all() or len(known) != len(self.entries):
            return frozenset()
        return frozenset(np.flatnonzero(np.bincount(self._group_of_place, known, len(self.groups)) == 0).tolist())

    def totals(self, counters: Vector) -> Vector:
        """Sums by group, in the groups' units, of the counters' values in their own."""
        return np.bincount(self._group_of_place, counters * self._scales, len(self.groups)).astype(np.float64)


def _grids(groups: Sequence[tuple[Group, int]]) -> list[Grid]:
    """The histograms among these groups; one without a +Inf bucket can't be trusted and is left out."""
    buckets: dict[LabelSet, list[tuple[float, int]]] = defaultdict(list)
    sums: dict[LabelSet, int] = {}
    ranges: dict[LabelSet, list[tuple[Group, int]]] = defaultdict(list)
    for group, index in groups:
        if group.part == "sum":
            sums[group.labels] = index
        elif math.isnan(group.bound):
            continue
        elif group.part == "bucket":
            buckets[group.labels].append((group.bound, index))
        else:
            ranges[group.labels].append((group, index))
    grids = _range_grids(ranges)
    for labels, pairs in buckets.items():
        bounds, indices = zip(*sorted(pairs), strict=True)
        if math.isinf(bounds[-1]):
            grids.append(Grid(dict(labels), bounds, np.array(indices, dtype=np.intp), sums.get(labels)))
    return grids


def _range_grids(ranges: Mapping[LabelSet, Sequence[tuple[Group, int]]]) -> list[Grid]:
    """Histograms from counters of ranges. A range shows up with its first observation, so the bounds are those of all
    series together, lower ones too: what lies between two ranges that were seen is known to be empty."""
    every = [group for pairs in ranges.values() for group, _ in pairs]
    edges = {edge for group in every for edge in (group.low, group.bound) if edge > 0} | {math.inf}
    bounds = tuple(sorted(edges))
    grids = []
    for labels, pairs in ranges.items():
        places = {group.bound: index for group, index in pairs}
        indices = np.array([places.get(bound, _NO_RANGE) for bound in bounds], dtype=np.intp)
        grids.append(Grid(dict(labels), bounds, indices, None, cumulative=False))
    return grids
