"""A target's samples over time, as canonical signals by its system's catalogue entry."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prefixwatch.exporters.catalogue.model import System
from prefixwatch.exporters.scraping.book import Book, Entry, Group, LabelSet
from prefixwatch.exporters.scraping.exposition import Layout, Reading
from prefixwatch.exporters.scraping.frozen import FrozenEngines
from prefixwatch.exporters.scraping.histogram import Histogram, merge
from prefixwatch.exporters.scraping.labels import LabelLimit
from prefixwatch.exporters.scraping.plan import Counted, Plan, gauge_values, make_plan
from prefixwatch.exporters.scraping.turns import Turns, is_correction, is_restart
from prefixwatch.exporters.scraping.window import CounterBank, Increase, Indices, Vector, Window

_MOST_PROCESSES = 16
_RESTART_TOLERANCE_SECONDS = 2.0
"""Start times computed from a boot time wobble by a second when the clock is adjusted."""


class SignalStore:
    """All canonical numbers of one target, over time. Pure: readings and clock values come from outside.

    `place` says what is configured of the target's identity; its model replaces a model's name that the system
    doesn't know itself.
    """

    def __init__(
        self, system: System, horizon_seconds: float, label_limit: int, place: Mapping[str, str] | None = None
    ) -> None:
        self.system = self.catalogued = system
        """As the page writes its names, and as the catalogue does."""
        self.place = dict(place or {})
        self._model = self.place.get("model", "")
        self.window = Window(horizon_seconds)
        self.gauges: dict[Group, float] = {}
        self.infos: Mapping[str, Sequence[Mapping[str, str]]] = {}
        self.resets = 0
        self._totals: Vector = np.zeros(0)
        self._bank = CounterBank()
        self._others: dict[float, Vector] = {}
        """By their start times, processes that showed counters before the present one: what they showed."""
        self._unknown: frozenset[int] = frozenset()
        """Groups of counters that never had a value: their totals are unknown and not 0."""
        self.unusable = 0
        """Samples of the newest page that are read and are no number, or infinite, or counters below 0."""
        self._turns = Turns(horizon_seconds)
        self.several_processes = False
        """Whether several processes answer at the target's address in turn, by the newest change of process."""
        self._book = Book.of(())
        self._limit = LabelLimit(label_limit)
        self._lists: dict[bool, list[float] | None] = {}
        self.known: dict[object, Any] = {}
        """What others have worked out of the newest reading, by whatever they choose."""
        self._sums: dict[bool, Mapping[tuple[str, str], float]] = {}
        self._merged: dict[tuple[str, bool], Histogram | None] = {}
        """Worked out when first asked for, until the next reading; as `_by_signal`."""
        self._gauges: Mapping[Group, float] | None = None
        self._by_signal: dict[str, dict[LabelSet, float]] = {}
        self._layout: Layout | None = None
        self._plan: Plan | None = None
        self.started_unix_seconds: float | None = None
        """When the process began, by its newest page."""
        self.frozen: frozenset[str] = frozenset()
        """Engines that the newest page shows though they are gone, by the system's own label."""
        self._watch = _frozen_engines(system)
        self._counted: dict[str, Counted] = {}
        """Signals of several sources, each as it was read last."""

    def follow(self, system: System) -> None:
        """Read the page by this entry from now on: the catalogue's, with names that the page has instead."""
        if system is not self.system:
            self.system, self._watch = system, _frozen_engines(system)
            self._layout = self._plan = None

    def apply(self, reading: Reading, at_seconds: float) -> None:
        """Take a reading of `at_seconds` on a monotonic clock."""
        self._forget()
        before = self._counted
        if reading.layout is not self._layout or self._plan is None:
            label = self._watch.label if self._watch else ""
            self._plan, self._book = make_plan(
                self.system, reading.layout, self._book, self._limit, model=self._model, engine_label=label
            )
            self._bank.grow(len(self._book))
            self._layout = reading.layout
            self._counted = before | self._plan.counted
        plan, values = self._plan, reading.values
        counters = values[plan.counter_slots]
        restarted = self._restarted(plan, values) or self._fell(plan.counter_places, counters, at_seconds)
        reset = self._bank.update(plan.counter_places, counters) or restarted
        replaced = before is not self._counted and self._replace_sources(before, reset)
        totals_before, self._totals = self._totals, self._book.totals(self._bank.totals())
        self.resets += reset
        if reset or (replaced and bool((self._totals[: len(totals_before)] < totals_before).any())):
            self.window.restart()  # counts that moved to other labels or bounds can't be compared
        self._unknown = self._book.groups_without(self._bank.known)
        self.unusable = int(np.count_nonzero(~np.isfinite(values)) + np.count_nonzero(counters < 0))
        self.window.add(at_seconds, self._totals)
        if self._watch is not None:
            self.frozen = self._watch.among(reading, at_seconds)
        self.gauges = gauge_values(plan, values, self.frozen)
        self.infos = plan.infos if not self.frozen else _without(plan.infos, self.frozen)

    @property
    def overflowed(self) -> Mapping[str, int]:
        """By label, how many of its values are counted as `OTHER`."""
        return self._limit.overflowed

    @property
    def identity(self) -> Mapping[str, str]:
        """The model and role of this target, where all series of the newest page agree on them."""
        return self._plan.identity if self._plan else {}

    def identity_of(self, engine: str) -> Mapping[str, str]:
        """The same of one engine on the page."""
        return self._plan.engines.get(engine, self._plan.identity) if self._plan else {}

    @property
    def unmapped(self) -> frozenset[tuple[str, str]]:
        """Signals and label values of the newest page that the catalogue should translate and doesn't know."""
        return self._plan.unmapped if self._plan else frozenset()

    @property
    def several_engines(self) -> bool:
        """Whether the newest page shows several engines that nothing tells apart."""
        return self._plan is not None and self._plan.several_engines

    @property
    def groups(self) -> Collection[Group]:
        """Every canonical series that was ever counted here."""
        return self._book.groups.keys()

    @property
    def bucket_bounds(self) -> frozenset[tuple[str, tuple[float, ...]]]:
        """Every histogram signal with the bounds that it has here."""
        return frozenset((signal, grid.bounds) for signal, grids in self._book.grids.items() for grid in grids)

    def _forget(self) -> None:
        self._lists.clear()
        self._sums.clear()
        self.known.clear()
        self._merged.clear()

    def rest(self) -> None:
        """Let go of what was fresh. Totals stay, and go on should the same target come back."""
        self._forget()
        self.window.restart()
        self._layout = self._plan = None
        self.gauges, self.infos, self.resets = {}, {}, 0

    def absorb(self, other: SignalStore) -> None:
        """Add another store's lifetime totals to these; of the same system, with the same bucket bounds."""
        self._forget()
        bounded = [
            replace(group, labels=tuple((name, self._limit.bounded(name, value)) for name, value in group.labels))
            for group in other._book.groups
        ]
        self._book = self._book.with_entries([Entry(group, group, 1.0) for group in bounded])
        totals = np.zeros(len(self._book.groups))
        totals[: len(self._totals)] = self._totals
        np.add.at(totals, [self._book.groups[group] for group in bounded], other._totals)
        self._totals = totals

    @classmethod
    def added_up(cls, stores: Iterable[SignalStore]) -> list[SignalStore]:
        """Lifetime totals only, for sums: one store for all of a system and place whose series are the same."""
        alike: dict[tuple[int, int, tuple[tuple[str, str], ...]], list[SignalStore]] = {}
        for store in stores:
            alike.setdefault((id(store.system), id(store._book), tuple(store.place.items())), []).append(store)
        found = []
        for same in alike.values():
            one = cls(same[0].system, 1.0, 0, same[0].place)
            one._book = same[0]._book
            one._totals = np.sum([store._totals for store in same], axis=0)
            found.append(one)
        return found

    @property
    def book(self) -> Book:
        """Its series, without their values: stores whose series are the same have the same one."""
        return self._book

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
        return self._parts(grown=False).get((signal, part))

    def grown(self, signal: str, part: str = "value") -> float | None:
        """What the signal grew by in the window; None when not given, or before there is a window."""
        return self._parts(grown=True).get((signal, part))

    def totals_by(self, signal: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Lifetime sums by the values of these labels; a label that a series lacks counts as empty."""
        return self._sums_by(signal, labels, grown=False)

    def grown_by(self, signal: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Growth in the window by the values of these labels; empty before there is a window."""
        return self._sums_by(signal, labels, grown=True)

    def histograms(self, signal: str, *labels: str) -> dict[tuple[str, ...], list[Histogram]]:
        """Lifetime histograms, one a series, by the values of these labels."""
        return self._histograms(signal, labels, self._totals)

    def grown_histograms(self, signal: str, *labels: str) -> dict[tuple[str, ...], list[Histogram]]:
        """Histograms of what was observed in the window; empty before there is one."""
        return self._histograms(signal, labels, increase.vector) if (increase := self.increase) else {}

    def bounds_of(self, signal: str, *labels: str) -> dict[tuple[str, ...], set[tuple[float, ...]]]:
        """The different bucket bounds of its histograms, by the values of these labels."""
        found: dict[tuple[str, ...], set[tuple[float, ...]]] = {}
        for labelled, grid in self._book.labelled_grids(signal, labels):
            found.setdefault(labelled, set()).add(grid.bounds)
        return found

    def merged(self, signal: str, *, grown: bool = False) -> Histogram | None:
        """All its lifetime histograms, or what they grew by in the window, as one; None if there are none."""
        key = signal, grown
        if key not in self._merged:
            given = self.grown_histograms(signal) if grown else self.histograms(signal)
            every = [one for histograms in given.values() for one in histograms]
            self._merged[key] = merge(every)
        return self._merged[key]

    def gauges_of(self, signal: str) -> Mapping[LabelSet, float]:
        """Its newest values by their labels."""
        if self._gauges is not self.gauges:
            self._by_signal = {}
            for group, value in self.gauges.items():
                self._by_signal.setdefault(group.signal, {})[group.labels] = value
            self._gauges = self.gauges
        return self._by_signal.get(signal, {})

    def _replace_sources(self, before: Mapping[str, Counted], reset: bool) -> bool:
        """Counters that were read under other names until now: the new ones count the same events from the process's
        start on, so the old ones' counts are in them, unless the process is another one. True if there are any."""
        replaced = False
        for name, counted in self._counted.items():
            old = before.get(name)
            if old is None or old.source == counted.source:
                continue
            another = reset or self._bank_sum(counted.countable) < self._bank_sum(old.countable)
            gone = old.places[~np.isin(old.places, counted.places)]
            self._bank.retire(gone, keep=another)
            replaced = True
        return replaced

    def _bank_sum(self, places: Indices) -> float:
        return float(self._book.scaled(places, self._bank.shown(places)).sum())

    def _restarted(self, plan: Plan, values: Vector) -> bool:
        """Whether the page is of a process that was not seen before, after one that was.

        Several processes may answer at one address in turn, each with counters of its own: one that comes back goes on
        where it was.
        """
        if plan.start_slot is None or not math.isfinite(started := float(values[plan.start_slot])):
            return False
        before, self.started_unix_seconds = self.started_unix_seconds, started
        if before is None or abs(started - before) <= _RESTART_TOLERANCE_SECONDS:
            return False
        self._others[before] = self._bank.leave()
        back = next((other for other in self._others if abs(started - other) <= _RESTART_TOLERANCE_SECONDS), None)
        if back is not None:
            self._bank.resume(self._others.pop(back))
        elif len(self._others) > _MOST_PROCESSES:
            self._others.pop(next(iter(self._others)))
        self.several_processes = back is not None
        return back is None

    def _fell(self, places: Indices, counters: Vector, at_seconds: float) -> bool:
        """Whether counters fell though nothing says that this is another process; then they can't be compared."""
        shown = self._bank.shown(places)
        below = counters < shown
        if not (self._turns or below.any()):
            return False
        fallen = below & (counters >= 0)
        back = self._turns.back(shown, places, counters, at_seconds)
        if back is not None:
            self._turns.leave(self._bank.leave(), at_seconds)
            self._bank.resume(back)
            self.several_processes = True
            return False
        if not fallen.any():
            return False
        scaled = (self._book.scaled(places[fallen], each[fallen]).sum() for each in (shown, counters))
        before, left = map(float, scaled)
        self.several_processes = False
        if not is_restart(before, left):
            self._turns.leave(self._bank.everything_shown(), at_seconds)
        if is_correction(before, left):
            self._bank.correct(places[fallen], counters[fallen])
        return True

    def _values(self, *, grown: bool) -> list[float] | None:
        """Lifetime totals or growth by place; None for growth before there is a window. A list is read much faster than
        an array, number by number."""
        if grown not in self._lists:
            increase = self.increase if grown else None
            vector = self._totals if not grown else increase.vector if increase else None
            self._lists[grown] = None if vector is None else vector.tolist()
        return self._lists[grown]

    def _parts(self, *, grown: bool) -> Mapping[tuple[str, str], float]:
        """Lifetime sums or growth, by signal and part; empty for growth before there is a window."""
        found = self._sums.get(grown)
        if found is None:
            increase = self.increase if grown else None
            vector = self._totals if not grown else increase.vector if increase else None
            found = {} if vector is None else self._book.sums(vector)
            if self._unknown:
                found = {key: value for key, value in found.items() if self._is_known(key[0])}
            self._sums[grown] = found
        return found

    def _is_known(self, signal: str) -> bool:
        return any(place not in self._unknown for _, place in self._book.by_signal.get(signal, ()))

    def _sums_by(self, signal: str, labels: tuple[str, ...], *, grown: bool) -> dict[tuple[str, ...], float]:
        values, sums = self._values(grown=grown), dict[tuple[str, ...], float]()
        for labelled, place in self._book.labelled(signal, labels) if values is not None else ():
            if place not in self._unknown:
                sums[labelled] = sums.get(labelled, 0.0) + values[place]  # type: ignore[index]  # there are values here
        return sums

    def _histograms(
        self, signal: str, labels: tuple[str, ...], vector: Vector
    ) -> dict[tuple[str, ...], list[Histogram]]:
        found: dict[tuple[str, ...], list[Histogram]] = {}
        for labelled, grid in self._book.labelled_grids(signal, labels):
            found.setdefault(labelled, []).append(grid.histogram(vector))
        return found


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
