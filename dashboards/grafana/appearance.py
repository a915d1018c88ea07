"""How panels look: units and value mappings in Grafana's terms, places on the grid, links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prefixwatch.dashboards.definition import Dashboard, Panel, Row, Unit, shipped

COLUMNS = 24

UNITS: dict[Unit, str] = {
    "percentunit": "percentunit",
    "s": "s",
    "short": "short",
    "tokens": "count:tokens",
    "tokens/s": "count:tokens/s",
    "blocks": "count:blocks",
    "requests": "count:requests",
    "reqps": "reqps",
    "per minute": "count:/min",
    "currencyUSD": "currencyUSD",
    "currencyUSD/h": "suffix: USD/h",
    "bytes": "bytes",
    "Bps": "Bps",
    "watt": "watt",
    "factor": "suffix:×",
    "bool": "bool_yes_no",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel, its number and its place on the dashboard."""

    id: int
    panel: Panel
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class PlacedRow:
    id: int
    row: Row
    y: int
    panels: tuple[Placed, ...]


def placed(dashboard: Dashboard) -> list[PlacedRow]:
    """Rows from the top, panels from the left. Numbers are given in this order, from 1: the SDK gives none."""
    rows, y, number = [], 0, 1
    for row in dashboard.rows:
        row_id, top = number, y + 1
        panels = tuple(_flow(row, top, row_id + 1))
        number = row_id + 1 + len(panels)
        rows.append(PlacedRow(row_id, row, y, panels))
        y = top if row.collapsed else max(each.y + each.panel.height for each in panels)
    return rows


def _flow(row: Row, top: int, first_id: int) -> Iterator[Placed]:
    x, y, line = 0, top, 0
    for number, panel in enumerate(row.panels):
        if x + panel.width > COLUMNS:
            x, y, line = 0, y + line, 0
        yield Placed(first_id + number, panel, x, y)
        x, line = x + panel.width, max(line, panel.height)


@dataclass(frozen=True, slots=True)
class Link:
    title: str
    url: str


def links(panel: Panel) -> list[Link]:
    """To the runbooks of the panel's alerts, then to the dashboards that lead on, with time and variables kept."""
    alerts = dict.fromkeys([*(line.alert for line in panel.lines if line.alert), *panel.runbooks])
    onward = [shipped()[name] for name in panel.see]
    return [
        *(Link(f"Runbook: {alert}", f"${{runbooks}}/{alert}.md") for alert in alerts),
        *(Link(f"More: {one.title}", f"/d/{one.uid}?${{__url_time_range}}&${{__all_variables}}") for one in onward),
    ]


def beyond_buckets(top: float, unit: Unit) -> str:
    suffix = {"s": " s", "factor": "×", "tokens": " tokens"}.get(unit, "")
    return f"≥ {top:g}{suffix}: beyond the buckets"


METRIC_GONE = "metric gone"
"""What is shown in place of a lost metric's value."""
