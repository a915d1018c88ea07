"""SLOs as a specification of Sloth (version prometheus/v1), for fleets that generate their rules with it.

https://github.com/slok/sloth: events by an error query and a total query, `{{.window}}` for its windows. Sloth has no
minimum of events and averages ratios over long windows; what it can't say is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slo.buckets import le_matcher
from slo.definition import HistogramIndicator, RatioIndicator, SloDefinition

_WINDOW = "[{{.window}}]"


class SlothError(Exception):
    """An SLO that Sloth's format has no form for."""


def specifications(slos: Iterable[SloDefinition]) -> dict[str, dict[str, Any]]:
    """A specification for each service. Raises SlothError."""
    found: dict[str, dict[str, Any]] = {}
    for slo in slos:
        empty: dict[str, Any] = {"version": "prometheus/v1", "service": slo.service, "slos": []}
        found.setdefault(slo.service, empty)["slos"].append(_slo(slo))
    return found


def _slo(slo: SloDefinition) -> dict[str, Any]:
    if slo.slices is not None:
        raise SlothError(f"{slo.place}: {slo.name} counts time slices, and Sloth's format only events: leave it out")
    if slo.calendar is not None:
        raise SlothError(f"{slo.place}: {slo.name} has a calendar window, and Sloth's are rolling: leave it out")
    error, total = _queries(slo)
    return {
        "name": slo.name.replace("/", "-"),
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
    """What Sloth divides: bad and all events a second."""
    match slo.indicator:
        case RatioIndicator(total=total, bad=bad) if bad is not None:
            return f"sum(rate({bad}{_WINDOW}))", f"sum(rate({total}{_WINDOW}))"
        case RatioIndicator(total=total, good=good):
            whole = f"sum(rate({total}{_WINDOW}))"
            return f"({whole} - sum(rate({good}{_WINDOW})))", whole
        case HistogramIndicator(histogram=histogram, bound=bound, above=above):
            whole = f"sum(rate({histogram.with_suffix('_count')}{_WINDOW}))"
            within = f"sum(rate({histogram.with_suffix('_bucket', le_matcher(bound))}{_WINDOW}))"
            return (within if above else f"({whole} - {within})"), whole
    raise SlothError(f"{slo.place}: {slo.name} compares values, and Sloth's format has only events: leave it out")
