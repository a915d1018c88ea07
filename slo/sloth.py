"""SLOs as a specification of Sloth (version prometheus/v1), for fleets that generate their rules with it.

https://github.com/slok/sloth: events by an error query and a total query, `{{.window}}` for its windows. Sloth has no
minimum number of events and averages ratios over long windows; what its format can't express is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from prefixwatch.documents.durations import promql
from prefixwatch.documents.errors import InputError
from prefixwatch.slo.buckets import le_matcher
from prefixwatch.slo.rule_model import HistogramIndicator, RatioIndicator, SloDefinition

_WINDOW = "[{{.window}}]"
_PERIODS = {30 * 86_400: "", 28 * 86_400: "-28d"}
"""The periods that Sloth has windows for, and what the file's name ends with."""
_NAME = re.compile(r"[A-Za-z0-9][-_.A-Za-z0-9]*[A-Za-z0-9]")
"""Names that Sloth accepts for a service or an SLO: at least two characters."""


def specifications(slos: Iterable[SloDefinition]) -> dict[str, dict[str, Any]]:
    """A specification for each service and period, by file name without extension. Raises InputError."""
    found: dict[str, dict[str, Any]] = {}
    for slo in slos:
        empty: dict[str, Any] = {"version": "prometheus/v1", "service": slo.service, "slos": []}
        entry = _slo(slo)
        found.setdefault(slo.service + _PERIODS[slo.window_seconds], empty)["slos"].append(entry)
    return found


def losses(slos: Iterable[SloDefinition]) -> list[str]:
    """What Sloth's format can't express of these SLOs, or needs on its command line."""
    found = []
    for slo in slos:
        if slo.window_seconds == 28 * 86_400:
            found.append(f"{slo.name}: its period is 28d: run sloth generate --default-slo-period=28d on its file")
        if slo.conditions:
            found.append(f"{slo.name}: Sloth has its own burn rates: those of the alertPolicies are left out")
        if slo.zero_tolerance:
            found.append(f"{slo.name}: Sloth has no zero tolerance: it alerts on burn rates only")
        if slo.unknown_while:
            found.append(f"{slo.name}: Sloth also counts events while {', '.join(slo.unknown_while)} is set")
    return found


def _slo(slo: SloDefinition) -> dict[str, Any]:
    if slo.slices is not None:
        raise InputError(f"{slo.place}: {slo.name} counts time slices; Sloth's format has only events: leave it out")
    if slo.calendar is not None:
        raise InputError(f"{slo.place}: {slo.name} has a calendar window, and Sloth's are rolling: leave it out")
    if slo.window_seconds not in _PERIODS:
        text = (
            f"{slo.place}: {slo.name} has a period of {promql(slo.window_seconds)}, and Sloth has windows for 30d and"
        )
        raise InputError(f"{text} 28d: use one of them")
    name = slo.name.replace("/", "-")
    for what, given in (("a service", slo.service), ("an SLO", name)):
        if not _NAME.fullmatch(given):
            text = f"{slo.place}: Sloth can't have {what} named {given!r}: use two or more letters, digits, - _ ."
            raise InputError(text)
    error, total = _queries(slo)
    return {
        "name": name,
        "objective": round(slo.target * 100, 9),
        "description": f"{slo.description} ({slo.rule})".strip(),
        "sli": {"events": {"error_query": error, "total_query": total}},
        "alerting": {
            "name": "SloBudgetBurn",
            "labels": {"slo": slo.name},
            "annotations": {"summary": f"{slo.title}: the error budget burns too fast"},
            "page_alert": {"labels": {"severity": "page"}},
            "ticket_alert": {"labels": {"severity": "ticket"}},
        },
    }


def _queries(slo: SloDefinition) -> tuple[str, str]:
    """Bad and all events per second. A counter that doesn't exist before its first event is 0."""
    match slo.indicator:
        case RatioIndicator(total=total, bad=bad) if bad is not None:
            whole = f"sum(rate({total}{_WINDOW}))"
            return f"(sum(rate({bad}{_WINDOW})) or 0 * {whole})", whole
        case RatioIndicator(total=total, good=good):
            whole = f"sum(rate({total}{_WINDOW}))"
            return f"({whole} - (sum(rate({good}{_WINDOW})) or 0 * {whole}))", whole
        case HistogramIndicator(histogram=histogram, bound=bound, above=above):
            whole = f"sum(rate({histogram.with_suffix('_count')}{_WINDOW}))"
            within = f"sum(rate({histogram.with_suffix('_bucket', le_matcher(bound))}{_WINDOW}))"
            return (within if above else f"({whole} - {within})"), whole
    raise InputError(f"{slo.place}: {slo.name} compares values; Sloth's format has only events: leave it out")
