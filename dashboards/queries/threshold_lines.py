"""Thresholds of panels, read from the alerts' and the SLOs' documents by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from prefixwatch.alerts.build import known_metrics
from prefixwatch.alerts.burn_rate import WORKBOOK
from prefixwatch.alerts.catalogue.model import THRESHOLDS, Catalogue, load_catalogue, read_thresholds
from prefixwatch.alerts.catalogue.model import Threshold as AlertThreshold
from prefixwatch.dashboards.definition import Line
from prefixwatch.documents import DocumentError
from prefixwatch.documents.durations import promql
from prefixwatch.slo.build import load_request_objectives, load_slos
from prefixwatch.slo.objective import Condition
from prefixwatch.slo.read import shipped_names
from prefixwatch.slo.rule_model import HistogramIndicator, SloDefinition

_COMPARISON = re.compile(r"(?:([<>])=?|==)\s*\$threshold")


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value, the side of it that is bad, and where it comes from."""

    value: float
    bad: Literal["above", "below"]
    serious: bool
    """Whether an alert uses it; an objective's line is a warning."""
    says: str


def threshold(line: Line, place: str) -> Threshold:
    """Raises DocumentError for a name that doesn't exist or has no value to draw."""
    if line.alert:
        return _of_alert(line.alert, line.bad, place)
    if line.burn:
        return _of_burn(line.burn, place)
    if line.budget:
        return Threshold(0.0, "below", True, "SloBudgetExhausted: 0 or below")
    return _of_slo(line, place)


def _of_burn(window: str, place: str) -> Threshold:
    """Of the workbook's table; an SLO of another window or a large budget is alerted on by rates of its own."""
    for factor, long_seconds, severity in WORKBOOK:
        if promql(long_seconds) == window:
            name = "SloBudgetBurnFast" if severity == "page" else "SloBudgetBurnSlow"
            return Threshold(factor, "above", severity == "page", f"{name}: {window} above {factor:g} times")
    windows = ", ".join(promql(seconds) for _, seconds, _ in WORKBOOK)
    raise DocumentError(f"{place}: lines: no burn rate of '{window}' is alerted on: there are {windows}")


def _of_alert(name: str, side: Literal["above", "below"] | None, place: str) -> Threshold:
    values = alert_thresholds()
    spec = next((one for group in catalogue().groups for one in group.alerts if one.alert == name), None)
    if spec is None or spec.expr is None or name not in values:
        raise DocumentError(f"{place}: lines: no alert '{name}' has a threshold")
    found = _COMPARISON.search(spec.expr)
    if found is None:
        raise DocumentError(f"{place}: lines: {name} doesn't compare with a threshold that can be drawn")
    own: Literal["above", "below"] = "above" if found[1] == ">" else "below"
    value, bad = values[name].threshold, side or own
    words = bad if found[1] or side else "at"
    return Threshold(value, bad, True, f"{name}: {words} {_with_unit(value, spec.description)} for {values[name].for_}")


_UNIT = re.compile(r"\$threshold(%| (?:s|USD|tokens|times)\b)")


def _with_unit(value: float, description: str) -> str:
    """The threshold as the alert's own text has it: `60 %`, `5 s`, and plain where that has no unit."""
    found = _UNIT.search(description)
    if found is None:
        return f"{value:,g}"
    return f"{value * 100:g} %" if found[1] == "%" else f"{value:,g}{found[1]}"


def _of_slo(line: Line, place: str) -> Threshold:
    slo = objectives().get(line.slo or "")
    if slo is None:
        raise DocumentError(f"{place}: lines: no SLO '{line.slo}': there are {', '.join(objectives())}")
    if line.of == "target":
        return Threshold(slo.target, "below", False, f"SLO {slo.name}: {slo.rule}")
    if isinstance(slo.indicator, HistogramIndicator):
        side: Literal["above", "below"] = "below" if slo.indicator.above else "above"
        return Threshold(slo.indicator.bound, side, False, f"SLO {slo.name}: {slo.rule}")
    conditions = _request_conditions().get(slo.name, ())
    if len(conditions) != 1 or conditions[0].op not in {"lte", "lt"}:
        raise DocumentError(f"{place}: lines: SLO {slo.name} has no single bound ({slo.rule}): use `of: target`")
    return Threshold(conditions[0].value, "above", False, f"SLO {slo.name}: {slo.rule}")


JUST_ABOVE_NONE = 1e-9
"""Drawn for a threshold of 0: Grafana gives a value that equals a step the colour above it, and 0 belongs to what is
below: not to what an alert on `> 0` fires at, and to what one on `== 0` or `<= 0` does."""


@dataclass(frozen=True, slots=True)
class Step:
    """From this value on (None: from the bottom) a panel has this colour."""

    value: float | None
    colour: Literal["green", "orange", "red", "text"]


def steps(thresholds: Sequence[Threshold]) -> list[Step]:
    """Colours by value; without a threshold nothing is good or bad. All thresholds of a panel face the same way."""
    if not thresholds:
        return [Step(None, "text")]
    by_value = {one.value: one for one in sorted(thresholds, key=lambda one: one.serious)}  # of equals the alert's
    thresholds = [replace(one, value=value or JUST_ABOVE_NONE) for value, one in by_value.items()]
    colour: dict[bool, Literal["orange", "red"]] = {True: "red", False: "orange"}
    ordered = sorted(thresholds, key=lambda one: one.value)
    if ordered[0].bad == "above":
        return [Step(None, "green"), *(Step(one.value, colour[one.serious]) for one in ordered)]
    edges = [one.value for one in ordered]
    return [Step(value, colour[one.serious]) for value, one in zip([None, *edges[:-1]], ordered, strict=True)] + [
        Step(edges[-1], "green")
    ]


@cache
def alert_thresholds() -> dict[str, AlertThreshold]:
    """The shipped ones, by alert."""
    return read_thresholds(THRESHOLDS)


@cache
def catalogue() -> Catalogue:
    return load_catalogue()


@cache
def _request_conditions() -> dict[str, tuple[Condition, ...]]:
    """What the shipped SLOs that single requests are judged by ask of one, by the SLO's name."""
    return {one.name: one.conditions for one in load_request_objectives(shipped_names())}


@cache
def objectives() -> dict[str, SloDefinition]:
    """The shipped SLOs by name."""
    return {slo.name: slo for slo in load_slos(shipped_names(), known_metrics())}
