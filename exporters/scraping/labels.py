"""Canonical labels: which engine and model a series is of, and how many values of a label are kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prefixwatch.exporters.catalogue.model import Family, Signal, System
from prefixwatch.exporters.scraping.book import Group, LabelSet
from prefixwatch.exporters.scraping.exposition import Series

OTHER = "other"
"""The label value that stands for all beyond the limit."""

WORKER_LABELS = frozenset({"worker", "engine"})
"""Labels whose values name workers. Workers are not merged as other values are: a sum over several of them would pass
for one worker's load."""

AGGREGATING_LABELS = ("worker_addr", "pd_backend", "pod", "instance", "exported_instance")
"""What gateways, sidecars and federated pages tell several engines on one page apart by, beside the engine's own
labels. smg-project/smg#813."""

ROLE_LABELS = ("pd_role", "engine_type", "dynamo_component", "disaggregation_mode")
ROLES = frozenset({"prefill", "decode"})
"""Roles of engines where prefill and decode are split, under the labels above."""

_MOST_WORKERS = 10_000
_MOST_OVERFLOWED = 10_000


@dataclass(slots=True)
class LabelLimit:
    """Keeps label values that a client can choose from growing without end: the first `most` of a label are kept,
    and 10,000 names of workers."""

    most: int
    _seen: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _beyond: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def bounded(self, label: str, value: str) -> str:
        """The value itself, or `OTHER`."""
        seen = self._seen[label]
        if value in seen or len(seen) < (_MOST_WORKERS if label in WORKER_LABELS else self.most):
            seen.add(value)
            return value
        beyond = self._beyond[label]
        if len(beyond) < _MOST_OVERFLOWED:
            beyond.add(value)
        return OTHER

    @property
    def overflowed(self) -> Mapping[str, int]:
        """By label, how many of its values became `OTHER`; counted up to 10,000."""
        return {label: len(values) for label, values in self._beyond.items()}


def canonical_labels(system: System, signal: Signal, family: Family, series: Series, model: str) -> dict[str, str]:
    """A series' labels by the names that all systems share.

    `model` replaces a model's name that the system doesn't know itself.
    """
    own = series.labels
    found: dict[str, str] = {}
    for name, rule in {**signal.labels, **family.labels}.items():
        value = rule.apply(own)
        if name == "model" and value is not None:
            value = _model_name(value, model)
        if value is not None:
            found[name] = value
    if system.role == "engine":
        parts = [own[label] for label in AGGREGATING_LABELS if own.get(label)]
        if parts:
            found["engine"] = "/".join([*parts, *filter(None, [found.get("engine")])])
        role = next((own[label] for label in ROLE_LABELS if own.get(label) in ROLES), None)
        if role is not None:
            found["role"] = role
    return found


def identity(groups: Iterable[Group]) -> dict[str, str]:
    """The model and role that all of these series agree on, as far as they name any."""
    values: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        for label, value in group.labels:
            if label in ("model", "role") and value:
                values[label].add(value)
    return {label: next(iter(named)) for label, named in values.items() if len(named) == 1}


def identities_by_engine(groups: Iterable[Group]) -> dict[str, dict[str, str]]:
    """The same of each engine on the page."""
    by_engine: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if (engine := group.label("engine")) is not None:
            by_engine[engine].append(group)
    return {engine: identity(own) for engine, own in by_engine.items()}


def sorted_labels(labels: Mapping[str, str]) -> LabelSet:
    return tuple(sorted(labels.items()))


def _model_name(named: str, configured: str) -> str:
    """One name for a model that some families call by the path of its files, or don't know at all."""
    if named in ("", "undefined", "unknown") and configured:
        return configured
    return named.rstrip("/").rpartition("/")[2] if named.startswith(("/", "./", "~")) else named
