"""What a catalogue file makes of a real page: what it maps, what it leaves, and what looks wrong. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefixwatch.exporters.catalogue.model import Catalogue, Family, Signal, Source, System
from prefixwatch.exporters.catalogue.renames import Renames, follow
from prefixwatch.exporters.catalogue.review import contradiction, declared_kinds, unused
from prefixwatch.exporters.scraping.exposition import ExpositionReader, Reading, metric_names
from prefixwatch.exporters.scraping.signals import SignalStore

_UNIT_HINTS: Sequence[tuple[str, str, float]] = (
    (r"_(ms|milliseconds)(_|$)", "seconds", 1e-3),
    (r"_(us|microseconds)(_|$)", "seconds", 1e-6),
    (r"_(ns|nanoseconds)(_|$)", "seconds", 1e-9),
    (r"_(mb|mib|megabytes)(_|$)", "bytes", 1048576.0),
    (r"_(gb|gib|gigabytes)(_|$)", "bytes", 1073741824.0),
    (r"_(percent|pct)(_|$)", "ratio", 0.01),
)
"""What a name says of its unit, for signals of this unit, and the scale that it then needs."""

_MICROMETER_TIMER = re.compile(r"_(ms|us|ns)_seconds(_|$)")


@dataclass(frozen=True, slots=True)
class Mapped:
    """A signal that the page gives."""

    signal: str
    kind: str
    unit: str
    families: tuple[str, ...]
    series: int
    value: float | None
    """Its sum over all series; of a histogram the number of observations."""


@dataclass(frozen=True, slots=True)
class Check:
    """All that can be said of one page and one system."""

    system: str
    version: str
    detected: bool
    """Whether the page is taken for this system by its names."""
    also: tuple[str, ...]
    """Other known systems that the page is taken for."""
    mapped: tuple[Mapped, ...]
    unmatched: Mapping[str, tuple[str, ...]]
    """Signals that the page doesn't give → the families that were looked for."""
    unused: Mapping[str, str]
    """Families of the page that no signal reads → their kind."""
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """The page is of this system alone, gives its required signals, and nothing looks wrong."""
        return self.detected and not self.also and bool(self.mapped) and not self.warnings


@dataclass(frozen=True, slots=True)
class _Page:
    """What was read, and the kinds that the page declares by family."""

    reading: Reading
    kinds: Mapping[str, str]


def check(system: System, body: bytes, catalogue: Catalogue) -> Check:
    """Hold a system's catalogue entry against a page; `catalogue` has the systems that it must not be taken for."""
    names = metric_names(body)
    followed = follow(system, names)
    system = followed.system
    reading = ExpositionReader(system.wanted_names()).read(body)
    store = SignalStore(system, 60.0, 1_000_000)
    store.apply(reading, 0.0)
    page = _Page(reading, declared_kinds(body))
    taken = {name: source for name in system.signals if (source := system.signals[name].source_on(names))}
    given = {name: source for name, source in taken.items() if store.has(name) or name in _SPECIAL}
    return Check(
        system=system.system,
        version=system.version(followed.names),
        detected=system.matches(followed.names),
        also=tuple(other.system for other in catalogue.matching(names) if other.system != system.system),
        mapped=tuple(_mapped(store, name, source, reading) for name, source in given.items()),
        unmatched={
            name: tuple(family.name for source in signal.sources for family in source.families)
            for name, signal in system.signals.items()
            if name not in given
        },
        unused=unused(names, system, page.kinds),
        warnings=tuple(dict.fromkeys([*_warnings(store, given, taken, page), *_look_alikes(followed.renames)])),
    )


def _look_alikes(renames: Renames) -> Iterator[str]:
    for name in renames.not_followed:
        yield f"{name} looks like a family that isn't on the page; give its name in the file if it is that one"


_SPECIAL = ("process_start_seconds", "cache_config")
"""Signals that the store keeps apart from counters and gauges."""


