"""What each system calls each signal: data in `catalogue/*.yaml`, one file a system, checked by this schema.

A signal has *sources* in order of preference. The first source of which at least one family is in a target's
text is taken and the others are ignored: a deprecated twin next to the current name is never counted twice.

A system of one's own is a further file of the same form, in a folder that the configuration names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prefixwatch import documents
from prefixwatch.documents.hints import did_you_mean
from prefixwatch.documents.section import Section
from prefixwatch.exporters.catalogue.signals import KIND_OF, OWN_PREFIX
from prefixwatch.exporters.errors import ExporterError

Kind = Literal["counter", "gauge", "histogram", "info"]
Role = Literal["engine", "router", "cache", "transfer", "gpu"]

_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "counter": ("",),
    "gauge": ("",),
    "info": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


_NOT_ADDITIVE = frozenset({"ratio", "bool", "seconds", ""})
"""Units of gauges of which two have no sum."""


class LabelRule(Section):
    """How one canonical label gets its value: a constant, or the system's own label, perhaps translated."""

    value: str | None = None
    source: str | None = Field(default=None, alias="from")
    map: Mapping[str, str] = Field(default_factory=dict)
    """By the system's own value, or by a pattern with `*` that is matched in any case after all values."""
    otherwise: str | None = None
    """For a value that `map` doesn't have; without it such a value stays as it is."""
    default: str | None = None
    """The value when a sample lacks the system's label; without it the canonical label is left out."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.value is None) == (self.source is None):
            raise ValueError("a label needs exactly one of 'value' (a constant) and 'from' (the system's label)")
        return self

    def apply(self, labels: Mapping[str, str]) -> str | None:
        """The canonical value; None when the system's sample has no such label and there is no default."""
        if self.source is None:
            return self.value
        raw = labels.get(self.source)
        if raw is None:
            return self.default
        mapped = self._mapped(raw)
        return mapped if mapped is not None else raw if self.otherwise is None else self.otherwise

    def unmapped(self, labels: Mapping[str, str]) -> str | None:
        """The system's value where `map` should have it and doesn't; otherwise None."""
        raw = labels.get(self.source) if self.source and self.map else None
        return raw if raw is not None and self._mapped(raw) is None else None

    def _mapped(self, raw: str) -> str | None:
        if raw in self.map:
            return self.map[raw]
        patterns = (pattern for pattern in self.map if "*" in pattern)
        return next((self.map[found] for found in patterns if fnmatchcase(raw.lower(), found.lower())), None)


def _label_rule(given: object) -> object:
    return {"from": given} if isinstance(given, str) else given


def _family(given: object) -> object:
    return {"name": given} if isinstance(given, str) else given


Labels = Mapping[str, Annotated[LabelRule, BeforeValidator(_label_rule)]]


class Family(Section):
    """One metric family as the system names it. A counter's name is its sample's, `_total` included."""

    name: str
    scale: float = 1.0
    """Multiply by this to get the signal's unit."""
    labels: Labels = Field(default_factory=dict)
    """Canonical labels, besides the signal's own."""
    only: Mapping[str, str] = Field(default_factory=dict)
    """Take only samples whose own labels have these values; a label that a sample lacks counts as empty."""
    buckets_from: str | None = None
    """For a histogram that is written as a counter: its label with the range, such as `5-10ms`. Each count is then of
    that range alone, and no sum is known."""

    beside: bool = False
    """Added to the source's other families where it is there; alone it doesn't make the source present. So a renamed
    main family is missed, and not read as 0 because a lesser one is still there."""

    def sample_names(self, kind: Kind) -> tuple[str, ...]:
        """The names that its samples have on the page."""
        return (self.name,) if self.buckets_from else tuple(self.name + suffix for suffix in _SUFFIXES[kind])

    def marker(self, kind: Kind) -> str:
        """The sample name that shows its presence."""
        return self.name if kind != "histogram" or self.buckets_from else f"{self.name}_count"


class Source(Section):
    """One way in which versions of the system give the signal."""

    families: tuple[Annotated[Family, BeforeValidator(_family)], ...] = Field(min_length=1)
    versions: str = ""
    """The system's versions that give it so; for readers."""

    def is_on(self, names: Collection[str], kind: Kind) -> bool:
        """Whether one of its main families is on a page with samples of these names."""
        return any(family.marker(kind) in names for family in self.families if not family.beside)


class Signal(Section):
    """One canonical signal of a system."""

    kind: Kind
    unit: str
    sources: tuple[Source, ...] = Field(min_length=1)
    labels: Labels = Field(default_factory=dict)
    combine: Literal["sum", "max"] | None = None
    """How a gauge's series that have the same canonical labels make one value; by its unit if not given."""
    required: bool = False
    """A target of this system without it is flagged `missing_family`."""
    notes: str = ""

    @property
    def combined_by(self) -> Literal["sum", "max"]:
        """Requests, tokens, blocks and bytes add up; ratios, states and ages don't."""
        return self.combine or ("max" if self.unit in _NOT_ADDITIVE else "sum")

    def source_on(self, names: Collection[str]) -> Source | None:
        """The source that is read on a page with samples of these names: the first that is there."""
        return next((source for source in self.sources if source.is_on(names, self.kind)), None)

    @model_validator(mode="after")
    def _ranges_only_in_histograms(self) -> Self:
        families = [family.name for source in self.sources for family in source.families if family.buckets_from]
        if families and self.kind != "histogram":
            raise ValueError(f"'buckets_from' of {families[0]} is for histograms, and this signal is a {self.kind}")
        return self


