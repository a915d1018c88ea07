"""What each system calls each signal: data in `catalogue/*.yaml`, one file a system, checked by this schema.

A signal has *sources* in order of preference. The first source of which at least one family is in a target's
text is taken and the others are ignored: a deprecated twin next to the current name is never counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from exporters.errors import ExporterError

Kind = Literal["counter", "gauge", "histogram", "info"]
Role = Literal["engine", "router", "cache"]

_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "counter": ("",),
    "gauge": ("",),
    "info": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LabelRule(_Strict):
    """How one canonical label gets its value: a constant, or the system's own label, perhaps translated."""

    value: str | None = None
    source: str | None = Field(default=None, alias="from")
    map: Mapping[str, str] = Field(default_factory=dict)
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
        return self.default if raw is None else self.map.get(raw, raw)


def _label_rule(given: object) -> object:
    return {"from": given} if isinstance(given, str) else given


def _family(given: object) -> object:
    return {"name": given} if isinstance(given, str) else given


Labels = Mapping[str, Annotated[LabelRule, BeforeValidator(_label_rule)]]


class Family(_Strict):
    """One metric family as the system names it. A counter's name is its sample's, `_total` included."""

    name: str
    scale: float = 1.0
    """Multiply by this to get the signal's unit."""
    labels: Labels = Field(default_factory=dict)
    """Canonical labels, besides the signal's own."""
    only: Mapping[str, str] = Field(default_factory=dict)
    """Take only samples whose own labels have these values; a label that a sample lacks counts as empty."""


class Source(_Strict):
    """One way in which versions of the system give the signal."""

    families: tuple[Annotated[Family, BeforeValidator(_family)], ...] = Field(min_length=1)
    versions: str = ""
    """The system's versions that give it so; for readers."""


class Signal(_Strict):
    """One canonical signal of a system."""

    kind: Kind
    unit: str
    sources: tuple[Source, ...] = Field(min_length=1)
    labels: Labels = Field(default_factory=dict)
    required: bool = False
    """A target of this system without it is flagged `missing_family`."""
    notes: str = ""


class VersionRule(_Strict):
    """The version is `version` when all of these families are there and none of those."""

    version: str
    all_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()


class VersionLabel(_Strict):
    """Where the system tells its version itself."""

    family: str
    label: str


class Detection(_Strict):
    """A text is this system's when it has any of these names (a prefix when it ends in *) and none of those."""

    any_of: tuple[str, ...] = Field(min_length=1)
    none_of: tuple[str, ...] = ()


class System(_Strict):
    """One catalogue file."""

    system: str
    title: str
    role: Role
    detect: Detection
    version_label: VersionLabel | None = None
    versions: tuple[VersionRule, ...] = ()
    signals: Mapping[str, Signal]
    absent: Mapping[str, str] = Field(default_factory=dict)
    """Quantities that this system can't give, each with the reason shown to users."""

    def wanted_names(self) -> frozenset[str]:
        """Every sample name that any signal or the version may be read from."""
        names = {
            family.name + suffix
            for signal in self.signals.values()
            for source in signal.sources
            for family in source.families
            for suffix in _SUFFIXES[signal.kind]
        }
        if self.version_label:
            names.add(self.version_label.family)
        return frozenset(names)

    def matches(self, names: frozenset[str]) -> bool:
        return _has_any(names, self.detect.any_of) and not _has_any(names, self.detect.none_of)

    def version(self, names: frozenset[str]) -> str:
        """The version, or the range of versions, that exposes these names; empty when it can't be told."""
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
    """One catalogue file's content. Raises ExporterError naming `origin` and the field that is wrong."""
    try:
        return System.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ExporterError(f"{origin}: not valid YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ExporterError(f"{origin}: {where}: {first['msg']}") from error


class Catalogue:
    """All known systems."""

    def __init__(self, systems: Iterable[System]) -> None:
        self._systems = {system.system: system for system in systems}

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
        return next((system for system in self._systems.values() if system.matches(names)), None)


@cache
def shipped_catalogue() -> Catalogue:
    """The catalogue that comes with prefixwatch."""
    folder = files("exporters") / "catalogue"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return Catalogue(parse_system(entry.read_text("utf-8"), f"exporters/catalogue/{entry.name}") for entry in found)
