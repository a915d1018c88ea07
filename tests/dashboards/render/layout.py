"""Where a dashboard's panels stand, and what is wrong with it: a grid of 24 columns, rows opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Place:
    """A panel's rectangle in grid cells; y counts from the top of the dashboard."""

    x: int
    y: int
    width: int
    height: int

    def overlaps(self, other: Place) -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel of the classic model, or the heading of a row."""

    panel: Mapping[str, Any]
    place: Place

    @property
    def title(self) -> str:
        return str(self.panel.get("title", ""))

    @property
    def is_row(self) -> bool:
        return self.panel.get("type") == "row"


def opened(dashboard: Mapping[str, Any]) -> list[Placed]:
    """Every panel with all rows open, as after a click on each collapsed one: it pushes down what is below it."""
    found: list[Placed] = []
    pushed = 0
    for panel in dashboard.get("panels", []):
        own = _place(panel, pushed)
        found.append(Placed(panel, own))
        inner = panel.get("panels") or []
        if not inner:
            continue
        # A collapsed row keeps its panels' places from when it was last open, so their top is moved under it.
        shift = own.y + own.height - min(_place(each, 0).y for each in inner)
        placed = [Placed(each, _place(each, shift)) for each in inner]
        found += placed
        pushed += max(each.place.y + each.place.height for each in placed) - own.y - own.height
    return found


def defects(placed: Sequence[Placed]) -> list[str]:
    """Panels without a height or width, out of the grid, or on top of each other; empty when all is well."""
    return [*_misshapen(placed), *_overlapping(placed)]


def _misshapen(placed: Iterable[Placed]) -> list[str]:
    found: list[str] = []
    for each in placed:
        place = each.place
        if place.height <= 0 or place.width <= 0:
            found.append(f"'{each.title}' is {place.width} wide and {place.height} high")
        if place.x < 0 or place.x + place.width > COLUMNS:
            found.append(f"'{each.title}' reaches from column {place.x} to {place.x + place.width} of {COLUMNS}")
    return found


def _overlapping(placed: Iterable[Placed]) -> list[str]:
    return [
        f"'{one.title}' and '{other.title}' overlap"
        for one, other in combinations(placed, 2)
        if one.place.overlaps(other.place)
    ]


def _place(panel: Mapping[str, Any], pushed: int) -> Place:
    grid = panel.get("gridPos") or {}
    return Place(grid.get("x", 0), grid.get("y", 0) + pushed, grid.get("w", 0), grid.get("h", 0))
