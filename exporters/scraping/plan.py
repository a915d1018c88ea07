"""Which samples of a page are which canonical signals: what depends on the series alone and not on their values.

A plan is made once a layout. A scrape then costs a few vector operations, whatever the number of series.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefixwatch.exporters.catalogue.model import Family, Signal, Source, System
from prefixwatch.exporters.scraping.book import Book, Entry, Group, LabelSet
from prefixwatch.exporters.scraping.exposition import Layout, Series
from prefixwatch.exporters.scraping.labels import (
    LabelLimit,
    canonical_labels,
    identities_by_engine,
    identity,
    sorted_labels,
)
from prefixwatch.exporters.scraping.window import Indices, Vector

_OF_ONE_ENGINE = frozenset({"running_requests", "kv_usage_ratio"})
"""Gauges of which an engine has one series a model."""

_RANGE = re.compile(r"(?P<low>[0-9.]+)(?:-(?P<high>[0-9.]+))?(?P<unit>us|ms|s|)(?P<open>\+?)")
_UNIT_SCALES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


@dataclass(slots=True)
class Plan:
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
    counted: dict[str, Counted]
    """By signal that the page gives: another source later counts the same events."""
    start_slot: int | None
    infos: dict[str, list[Mapping[str, str]]]
    engines: Mapping[str, Mapping[str, str]]
    """The model and role of each engine on the page, as far as its series name them."""
    identity: Mapping[str, str]
    """The model and role of all series on the page, where they agree."""
    unmapped: frozenset[tuple[str, str]]
    """Signals and the system's label values that the catalogue should translate and doesn't know."""
    several_engines: bool
    """Whether series of one gauge that describes an engine differ in labels that nobody knows: there are several
    engines on the page, and nothing distinguishes them."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Which of its sources a counting signal is read from, and where its series are."""

    source: Source
    places: Indices
    countable: Indices
    """Of these places those whose sum is what was counted: of a histogram not its buckets and its sum."""


def make_plan(
    system: System, layout: Layout, book: Book, limit: LabelLimit, *, model: str, engine_label: str
) -> tuple[Plan, Book]:
    """The plan of a layout, and the book with its counters.

    `engine_label` is the system's own label of engines that a page goes on showing after they are gone; empty if none.
    """
    present = {series.name for series in layout.series}
    sources = {name: signal.source_on(present) for name, signal in system.signals.items()}
    taken = _by_sample_name(system, sources)
    counters: list[tuple[int, Entry]] = []
    gauges: list[tuple[int, Group, float]] = []
    infos: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    unmapped: set[tuple[str, str]] = set()
    start_slot = None
    for slot, series in enumerate(layout.series):
        for name, signal, family in taken.get(series.name, ()):
            if any(series.labels.get(label, "") != value for label, value in family.only.items()):
                continue
            unmapped.update(
                (name, value)
                for rule in {**signal.labels, **family.labels}.values()
                if (value := rule.unmapped(series.labels)) is not None
            )
            found = canonical_labels(system, signal, family, series, model)
            if signal.kind == "info":
                infos[name].append(found)
                continue
            labels = sorted_labels({label: limit.bounded(label, value) for label, value in found.items()})
            if name == "process_start_seconds":
                start_slot = slot
            elif signal.kind == "gauge":
                gauges.append((slot, Group(name, labels), family.scale))
            else:
                group, scale = _counter_group(name, signal, family, series, labels)
                counters.append((slot, Entry(group, series.identity(), scale)))
    entries = [entry for _, entry in counters]
    book = book.with_entries(entries)
    places = book.places(entries)
    groups = [*(group for _, group, _ in gauges), *(entry.group for entry in entries)]
    series_of = Counter(group for _, group, _ in gauges if group.signal in _OF_ONE_ENGINE)
    plan = Plan(
        counter_slots=np.array([slot for slot, _ in counters], dtype=np.intp),
        counter_places=places,
        gauge_slots=np.array([slot for slot, *_ in gauges], dtype=np.intp),
        gauge_scales=np.array([scale for *_, scale in gauges], dtype=np.float64),
        gauge_groups=[group for _, group, _ in gauges],
        gauge_signals=frozenset(group.signal for _, group, _ in gauges),
        gauge_engines=[layout.series[slot].labels.get(engine_label, "") for slot, *_ in gauges],
        gauge_largest=[system.signals[group.signal].combined_by == "max" for _, group, _ in gauges],
        counter_signals=frozenset(entry.group.signal for entry in entries),
        counted=_counted(system, sources, entries, places),
        start_slot=start_slot,
        infos=dict(infos),
        engines=identities_by_engine(groups),
        identity=identity(groups),
        unmapped=frozenset(unmapped),
        several_engines=system.role == "engine" and max(series_of.values(), default=0) > 1,
    )
    return plan, book


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
) -> dict[str, Counted]:
    found = {}
    for name, source in sources.items():
        if source is None:
            continue
        own = [position for position, entry in enumerate(entries) if entry.group.signal == name]
        countable = [position for position in own if entries[position].group.part in ("value", "range", "count")]
        if own:
            found[name] = Counted(source, places[own], places[countable])
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


def gauge_values(plan: Plan, values: Vector, frozen: Collection[str]) -> dict[Group, float]:
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