class VersionRule(Section):
    """The version is `version` when all of these families are there and none of those."""

    version: str
    all_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()


class VersionLabel(Section):
    """Where the system gives its version itself."""

    family: str
    label: str


class Detection(Section):
    """A text is this system's when it has any of these names (a prefix when it ends in *) and none of those."""

    any_of: tuple[str, ...] = Field(min_length=1)
    none_of: tuple[str, ...] = ()


class System(Section):
    """One catalogue file."""

    system: str
    title: str
    role: Role
    detect: Detection
    version_label: VersionLabel | None = None
    versions: tuple[VersionRule, ...] = ()
    frozen_after_seconds: float | None = Field(default=None, gt=0)
    """For a page that goes on showing engines that are gone: one that has requests and whose numbers haven't moved for
    so long has no gauges any more."""
    signals: Mapping[str, Signal]
    absent: Mapping[str, str] = Field(default_factory=dict)
    """Quantities that this system can't give, each with the reason shown to users."""

    @model_validator(mode="after")
    def _known_signals(self) -> Self:
        for name, signal in self.signals.items():
            kind = KIND_OF.get(name)
            if kind is None and not name.startswith(OWN_PREFIX):
                hint = did_you_mean(name, KIND_OF)
                raise ValueError(f"'{name}' is not a known signal, {hint} Begin one of your own with {OWN_PREFIX}")
            if kind is not None and kind != signal.kind:
                raise ValueError(f"signal '{name}' is a {kind}, not a {signal.kind}")
        return self

    def wanted_names(self) -> frozenset[str]:
        """Every sample name that any signal or the version may be read from."""
        names = {
            name
            for signal in self.signals.values()
            for source in signal.sources
            for family in source.families
            for name in family.sample_names(signal.kind)
        }
        if self.version_label:
            names.add(self.version_label.family)
        return frozenset(names)

    def matches(self, names: frozenset[str]) -> bool:
        return _has_any(names, self.detect.any_of) and not _has_any(names, self.detect.none_of)

    def version(self, names: frozenset[str]) -> str:
        """The version, or the range of versions, that exposes these names; empty when it can't be known."""
        for rule in self.versions:
            if names.issuperset(rule.all_of) and names.isdisjoint(rule.none_of):
                return rule.version
        return ""


def _has_any(names: frozenset[str], patterns: Iterable[str]) -> bool:
    return any(
        any(name.startswith(pattern[:-1]) for name in names) if pattern.endswith("*") else pattern in names
        for pattern in patterns
    )


def parse_system(text: str, origin: str) -> System:
    """One catalogue file's content. Raises DocumentError with `origin`, the line and the key of each mistake."""
    return documents.parse(text, System, name=origin)


class Catalogue:
    """All known systems; where two match a text, or have the same name, the earlier one stands."""

    def __init__(self, systems: Iterable[System]) -> None:
        self._systems: dict[str, System] = {}
        for system in systems:
            self._systems.setdefault(system.system, system)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._systems)

    def get(self, name: str) -> System:
        """The system of this name. Raises ExporterError listing the known ones."""
        system = self._systems.get(name)
        if system is None:
            raise ExporterError(f"unknown system '{name}'; known: {', '.join(sorted(self._systems))}")
        return system

    def detect(self, names: frozenset[str]) -> System | None:
        """The system that exposes these metric names, or None."""
        return next(iter(self.matching(names)), None)

    def matching(self, names: frozenset[str]) -> list[System]:
        """All systems that a text with these names could be of."""
        return [system for system in self._systems.values() if system.matches(names)]


@cache
def shipped_catalogue() -> Catalogue:
    """The catalogue that comes with prefixwatch."""
    folder = files("prefixwatch.exporters.catalogue")
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return Catalogue(parse_system(entry.read_text("utf-8"), f"exporters/catalogue/{entry.name}") for entry in found)


def load_catalogue(folder: Path | None) -> Catalogue:
    """The shipped systems and those of a folder, which come first: a file there may replace a shipped one.

    Raises ExporterError when the folder can't be read, DocumentError when a file in it is wrong.
    """
    shipped = shipped_catalogue()
    if folder is None:
        return shipped
    if not folder.is_dir():
        raise ExporterError(f"catalogue folder {folder}: there is no such folder")
    found = sorted({*folder.glob("*.yaml"), *folder.glob("*.yml")})
    if not found:
        raise ExporterError(f"catalogue folder {folder}: there is no *.yaml in it")
    own = [documents.load(path, System) for path in found]
    return Catalogue([*own, *(shipped.get(name) for name in shipped.names)])
