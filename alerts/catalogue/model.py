"""The alerts and recording rules of `catalogue/*.yaml`, with the thresholds of `thresholds.yaml` filled in.

`catalogue/` has the queries and the texts; `thresholds.yaml` has every number that an operator may want to change. In
the catalogue `$threshold` and `$minimum` stand for them (`$threshold%` as per cent), and these for labels and targets:

- `$fleet`: the labels that separate fleets, `cluster` by default; every aggregation and join keeps them. A label that
  nothing has is the same to Prometheus as an empty one, so the rules also work where there is a single fleet.
- `$model`: these and `model`; what is compared between workers is compared among those of one model.
- `$engines`, `$routers`, `$not_routers`: matchers of targets by what the exporter's catalogue says their system is.
- `$quantile(q, histogram, matcher)`: a quantile by `$model`, of classic and native histograms.
- `$job`, `$timeout`: the exporter's job label, and Prometheus' time-out for its page in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, RootModel

from prefixwatch.documents import Document, DocumentError, load, load_all
from prefixwatch.documents.hints import did_you_mean
from prefixwatch.documents.section import Section
from prefixwatch.exporters.catalogue.model import shipped_catalogue

FOLDER = Path(__file__).parent
THRESHOLDS = FOLDER.parent / "thresholds.yaml"

Severity = Literal["page", "ticket"]
AlertSeverity = Literal["page", "ticket", "none"]
"""`none` is for nobody: the Watchdog."""
FLEET_LABELS = ("cluster",)


class Threshold(Section):
    """The numbers of one alert."""

    threshold: float = Field(allow_inf_nan=False, description="the value that is too high, or too low")
    minimum: float | None = Field(default=None, gt=0, description="events below which a ratio says nothing")
    for_: str = Field(alias="for", pattern=r"^[0-9]+[smhd]$", description="how long it must hold, e.g. 10m")
    why: str = Field(min_length=1, description="where the value comes from")


class _ThresholdFile(RootModel[dict[str, Threshold]]):
    """A file of thresholds, by alert."""


class RecordSpec(Section):
    """A recording rule of the catalogue."""

    record: str = Field(pattern=r"^prefixwatch:[a-z][a-z0-9_]*:[a-z][a-z0-9_]*$")
    rows: list[str] = Field(min_length=1, description="quantities of the metrics table that it serves")
    unit: str
    help: str
    expr: str


class AlertSpec(Section):
    """An alert of the catalogue; without `expr` it is made for every SLO (`alerts.slo_alerts`)."""

    alert: str = Field(pattern=r"^[A-Z][A-Za-z]+$")
    rows: list[str] = Field(min_length=1, description="quantities of the metrics table that it serves")
    severity: AlertSeverity
    cause: bool = Field(description="whether it names a cause, which may silence the symptoms in `inhibits`")
    inhibits: list[str] = Field(default=[], description="symptoms that it explains: silent while this one fires")
    per: str | None = Field(default=None, description="label of the worker, for an alert that is about one worker")
    expr: str | None = None
    keep: str = Field(default="5m", pattern=r"^[0-9]+[smh]$", description="how long it goes on after its condition")
    summary: str
    description: str
    exit_condition: str


class GroupSpec(Section):
    """A file of the catalogue: a group of rules and the dashboard that shows them."""

    group: str
    title: str
    dashboard: str = Field(pattern=r"^prefixwatch-[a-z-]+$", description="uid of its dashboard")
    records: list[RecordSpec] = Field(default=[])
    alerts: list[AlertSpec] = Field(default=[])


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as the registry lists it, thresholds written in."""

    name: str
    group: str
    rows: tuple[str, ...]
    severity: AlertSeverity
    cause: bool
    inhibits: tuple[str, ...]
    per: str | None
    """The label that names the worker; None for alerts on a whole fleet."""
    by_model: bool
    """Whether its series have the label `model`, where the exporter knows the model."""
    dashboard: str
    expr: str | None
    """PromQL; None for the alerts that are made for every SLO."""
    hold: str
    """The rule's `for`."""
    keep: str
    """The rule's `keep_firing_for`: a failed scrape or two must not resolve it."""
    summary: str
    description: str
    exit_condition: str


