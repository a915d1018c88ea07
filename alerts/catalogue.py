"""The alerts and recording rules of `catalogue/*.yaml`, with the thresholds of `thresholds.yaml` written in.

`catalogue/` says what is asked of Prometheus and what is told to a person; `thresholds.yaml` holds every number that
an operator may want to change. In the catalogue `$threshold` and `$minimum` stand for them (`$threshold%` as per cent).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from documents import Document, DocumentError, load, load_all

FOLDER = Path(__file__).parent / "catalogue"
THRESHOLDS = Path(__file__).parent / "thresholds.yaml"

Severity = Literal["page", "ticket"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Threshold(_Strict):
    """The numbers of one alert."""

    threshold: float = Field(allow_inf_nan=False, description="the value that is too high, or too low")
    minimum: float | None = Field(default=None, gt=0, description="events below which a ratio says nothing")
    for_: str = Field(alias="for", pattern=r"^[0-9]+[smhd]$", description="how long it must hold, e.g. 10m")
    why: str = Field(min_length=1, description="where the value comes from")


class _ThresholdFile(RootModel[dict[str, Threshold]]):
    """A file of thresholds, by alert."""


class RecordSpec(_Strict):
    """A recording rule of the catalogue."""

    record: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    rows: list[str] = Field(min_length=1, description="quantities of the metrics table that it serves")
    unit: str
    help: str
    expr: str


class AlertSpec(_Strict):
    """An alert of the catalogue; without `expr` it is made for every SLO (`alerts.slo_alerts`)."""

    alert: str = Field(pattern=r"^[A-Z][A-Za-z]+$")
    rows: list[str] = Field(min_length=1, description="quantities of the metrics table that it serves")
    severity: Severity
    cause: bool = Field(description="whether it names a cause, which may silence the symptoms in `inhibits`")
    inhibits: list[str] = Field(default=[], description="symptoms that it explains: silent while this one fires")
    inhibit_equal: list[str] = Field(default=[], description="labels that the symptom must share with it")
    expr: str | None = None
    summary: str
    description: str
    exit_condition: str


class GroupSpec(_Strict):
    """A file of the catalogue: a group of rules and the dashboard that shows them."""

    group: str
    title: str
    dashboard: str = Field(pattern=r"^prefixwatch-[a-z-]+$", description="uid of its dashboard")
    records: list[RecordSpec] = []
    alerts: list[AlertSpec] = []


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as the registry lists it, thresholds written in."""

    name: str
    group: str
    rows: tuple[str, ...]
    severity: Severity
    cause: bool
    inhibits: tuple[str, ...]
    inhibit_equal: tuple[str, ...]
    dashboard: str
    expr: str | None
    """PromQL; None for the alerts that are made for every SLO."""
    hold: str
    """The rule's `for`."""
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


def load_catalogue(overrides: Path | None = None, *, job: str = "prefixwatch") -> Catalogue:
    """The shipped catalogue with shipped thresholds, where the file `overrides` doesn't replace them.

    `job` is the exporter's job label in Prometheus. Raises DocumentError.
    """
    groups = tuple(load(path, GroupSpec) for path in sorted(FOLDER.glob("*.yaml")))
    thresholds = dict(_shipped_thresholds())
    if overrides is not None:
        thresholds |= _own_thresholds(overrides, thresholds)
    records = [_record(group, spec) for group in groups for spec in group.records]
    alerts = [_alert(group, spec, thresholds.get(spec.alert), job) for group in groups for spec in group.alerts]
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
            near = difflib.get_close_matches(name, shipped, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(shipped))}"
            raise document.error((name,), f"no alert with a threshold has this name: {hint}")
        least = shipped[name].minimum
        if row.minimum is not None and least is None:
            raise document.error((name, "minimum"), f"{name} counts no events: take it out")
        found[name] = row if row.minimum is not None else row.model_copy(update={"minimum": least})
    return found


@cache
def _shipped_thresholds() -> dict[str, Threshold]:
    return read_thresholds(THRESHOLDS)


def _record(group: GroupSpec, spec: RecordSpec) -> Record:
    return Record(spec.record, group.group, tuple(spec.rows), spec.unit, spec.help, _expanded(spec.expr))


def _alert(group: GroupSpec, spec: AlertSpec, threshold: Threshold | None, job: str) -> Alert:
    def written(text: str) -> str:
        return _written(text, threshold).replace("$job", job)

    return Alert(
        name=spec.alert,
        group=group.group,
        rows=tuple(spec.rows),
        severity=spec.severity,
        cause=spec.cause,
        inhibits=tuple(spec.inhibits),
        inhibit_equal=tuple(spec.inhibit_equal),
        dashboard=group.dashboard,
        expr=None if spec.expr is None else written(_expanded(spec.expr)),
        hold=threshold.for_ if threshold else "0m",
        summary=written(spec.summary),
        description=written(spec.description),
        exit_condition=written(spec.exit_condition),
    )


def _written(text: str, threshold: Threshold | None) -> str:
    if threshold is None:
        return text
    text = text.replace("$threshold%", f"{threshold.threshold * 100:g} %")
    text = text.replace("$threshold", f"{threshold.threshold:g}")
    return text if threshold.minimum is None else text.replace("$minimum", f"{threshold.minimum:g}")


_QUANTILE = re.compile(r"\$quantile\((?P<q>[0-9.]+), (?P<family>\w+)(?:, (?P<matcher>[^)]*))?\)")


def _expanded(expr: str) -> str:
    """`$quantile(q, family, matcher)` in full: of classic and native histograms, absent without observations."""
    return _QUANTILE.sub(lambda match: quantile(match["q"], match["family"], match["matcher"] or ""), expr).strip()


def quantile(q: str, family: str, matcher: str = "", window: str = "15m") -> str:
    """PromQL of a fleet's quantile.

    `rate` before `sum`, so that a restart of one replica is a reset of its own series (EM45). A fleet may be half
    on native histograms (SL11); an idle one has no quantile rather than NaN (SL01).
    """
    classic = f"{family}_bucket{{{matcher}}}" if matcher else f"{family}_bucket"
    native = f"{family}{{{matcher}}}" if matcher else family
    counted = f"{family}_count{{{matcher}}}" if matcher else f"{family}_count"
    return (
        "(\n"
        f"  histogram_quantile({q}, sum by (le) (rate({classic}[{window}])))\n"
        f"  and on () sum(rate({counted}[{window}])) > 0\n"
        ")\n"
        f"or histogram_quantile({q}, sum(rate({native}[{window}])))"
    )