def _mapped(store: SignalStore, name: str, source: Source, reading: Reading) -> Mapped:
    signal = store.system.signals[name]
    present = {series.name for series in reading.layout.series}
    read = [family for family in source.families if family.marker(signal.kind) in present]
    wanted = {sample for family in read for sample in family.sample_names(signal.kind)}
    values: dict[str, float | None] = {
        "counter": store.total(name),
        "histogram": store.total(name, "count"),
        "gauge": sum(store.gauges_of(name).values()) if store.gauges_of(name) else None,
    }
    return Mapped(
        signal=name,
        kind=signal.kind,
        unit=signal.unit,
        families=tuple(family.name for family in read),
        series=sum(series.name in wanted for series in reading.layout.series),
        value=values.get(signal.kind),
    )


def _warnings(
    store: SignalStore, given: Mapping[str, Source], taken: Mapping[str, Source], page: _Page
) -> Iterator[str]:
    system, reading = store.system, page.reading
    by_name: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for series in reading.layout.series:
        by_name[series.name].append(series.labels)
    for name, signal in system.signals.items():
        if signal.required and name not in given:
            yield f"{name}: required, and none of its families is on the page"
    for name, source in taken.items():
        signal = system.signals[name]
        for family in source.families:
            samples = [labels for sample in family.sample_names(signal.kind) for labels in by_name.get(sample, ())]
            if samples:
                yield from _family_warnings(name, signal, family, samples, page.kinds)
                if not any(_is_taken(other, labels) for other in source.families if other.name == family.name
                           for labels in samples):  # fmt: skip
                    yield _nothing_taken(name, family, samples)
    if reading.malformed_lines:
        yield f"{reading.malformed_lines} lines begin like a wanted sample and can't be read"
    if reading.duplicate_lines:
        yield f"{reading.duplicate_lines} series are on the page more than once"
    yield from _odd_values(store)


def _family_warnings(
    name: str, signal: Signal, family: Family, samples: Sequence[Mapping[str, str]], kinds: Mapping[str, str]
) -> Iterator[str]:
    for canonical, rule in {**signal.labels, **family.labels}.items():
        source = rule.source
        if source and rule.default is None and not any(source in labels for labels in samples):
            known = sorted({label for labels in samples for label in labels} - {"le", "quantile"})
            yield (
                f"{name}: {family.name} has no label '{source}' for '{canonical}'; its labels are "
                f"{', '.join(known) or 'none'}"
            )
    if family.scale == 1.0 and not _MICROMETER_TIMER.search(family.name):
        for pattern, unit, scale in _UNIT_HINTS:
            if signal.unit == unit and re.search(pattern, family.name, re.I):
                yield f"{name}: {family.name} doesn't look like {unit}; does it need scale: {scale:g}?"
    if declared := contradiction(signal, family, kinds):
        yield f"{name}: the page declares {family.name} a {declared}, the catalogue reads it as a {signal.kind}"
    for canonical, rule in {**signal.labels, **family.labels}.items():
        unknown = sorted({value for labels in samples if (value := rule.unmapped(labels)) is not None})
        if unknown:
            yield f"{name}: the map of '{canonical}' has no entry for {rule.source}={', '.join(unknown[:10])}"


def _is_taken(family: Family, labels: Mapping[str, str]) -> bool:
    return all(labels.get(label, "") == value for label, value in family.only.items())


def _nothing_taken(name: str, family: Family, samples: Sequence[Mapping[str, str]]) -> str:
    label = next(iter(family.only))
    seen = sorted({labels.get(label, "") for labels in samples})
    return f"{name}: no sample of {family.name} has the labels of 'only'; values of {label}: {', '.join(seen[:10])}"


def _odd_values(store: SignalStore) -> Iterator[str]:
    for name, signal in store.system.signals.items():
        if signal.kind == "gauge" and signal.unit == "ratio":
            beyond = [value for value in store.gauges_of(name).values() if not 0 <= value <= 1]
            if beyond:
                yield f"{name}: a ratio of {beyond[0]:g}, not between 0 and 1; is it in percent?"
    hits, queries = store.total("prefix_hit_tokens"), store.total("prefix_query_tokens")
    if hits is not None and queries is not None and hits > queries:
        yield f"prefix_hit_tokens: {hits:g}, more than the {queries:g} tokens looked up"
