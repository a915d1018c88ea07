"""SLOs as a specification of Sloth (version prometheus/v1), for fleets that generate their rules with it.

https://github.com/slok/sloth: events by an error query and a total query, `{{.window}}` for its windows. Sloth has no
minimum of events and averages ratios over long windows; what it can't say is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from slo.buckets import le_matcher
from slo.definition import HistogramIndicator, RatioIndicator, SloDefinition
from slo.window import promql

_WINDOW = "[{{.window}}]"
_PERIODS = {30 * 86_400: "", 28 * 86_400: "-28d"}
"""The periods that Sloth has windows for, and what the file's name ends with."""
_NAME = re.compile(r"[A-Za-z0-9][-_.A-Za-z0-9]*[A-Za-z0-9]")
"""What Sloth takes for a service or an SLO: two characters at least."""


class SlothError(Exception):
    """An SLO that Sloth's format has no form for."""


def specifications(slos: Iterable[SloDefinition]) -> dict[str, dict[str, Any]]:
    """A specification for each service and period, by the file's name without ending. Raises SlothError."""
    found: dict[str, dict[str, Any]] = {}
    for slo in slos:
        empty: dict[str, Any] = {"version": "prometheus/v1", "service": slo.service, "slos": []}
        entry = _slo(slo)
        found.setdefault(slo.service + _PERIODS[slo.window_seconds], empty)["slos"].append(entry)
    return found


def losses(slos: Iterable[SloDefinition]) -> list[str]:
    """What Sloth's format can't carry of these SLOs, or must be told on its command line."""
    told = []
    for slo in slos:
        if slo.window_seconds == 28 * 86_400:
            told.append(f"{slo.name}: its period is 28d: run sloth generate --default-slo-period=28d on its file")
        if slo.conditions:
            told.append(f"{slo.name}: Sloth has its own burn rates: those of the alertPolicies are left out")
        if slo.zero_tolerance:
            told.append(f"{slo.name}: Sloth knows no zero tolerance: it alerts on burn rates only")
        if slo.unknown_while:
            told.append(f"{slo.name}: Sloth also counts while {', '.join(slo.unknown_while)} is raised")
    return told


def _slo(slo: SloDefinition) -> dict[str, Any]:
    if slo.slices is not None:
        raise SlothError(f"{slo.place}: {slo.name} counts time slices, and Sloth's format only events: leave it out")
    if slo.calendar is not None:
        raise SlothError(f"{slo.place}: {slo.name} has a calendar window, and Sloth's are rolling: leave it out")
    if slo.window_seconds not in _PERIODS:
        text = (
            f"{slo.place}: {slo.name} has a period of {promql(slo.window_seconds)}, and Sloth has windows for 30d and"
        )
        raise SlothError(f"{text} 28d: use one of them")
    name = slo.name.replace("/", "-")
    for what, given in (("a service", slo.service), ("an SLO", name)):
        if not _NAME.fullmatch(given):
            text = f"{slo.place}: Sloth can't have {what} named {given!r}: use two or more letters, digits, - _ ."
            raise SlothError(text)
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
    """What Sloth divides: bad and all events a second. A counter that doesn't exist before its first event is 0."""
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
    raise SlothError(f"{slo.place}: {slo.name} compares values, and Sloth's format has only events: leave it out")