@dataclass(frozen=True, slots=True)
class Record:
    """One recording rule as the registry lists it."""

    name: str
    group: str
    rows: tuple[str, ...]
    unit: str
    help: str
    expr: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All groups in the order of diagnosis, SLO alerts first."""

    groups: tuple[GroupSpec, ...]
    alerts: tuple[Alert, ...]
    records: tuple[Record, ...]

    def alert(self, name: str) -> Alert:
        """Raises KeyError for an unknown one."""
        found = next((alert for alert in self.alerts if alert.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    def is_widespread(self, alert: Alert) -> bool:
        """Whether the alert is about single workers and explains what a whole fleet shows."""
        return alert.per is not None and any(self.alert(name).per is None for name in alert.inhibits)


def load_catalogue(
    overrides: Path | None = None,
    *,
    job: str = "prefixwatch",
    fleet: Sequence[str] = FLEET_LABELS,
    timeout_seconds: float = 10.0,
    native: bool = True,
) -> Catalogue:
    """The shipped catalogue with shipped thresholds, where the file `overrides` doesn't replace them.

    `job` is the exporter's job label in Prometheus, `fleet` the labels that separate fleets, `timeout_seconds`
    Prometheus' time-out for the exporter's page, `native` whether the database knows native histograms. Raises
    DocumentError.
    """
    words = {"$job": job, "$timeout": f"{timeout_seconds:g}", **_scopes(fleet)}
    groups = tuple(load(path, GroupSpec) for path in sorted(FOLDER.glob("*.yaml")))
    thresholds = dict(_shipped_thresholds())
    if overrides is not None:
        thresholds |= _own_thresholds(overrides, thresholds)
    records = [_record(group, spec, words, native) for group in groups for spec in group.records]
    alerts = [
        _alert(group, spec, thresholds.get(spec.alert), words, native) for group in groups for spec in group.alerts
    ]
    return Catalogue(groups, tuple(alerts), tuple(records))


def read_thresholds(path: Path) -> dict[str, Threshold]:
    """Thresholds by alert. Raises DocumentError."""
    return _thresholds_document(path).content.root


def _thresholds_document(path: Path) -> Document[_ThresholdFile]:
    documents = load_all(path, _ThresholdFile)
    if len(documents) != 1:
        raise DocumentError(f"{path}:1: expected alerts and their thresholds: AlertName: {{threshold: 0.5, …}}")
    return documents[0]


def _own_thresholds(path: Path, shipped: Mapping[str, Threshold]) -> dict[str, Threshold]:
    """An operator's rows; where one has no minimum, the shipped one stays."""
    document, found = _thresholds_document(path), {}
    for name, row in document.content.root.items():
        if name not in shipped:
            hint = did_you_mean(name, sorted(shipped))
            raise document.error((name,), f"no alert with a threshold has this name: {hint}")
        least = shipped[name].minimum
        if row.minimum is not None and least is None:
            raise document.error((name, "minimum"), f"{name} counts no events: take it out")
        found[name] = row if row.minimum is not None else row.model_copy(update={"minimum": least})
    return found


@cache
def _shipped_thresholds() -> dict[str, Threshold]:
    return read_thresholds(THRESHOLDS)


def _scopes(fleet: Sequence[str]) -> dict[str, str]:
    known = shipped_catalogue()
    roles = {name: known.get(name).role for name in sorted(known.names)}
    routers = "|".join(name for name, role in roles.items() if role == "router")
    not_engines = "|".join(name for name, role in roles.items() if role != "engine")
    return {
        "$fleet": ", ".join(fleet),
        "$model": ", ".join((*fleet, "model")),
        "$engines": f'system!~"{not_engines}"',
        "$routers": f'system=~"{routers}"',
        "$not_routers": f'system!~"{routers}"',
    }


def _record(group: GroupSpec, spec: RecordSpec, words: Mapping[str, str], native: bool) -> Record:
    expr = _filled(_expanded(spec.expr, native), words)
    return Record(spec.record, group.group, tuple(spec.rows), spec.unit, spec.help, expr)


def _alert(
    group: GroupSpec, spec: AlertSpec, threshold: Threshold | None, words: Mapping[str, str], native: bool
) -> Alert:
    def written(text: str) -> str:
        return _filled(_written(text, threshold), words)

    return Alert(
        name=spec.alert,
        group=group.group,
        rows=tuple(spec.rows),
        severity=spec.severity,
        cause=spec.cause,
        inhibits=tuple(spec.inhibits),
        per=spec.per,
        by_model="$model" in (spec.expr or ""),
        dashboard=group.dashboard,
        expr=None if spec.expr is None else written(_expanded(spec.expr, native)),
        hold=threshold.for_ if threshold else "0m",
        keep=spec.keep if spec.expr is not None else "0s",
        summary=written(spec.summary),
        description=written(spec.description),
        exit_condition=written(spec.exit_condition),
    )


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Longest names first, as one may begin with another."""
    for name in sorted(words, key=len, reverse=True):
        text = text.replace(name, words[name])
    return text


def _written(text: str, threshold: Threshold | None) -> str:
    if threshold is None:
        return text
    text = text.replace("$threshold%", f"{threshold.threshold * 100:g} %")
    text = text.replace("$threshold", f"{threshold.threshold:g}")
    return text if threshold.minimum is None else text.replace("$minimum", f"{threshold.minimum:g}")


_QUANTILE = re.compile(r"\$quantile\((?P<q>[0-9.]+), (?P<family>\w+)(?:, (?P<matcher>[^)]*))?\)")


def _expanded(expr: str, native: bool) -> str:
    """`$quantile(q, family, matcher)` in full: of classic and native histograms, absent without observations."""

    def full(match: re.Match[str]) -> str:
        return quantile(match["q"], match["family"], match["matcher"] or "", native=native)

    return _QUANTILE.sub(full, expr).strip()


def quantile(q: str, family: str, matcher: str = "", *, native: bool = True) -> str:
    """PromQL of a quantile by model, over 15 minutes.

    `rate` before `sum`, so that a restart of one replica is a reset of its own series (EM45). A fleet may be half
    on native histograms (SL11); an idle one has no quantile rather than NaN (SL01).
    """
    where = f"{{{matcher}}}" if matcher else ""
    classic = (
        f"histogram_quantile({q}, sum by ($model, le) (rate({family}_bucket{where}[15m])))\n"
        f"and on ($model) sum by ($model) (rate({family}_count{where}[15m])) > 0"
    )
    if not native:
        return classic
    rates = f"sum by ($model) (rate({family}{where}[15m]))"
    whole = f"histogram_quantile({q}, {rates})\nand on ($model) histogram_count({rates}) > 0"
    return f"(\n{classic}\n)\nor (\n{whole}\n)"
