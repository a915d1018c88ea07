"""The shipped dashboards as Grafana gets them."""

from __future__ import annotations

from functools import cache
from typing import Any

from prefixwatch.dashboards.build import RUNBOOKS
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.grafana.classic import classic

PANELS = [(name, panel) for name, dashboard in shipped().items() for panel in dashboard.panels]


@cache
def models() -> dict[str, dict[str, Any]]:
    return {name: classic(dashboard, RUNBOOKS) for name, dashboard in shipped().items()}


def panels_of(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows left out, panels of collapsed rows included."""
    found: list[dict[str, Any]] = []
    for panel in model["panels"]:
        found += panel.get("panels", []) if panel["type"] == "row" else [panel]
    return found


def drawn(name: str, title: str) -> dict[str, Any]:
    [panel] = [panel for panel in panels_of(models()[name]) if panel["title"] == title]
    return panel
