"""From a target's samples to canonical signals, by its system's catalogue entry.

Everything that depends only on *which* series there are is worked out once a layout; a scrape then costs a few
vector operations, whatever the number of series.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from exporters.catalogue import Family, Signal, Source, System
from exporters.exposition import Layout, Reading, Series
from exporters.histogram import Histogram
from exporters.window import CounterBank, Increase, Indices, Vector, Window

OTHER = "other"
"""The label value that stands for all beyond the limit."""

_RESTART_TOLERANCE_SECONDS = 2.0
"""Start times computed from a boot time wobble by a second when the clock is adjusted."""

LabelSet = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A canonical series: several of a target's series may add up in it."""

    signal: str
    labels: LabelSet
    part: str = "value"
    """`value`, or a histogram's `bucket`, `sum` or `count`."""
    bound: float = math.nan
    """A bucket's upper bound, in the signal's unit."""

    def label(self, name: str) -> str | None:
        return dict(self.labels).get(name)


@dataclass(slots=True)
class LabelLimit:
    """Keeps label values that a client can choose from growing without end: the first `most` are kept."""

    most: int
    _seen: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def bounded(self, label: str, value: str) -> str:
        seen = self._seen[label]
        if value in seen or len(seen) < self.most:
            seen.add(value)
            return value
        return OTHER


