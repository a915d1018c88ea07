"""The grid with all rows open, and what is wrong with one."""

from __future__ import annotations

from typing import Any

from prefixwatch.dashboards.build import RUNBOOKS
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.grafana.classic import classic
from tests.dashboards.render.layout import Place, defects, opened


def panel(title: str, x: int, y: int, w: int = 12, h: int = 8) -> dict[str, Any]:
    return {"type": "stat", "title": title, "gridPos": {"x": x, "y": y, "w": w, "h": h}}


def row(title: str, y: int, *panels: dict[str, Any]) -> dict[str, Any]:
    return {"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": list(panels)}


def places(dashboard: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {each.title: (each.place.y, each.place.height) for each in opened(dashboard)}


def test_a_collapsed_row_is_opened_and_pushes_down_what_is_below() -> None:
    dashboard = {
        "panels": [
            panel("above", 0, 0),
            row("closed", 8, panel("inside", 0, 40), panel("lower", 0, 48, h=4)),
            row("next", 9),
            panel("below", 0, 10),
        ]
    }

    assert places(dashboard) == {
        "above": (0, 8),
        "closed": (8, 1),
        "inside": (9, 8),
        "lower": (17, 4),
        "next": (21, 1),
        "below": (22, 8),
    }
    assert defects(opened(dashboard)) == []


def test_neighbours_touch_and_do_not_overlap() -> None:
    assert not Place(0, 0, 12, 8).overlaps(Place(12, 0, 12, 8))
    assert not Place(0, 0, 12, 8).overlaps(Place(0, 8, 12, 8))
    assert Place(0, 0, 12, 8).overlaps(Place(11, 7, 2, 2))


def test_every_defect_is_told_with_the_panels_it_is_about() -> None:
    dashboard = {"panels": [panel("one", 0, 0), panel("two", 6, 4), panel("flat", 0, 20, h=0), panel("wide", 20, 30)]}

    assert defects(opened(dashboard)) == [
        "'flat' is 12 wide and 0 high",
        "'wide' reaches from column 20 to 32 of 24",
        "'one' and 'two' overlap",
    ]


def test_the_shipped_dashboards_have_none() -> None:
    found = {name: defects(opened(classic(dashboard, RUNBOOKS))) for name, dashboard in shipped().items()}

    assert found == {name: [] for name in shipped()}
