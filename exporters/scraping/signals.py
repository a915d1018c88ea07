"""From a target's samples to canonical signals, by its system's catalogue entry.

Everything that depends only on *which* series there are is worked out once a layout; a scrape then costs a few
vector operations, whatever the number of series.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from exporters.catalogue import Family, Signal, Source, System
from exporters.scraping.book import Book, Entry, Group, LabelSet
from exporters.scraping.exposition import Layout, Reading, Series
from exporters.scraping.frozen import FrozenEngines
from exporters.scraping.histogram import Histogram
from exporters.scraping.window import CounterBank, Increase, Indices, Vector, Window

OTHER = "other"
"""The label value that stands for all beyond the limit."""

_RESTART_TOLERANCE_SECONDS = 2.0
"""Start times computed from a boot time wobble by a second when the clock is adjusted."""

_RANGE = re.compile(r"(?P<low>[0-9.]+)(?:-(?P<high>[0-9.]+))?(?P<unit>us|ms|s|)(?P<open>\+?)")
_UNIT_SCALES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


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
    gauge_engines: list[str]
    """Of each the engine, by the system's own label; empty where the page doesn't show engines that are gone."""
    gauge_largest: list[bool]
    """Of each: whether the largest of a group's series stands for it, and not their sum."""
    gauge_signals: frozenset[str]
    counter_signals: frozenset[str]
    counted: dict[str, _Counted]
    """By signal, of those that have several sources."""
    start_slot: int | None
    infos: dict[str, list[Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class _Counted:
    """Which of its sources a counting signal is read from, and where its series are."""

    source: Source
    places: Indices
    countable: Indices
    """Of these places those whose sum tells how much was counted: of a histogram not its buckets and its sum."""


class SignalStore:
    """All canonical numbers of one target, over time. Pure: readings and clock values come from outside.

    `model` stands in for a model's name that the system doesn't know itself.
    """

    def __init__(self, system: System, horizon_seconds: float, label_limit: int, model: str = "") -> None:
        self.system = system
        self._model = model
        self.window = Window(horizon_seconds)
        self.gauges: dict[Group, float] = {}
        self.infos: Mapping[str, Sequence[Mapping[str, str]]] = {}
        self.resets = 0
        self._totals: Vector = np.zeros(0)
        self._bank = CounterBank()
        self._book = Book.of(())
        self._limit = LabelLimit(label_limit)
        self._layout: Layout | None = None
        self._plan: _Plan | None = None
        self._started_seconds: float | None = None
        self.frozen: frozenset[str] = frozenset()
        """Engines that the newest page shows though they are gone, by the system's own label."""
        self._watch = _frozen_engines(system)
        self._counted: dict[str, _Counted] = {}
        """Signals of several sources, each as it was read last."""

    def apply(self, reading: Reading, at_seconds: float) -> None:
        """Take a reading of `at_seconds` on a monotonic clock."""
        before = self._counted
        if reading.layout is not self._layout or self._plan is None:
            self._plan = self._plan_for(reading.layout)
            self._layout = reading.layout
            self._counted = before | self._plan.counted
        plan, values = self._plan, reading.values
        reset = self._bank.update(
            plan.counter_places, values[plan.counter_slots], restarted=self._restarted(plan, values)
        )
        replaced = before is not self._counted and self._replace_sources(before, reset)
        totals_before, self._totals = self._totals, self._book.totals(self._bank.totals())
        self.resets += reset
        if reset or (replaced and bool((self._totals[: len(totals_before)] < totals_before).any())):
            self.window.restart()  # counts that moved to other labels or bounds can't be compared
        self.window.add(at_seconds, self._totals)
        if self._watch is not None:
            self.frozen = self._watch.among(reading, at_seconds)
        self.gauges = _gauges(plan, values, self.frozen)
        self.infos = plan.infos if not self.frozen else _without(plan.infos, self.frozen)

    @property
    def groups(self) -> Collection[Group]:
        """Every canonical series that was ever counted here."""
        return self._book.groups.keys()

    @property
    def bucket_bounds(self) -> frozenset[tuple[str, tuple[float, ...]]]:
        """Every histogram signal with the bounds that it has here."""
        return frozenset((signal, grid.bounds) for signal, grids in self._book.grids.items() for grid in grids)

    def rest(self) -> None:
        """Let go of what was fresh. Totals stay, and go on should the same target come back."""
        self.window.restart()
        self._layout = self._plan = None
        self.gauges, self.infos, self.resets = {}, {}, 0

    def absorb(self, other: SignalStore) -> None:
        """Add another store's lifetime totals to these; of the same system, with the same bucket bounds."""
        bounded = [
            replace(group, labels=tuple((name, self._limit.bounded(name, value)) for name, value in group.labels))
            for group in other._book.groups
        ]
        self._book = self._book.with_entries([Entry(group, group, 1.0) for group in bounded])
        totals = np.zeros(len(self._book.groups))
        totals[: len(self._totals)] = self._totals
        np.add.at(totals, [self._book.groups[group] for group in bounded], other._totals)
        self._totals = totals

    @property
    def increase(self) -> Increase | None:
        return self.window.increase()

    def has(self, signal: str) -> bool:
        """Whether the newest text had the signal, or an earlier one did if it is a counter."""
        return signal in self._book.by_signal or (self._plan is not None and signal in self._plan.gauge_signals)

    def on_newest_page(self, signal: str) -> bool:
        """Whether the newest text had the signal, whatever earlier ones had."""
        plan = self._plan
        return plan is not None and (signal in plan.gauge_signals or signal in plan.counter_signals)

    def total(self, signal: str, part: str = "value") -> float | None:
        """The signal's lifetime sum over all its labels; None when the target doesn't give it.

        Of a histogram `part` is `count` or `sum`.
        """
        return self._sum(signal, part, self._totals)

    def grown(self, signal: str, part: str = "value") -> float | None:
        """What the signal grew by in the window; None when not given, or before there is a window."""
        return self._sum(signal, part, increase.vector) if (increase := self.increase) else None

    def totals_by(self, signal: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Lifetime sums by the values of these labels; a label that a series lacks counts as empty."""
        return self._sums_by(signal, labels, self._totals)

    def grown_by(self, signal: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Growth in the window by the values of these labels; empty before there is a window."""
        return self._sums_by(signal, labels, increase.vector) if (increase := self.increase) else {}

    def histograms(self, signal: str, label: str = "") -> dict[str, list[Histogram]]:
        """Lifetime histograms, one a series, by the value of `label`."""
        return self._histograms(signal, label, self._totals)

    def grown_histograms(self, signal: str, label: str = "") -> dict[str, list[Histogram]]:
        """Histograms of what was observed in the window; empty before there is one."""
        return self._histograms(signal, label, increase.vector) if (increase := self.increase) else {}

    def bounds_of(self, signal: str, *labels: str) -> dict[tuple[str, ...], set[tuple[float, ...]]]:
        """The different bucket bounds of its histograms, by the values of these labels."""
        found: dict[tuple[str, ...], set[tuple[float, ...]]] = defaultdict(set)
        for grid in self._book.grids.get(signal, ()):
            found[tuple(grid.labels.get(label, "") for label in labels)].add(grid.bounds)
        return dict(found)

    def gauges_of(self, signal: str) -> dict[LabelSet, float]:
        return {group.labels: value for group, value in self.gauges.items() if group.signal == signal}

    def _replace_sources(self, before: Mapping[str, _Counted], reset: bool) -> bool:
        """Counters that were read under other names until now: the new ones count the same events from the process's
        start on, so the old ones' counts are in them, unless the process is another one. True if there are any."""
        replaced = False
        for name, counted in self._counted.items():
            old = before.get(name)
            if old is None or old.source is counted.source:
                continue
            another = reset or self._bank_sum(counted.countable) < self._bank_sum(old.countable)
            gone = old.places[~np.isin(old.places, counted.places)]
            self._bank.retire(gone, keep=another)
            replaced = True
        return replaced

    def _bank_sum(self, places: Indices) -> float:
        return float(self._book.scaled(places, self._bank.shown(places)).sum())

    def _restarted(self, plan: _Plan, values: Vector) -> bool:
        if plan.start_slot is None or not math.isfinite(started := float(values[plan.start_slot])):
            return False
        before, self._started_seconds = self._started_seconds, started
        return before is not None and abs(started - before) > _RESTART_TOLERANCE_SECONDS

    def _sum(self, signal: str, part: str, vector: Vector) -> float | None:
        places = self._book.by_part.get((signal, part))
        return float(sum([vector[place] for place in places])) if places else None

    def _sums_by(self, signal: str, labels: Sequence[str], vector: Vector) -> dict[tuple[str, ...], float]:
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for group, place in self._book.by_signal.get(signal, ()):
            if group.part == "value":
                own = dict(group.labels)
                sums[tuple(own.get(label, "") for label in labels)] += float(vector[place])
        return dict(sums)

    def _histograms(self, signal: str, label: str, vector: Vector) -> dict[str, list[Histogram]]:
        found: dict[str, list[Histogram]] = defaultdict(list)
        for grid in self._book.grids.get(signal, ()):
            found[grid.labels.get(label, "")].append(grid.histogram(vector))
        return dict(found)

    def labelled_histograms(self, signal: str, *labels: str) -> dict[tuple[str, ...], list[Histogram]]:
        """Lifetime histograms, one a series, by the values of these labels."""
        found: dict[tuple[str, ...], list[Histogram]] = defaultdict(list)
        for grid in self._book.grids.get(signal, ()):
            found[tuple(grid.labels.get(label, "") for label in labels)].append(grid.histogram(self._totals))
        return dict(found)

    def _plan_for(self, layout: Layout) -> _Plan:
        present = {series.name for series in layout.series}
        sources = {name: signal.source_on(present) for name, signal in self.system.signals.items()}
        taken = _by_sample_name(self.system, sources)
        counters: list[tuple[int, Entry]] = []
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
                    counters.append((slot, Entry(group, series.identity(), scale)))
        entries = [entry for _, entry in counters]
        self._book = self._book.with_entries(entries)
        self._bank.grow(len(self._book))
        places = self._book.places(entries)
        return _Plan(
            counter_slots=np.array([slot for slot, _ in counters], dtype=np.intp),
            counter_places=places,
            gauge_slots=np.array([slot for slot, *_ in gauges], dtype=np.intp),
            gauge_scales=np.array([scale for *_, scale in gauges], dtype=np.float64),
            gauge_groups=[group for _, group, _ in gauges],
            gauge_signals=frozenset(group.signal for _, group, _ in gauges),
            gauge_engines=[
                layout.series[slot].labels.get(self._watch.label, "") if self._watch else "" for slot, *_ in gauges
            ],
            gauge_largest=[self.system.signals[group.signal].combined_by == "max" for _, group, _ in gauges],
            counter_signals=frozenset(entry.group.signal for entry in entries),
            counted=_counted(self.system, sources, entries, places),
            start_slot=start_slot,
            infos=dict(infos),
        )

    def _labels(self, signal: Signal, family: Family, series: Series) -> LabelSet:
        found = []
        for name, rule in {**signal.labels, **family.labels}.items():
            value = rule.apply(series.labels)
            if name == "model" and value is not None:
                value = _model_name(value, self._model)
            if value is not None:
                found.append((name, value if signal.kind == "info" else self._limit.bounded(name, value)))
        return tuple(sorted(found))


def _by_sample_name(
    system: System, sources: Mapping[str, Source | None]
) -> Mapping[str, Sequence[tuple[str, Signal, Family]]]:
    """Sample name → the signals that are read from it."""
    taken: dict[str, list[tuple[str, Signal, Family]]] = defaultdict(list)
    for name, source in sources.items():
        signal = system.signals[name]
        for family in source.families if source else ():
            for sample_name in family.sample_names(signal.kind):
                taken[sample_name].append((name, signal, family))
    return taken


def _counted(
    system: System, sources: Mapping[str, Source | None], entries: Sequence[Entry], places: Indices
) -> dict[str, _Counted]:
    found = {}
    for name, source in sources.items():
        if source is None or len(system.signals[name].sources) < 2:
            continue
        own = [position for position, entry in enumerate(entries) if entry.group.signal == name]
        countable = [position for position in own if entries[position].group.part in ("value", "range", "count")]
        if own:
            found[name] = _Counted(source, places[own], places[countable])
    return found


def _counter_group(name: str, signal: Signal, family: Family, series: Series, labels: LabelSet) -> tuple[Group, float]:
    if signal.kind == "counter":
        return Group(name, labels), family.scale
    if family.buckets_from:
        low, high = range_bounds(series.labels.get(family.buckets_from, ""))
        return Group(name, labels, "range", high * family.scale, low * family.scale), 1.0
    part = series.name[len(family.name) + 1 :]
    if part != "bucket":
        return Group(name, labels, part), family.scale if part == "sum" else 1.0
    return Group(name, labels, part, _bound(series.labels.get("le", "")) * family.scale), 1.0


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def range_bounds(text: str) -> tuple[float, float]:
    """Lower and upper bound of a range such as `5-10ms` (in seconds), `8192-16384` or `5000ms+`; NaN if it is none."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or (match["high"] is None) != bool(match["open"]):
        return math.nan, math.nan
    scale = _UNIT_SCALES[match["unit"]]
    return _bound(match["low"]) * scale, math.inf if match["open"] else _bound(match["high"]) * scale


def _model_name(told: str, configured: str) -> str:
    """One name for a model that some families call by the path of its files, or don't know at all."""
    if told in ("", "undefined", "unknown") and configured:
        return configured
    return told.rstrip("/").rpartition("/")[2] if told.startswith(("/", "./", "~")) else told


def _gauges(plan: _Plan, values: Vector, frozen: Collection[str]) -> dict[Group, float]:
    """Gauges by group; a series that isn't a number is unknown and left out, and so are those of frozen engines."""
    gauges: dict[Group, float] = {}
    scaled = (values[plan.gauge_slots] * plan.gauge_scales).tolist()
    for group, value, engine, largest in zip(
        plan.gauge_groups, scaled, plan.gauge_engines, plan.gauge_largest, strict=True
    ):
        if math.isfinite(value) and not (frozen and engine in frozen):
            known = gauges.get(group)
            gauges[group] = value if known is None else max(known, value) if largest else known + value
    return gauges


def _without(infos: Mapping[str, Sequence[Mapping[str, str]]], engines: Collection[str]) -> dict[str, Any]:
    return {name: [info for info in every if info.get("engine") not in engines] for name, every in infos.items()}


def _frozen_engines(system: System) -> FrozenEngines | None:
    running = system.signals.get("running_requests")
    engine = running.labels.get("engine") if running else None
    if system.frozen_after_seconds is None or engine is None or engine.source is None:
        return None
    counting = [system.signals[name] for name in ("running_requests", "waiting_requests") if name in system.signals]
    busy = {family.name for signal in counting for source in signal.sources for family in source.families}
    return FrozenEngines(engine.source, busy, system.frozen_after_seconds)