@dataclass(slots=True)
class _Plan:
    """For one layout: which slots of a reading are counters and gauges, and where each of them goes."""

    counter_slots: Indices
    counter_places: Indices
    gauge_slots: Indices
    gauge_scales: Vector
    gauge_groups: list[Group]
    gauge_signals: frozenset[str]
    start_slot: int | None
    infos: dict[str, list[Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where one histogram's buckets and sum are in the totals."""

    labels: Mapping[str, str]
    bounds: tuple[float, ...]
    buckets: Indices
    sum: int | None


class SignalStore:
    """All canonical numbers of one target, over time. Pure: readings and clock values come from outside."""

    def __init__(self, system: System, horizon_seconds: float, label_limit: int) -> None:
        self.system = system
        self.window = Window(horizon_seconds)
        self.gauges: dict[Group, float] = {}
        self.infos: Mapping[str, Sequence[Mapping[str, str]]] = {}
        self.resets = 0
        self._increase: Increase | None = None
        self._totals: Vector = np.zeros(0)
        self._bank = CounterBank()
        self._limit = LabelLimit(label_limit)
        self._groups: dict[Group, int] = {}
        self._group_of_place: list[int] = []
        self._scale_of_place: list[float] = []
        self._group_indices: Indices = np.zeros(0, dtype=np.intp)
        self._scales: Vector = np.zeros(0)
        self._layout: Layout | None = None
        self._plan: _Plan | None = None
        self._by_signal: dict[str, list[tuple[Group, int]]] = {}
        self._grids: dict[str, list[_Grid]] = {}
        self._started_seconds: float | None = None

    def apply(self, reading: Reading, at_seconds: float) -> None:
        """Take a reading of `at_seconds` on a monotonic clock."""
        if reading.layout is not self._layout or self._plan is None:
            self._plan = self._plan_for(reading.layout)
            self._layout = reading.layout
        plan, values = self._plan, reading.values
        reset = self._bank.update(
            plan.counter_places, values[plan.counter_slots], restarted=self._restarted(plan, values)
        )
        scaled = self._bank.totals() * self._scales
        self._totals = np.bincount(self._group_indices, scaled, len(self._groups)).astype(np.float64)
        if reset:
            self.resets += 1
            self.window.restart()
        self.window.add(at_seconds, self._totals)
        self._increase = self.window.increase()
        self.gauges = _sum_gauges(plan, values)
        self.infos = plan.infos

    @property
    def increase(self) -> Increase | None:
        return self._increase

    def has(self, signal: str) -> bool:
        """Whether the newest text had the signal, or an earlier one did if it is a counter."""
        return signal in self._by_signal or (self._plan is not None and signal in self._plan.gauge_signals)

    def total(self, signal: str, part: str = "value") -> float | None:
        """The signal's lifetime sum over all its labels; None when the target doesn't give it."""
        return self._sum(signal, part, self._totals)

    def grown(self, signal: str, part: str = "value") -> float | None:
        """What the signal grew by in the window; None when not given, or before there is a window."""
        return self._sum(signal, part, self._increase.vector) if self._increase else None

    def totals_by(self, signal: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Lifetime sums by the values of these labels; a label that a series lacks counts as empty."""
        return self._sums_by(signal, labels, self._totals)

    def grown_by(self, signal: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Growth in the window by the values of these labels; empty before there is a window."""
        return self._sums_by(signal, labels, self._increase.vector) if self._increase else {}

    def histograms(self, signal: str, label: str = "") -> dict[str, list[Histogram]]:
        """Lifetime histograms, one a series, by the value of `label`."""
        return self._histograms(signal, label, self._totals)

    def grown_histograms(self, signal: str, label: str = "") -> dict[str, list[Histogram]]:
        """Histograms of what was observed in the window; empty before there is one."""
        return self._histograms(signal, label, self._increase.vector) if self._increase else {}

    def gauges_of(self, signal: str) -> dict[LabelSet, float]:
        return {group.labels: value for group, value in self.gauges.items() if group.signal == signal}

    def _restarted(self, plan: _Plan, values: Vector) -> bool:
        if plan.start_slot is None or not math.isfinite(started := float(values[plan.start_slot])):
            return False
        before, self._started_seconds = self._started_seconds, started
        return before is not None and abs(started - before) > _RESTART_TOLERANCE_SECONDS

    def _sum(self, signal: str, part: str, vector: Vector) -> float | None:
        values = [vector[place] for group, place in self._by_signal.get(signal, ()) if group.part == part]
        return float(sum(values)) if values else None

    def _sums_by(self, signal: str, labels: Sequence[str], vector: Vector) -> dict[tuple[str, ...], float]:
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for group, place in self._by_signal.get(signal, ()):
            if group.part == "value":
                own = dict(group.labels)
                sums[tuple(own.get(label, "") for label in labels)] += float(vector[place])
        return dict(sums)

    def _histograms(self, signal: str, label: str, vector: Vector) -> dict[str, list[Histogram]]:
        found: dict[str, list[Histogram]] = defaultdict(list)
        for grid in self._grids.get(signal, ()):
            total = None if grid.sum is None else float(vector[grid.sum])
            histogram = Histogram(grid.bounds, tuple(vector[grid.buckets].tolist()), total)
            found[grid.labels.get(label, "")].append(histogram)
        return dict(found)

    def _plan_for(self, layout: Layout) -> _Plan:
        taken = _choose_sources(self.system, layout)
        counters: list[tuple[int, Series, Group, float]] = []
        gauges: list[tuple[int, Group, float]] = []
        infos: dict[str, list[Mapping[str, str]]] = defaultdict(list)
        start_slot = None
        for slot, series in enumerate(layout.series):
            for signal_name, signal, family in taken.get(series.name, ()):
                if any(series.labels.get(label, "") != value for label, value in family.only.items()):
                    continue
                labels = self._labels(signal, family, series)
                if signal_name == "process_start_seconds":
                    start_slot = slot
                elif signal.kind == "info":
                    infos[signal_name].append(dict(labels))
                elif signal.kind == "gauge":
                    gauges.append((slot, Group(signal_name, labels), family.scale))
                else:
                    group, scale = _counter_group(signal_name, signal, family, series, labels)
                    counters.append((slot, series, group, scale))
        return _Plan(
            counter_slots=np.array([slot for slot, *_ in counters], dtype=np.intp),
            counter_places=self._place_counters(counters),
            gauge_slots=np.array([slot for slot, *_ in gauges], dtype=np.intp),
            gauge_scales=np.array([scale for *_, scale in gauges], dtype=np.float64),
            gauge_groups=[group for _, group, _ in gauges],
            gauge_signals=frozenset(group.signal for _, group, _ in gauges),
            start_slot=start_slot,
            infos=dict(infos),
        )

    def _labels(self, signal: Signal, family: Family, series: Series) -> LabelSet:
        found = []
        for name, rule in {**signal.labels, **family.labels}.items():
            value = rule.apply(series.labels)
            if value is not None:
                found.append((name, value if signal.kind == "info" else self._limit.bounded(name, value)))
        return tuple(sorted(found))

    def _place_counters(self, counters: Sequence[tuple[int, Series, Group, float]]) -> Indices:
        places = self._bank.places([(group.signal, series.identity()) for _, series, group, _ in counters])
        for (_, _, group, scale), place in zip(counters, places, strict=True):
            index = self._groups.setdefault(group, len(self._groups))
            if place == len(self._group_of_place):
                self._group_of_place.append(index)
                self._scale_of_place.append(scale)
        self._group_indices = np.array(self._group_of_place, dtype=np.intp)
        self._scales = np.array(self._scale_of_place, dtype=np.float64)
        self._by_signal = defaultdict(list)
        for group, index in self._groups.items():
            self._by_signal[group.signal].append((group, index))
        self._by_signal = dict(self._by_signal)
        self._grids = {signal: _grids(groups) for signal, groups in self._by_signal.items()}
        return places


def _grids(groups: Sequence[tuple[Group, int]]) -> list[_Grid]:
    """The histograms among these groups; one without a +Inf bucket can't be trusted and is left out."""
    buckets: dict[LabelSet, list[tuple[float, int]]] = defaultdict(list)
    sums: dict[LabelSet, int] = {}
    for group, index in groups:
        if group.part == "bucket" and not math.isnan(group.bound):
            buckets[group.labels].append((group.bound, index))
        elif group.part == "sum":
            sums[group.labels] = index
    grids = []
    for labels, pairs in buckets.items():
        bounds, indices = zip(*sorted(pairs), strict=True)
        if math.isinf(bounds[-1]):
            grids.append(_Grid(dict(labels), bounds, np.array(indices, dtype=np.intp), sums.get(labels)))
    return grids


def _choose_sources(system: System, layout: Layout) -> dict[str, list[tuple[str, Signal, Family]]]:
    """Sample name → the signals that are read from it, each from the first of its sources that is there."""
    present = {series.name for series in layout.series}
    taken: dict[str, list[tuple[str, Signal, Family]]] = defaultdict(list)
    for name, signal in system.signals.items():
        source = next((source for source in signal.sources if _is_present(signal, source, present)), None)
        for family in source.families if source else ():
            for suffix in ("_bucket", "_sum", "_count") if signal.kind == "histogram" else ("",):
                taken[family.name + suffix].append((name, signal, family))
    return taken


def _is_present(signal: Signal, source: Source, present: set[str]) -> bool:
    suffix = "_count" if signal.kind == "histogram" else ""
    return any(family.name + suffix in present for family in source.families)


def _counter_group(name: str, signal: Signal, family: Family, series: Series, labels: LabelSet) -> tuple[Group, float]:
    if signal.kind == "counter":
        return Group(name, labels), family.scale
    part = series.name[len(family.name) + 1 :]
    if part != "bucket":
        return Group(name, labels, part), family.scale if part == "sum" else 1.0
    return Group(name, labels, part, _bound(series.labels.get("le", "")) * family.scale), 1.0


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _sum_gauges(plan: _Plan, values: Vector) -> dict[Group, float]:
    """Gauges by group; a series that isn't a number is unknown and left out."""
    gauges: dict[Group, float] = {}
    scaled = values[plan.gauge_slots] * plan.gauge_scales
    for group, value in zip(plan.gauge_groups, scaled.tolist(), strict=True):
        if math.isfinite(value):
            gauges[group] = gauges.get(group, 0.0) + value
    return gauges
