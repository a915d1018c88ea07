"""A panel's targets, as its JSON has them → the queries that Grafana would send to Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixwatch.alerts.prometheus import Prometheus
from prefixwatch.dashboards.queries.expressions import EVERYTHING, rate_interval_seconds, substituted
from prefixwatch.documents import durations
from tests.dashboards.render.frames import Frame, Query, frames

_STEPS_SECONDS = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Steps that Grafana rounds to."""


@dataclass(frozen=True, slots=True)
class Window:
    """What a dashboard looks at: seconds since 1970, and how often its Prometheus scrapes."""

    start: float
    end: float
    scrape_seconds: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class View:
    """What is chosen in the dashboard's head: the time, and what each variable stands for."""

    window: Window
    variables: Mapping[str, str]


def queries(panel: Mapping[str, Any], view: View, points: int) -> list[Query]:
    """The panel's visible targets with every variable and interval put in.

    `points`: how many the panel has room for.
    """
    targets = [each for each in panel.get("targets") or [] if each.get("expr") and not each.get("hide")]
    return [_query(target, view, points, len(targets) == 1) for target in targets]


def _query(target: Mapping[str, Any], view: View, points: int, alone: bool) -> Query:
    # A target's own shortest step takes the place of the scrape interval in `$__rate_interval`, too.
    least = substituted(_plain(target.get("interval") or ""), view.variables)
    scrape = durations.seconds(least) if least else view.window.scrape_seconds
    step = step_seconds(view.window, points, scrape)
    return Query(
        ref_id=target["refId"],
        expr=substituted(_plain(target["expr"]), {**view.variables, **_intervals(step, scrape, view.window)}),
        instant=bool(target.get("instant")) and not target.get("range"),
        form=target.get("format") or "time_series",
        legend=target.get("legendFormat") or "",
        step_seconds=step,
        alone=alone,
    )


def step_seconds(window: Window, points: int, least: float) -> float:
    """The distance of points: the window over their number, rounded up to a usual step, and `least` or more."""
    raw = max(window.seconds / max(points, 1), least)
    return float(next((step for step in _STEPS_SECONDS if step >= raw), math.ceil(raw)))


def variables_of(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """What each variable stands for when the dashboard is opened; the data source is the one that is asked."""
    listed = dashboard["templating"]["list"]
    return {variable["name"]: _chosen(variable) for variable in listed if variable["type"] != "datasource"}


def _chosen(variable: Mapping[str, Any]) -> str:
    if variable["type"] == "query":
        return str(variable.get("allValue") or EVERYTHING)
    current = (variable.get("current") or {}).get("value")
    return str(current if current is not None else variable.get("query", ""))


def _intervals(step: float, scrape: float, window: Window) -> dict[str, str]:
    return {
        "__rate_interval": f"{rate_interval_seconds(step, scrape):g}s",
        "__interval": f"{step:g}s",
        "__range": f"{window.seconds:.0f}s",
    }


_BRACED = re.compile(r"\$\{(\w+)(?::\w+)?\}")


def _plain(text: str) -> str:
    """`${name}` as `$name`."""
    return _BRACED.sub(r"$\1", text)


async def ask(prometheus: Prometheus, query: Query, window: Window) -> list[Frame]:
    """The answer as frames. Raises PrometheusError, QueryRefusedError."""
    if query.instant:
        return frames(query, await prometheus.instant(query.expr, window.end))
    # Grafana aligns a range to the step, so that a refresh shows the same points.
    start, end = (math.floor(at / query.step_seconds) * query.step_seconds for at in (window.start, window.end))
    return frames(query, await prometheus.range(query.expr, start, end, query.step_seconds))
