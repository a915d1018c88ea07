"""A dashboard of the classic model and a Prometheus → everything that the page draws."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prefixwatch.alerts.prometheus import Prometheus, QueryRefusedError
from prefixwatch.documents import DocumentError
from tests.dashboards.render.frames import Frame
from tests.dashboards.render.layout import COLUMNS, Placed, opened
from tests.dashboards.render.queries import View, Window, ask, queries, variables_of

PAGE_WIDTH = 1600
"""Pixels. A panel has room for about as many points as it is wide."""
_AT_ONCE = 4
_NOT_DRAWN = frozenset({"panels", "targets", "datasource", "gridPos", "links"})
Theme = Literal["dark", "light"]


@dataclass(frozen=True, slots=True)
class Answered:
    """A panel, and what Prometheus answered to its queries."""

    placed: Placed
    frames: list[Frame]


async def answered(
    dashboard: Mapping[str, Any], prometheus: Prometheus, window: Window, chosen: Mapping[str, str]
) -> list[Answered]:
    """Every panel with its answers, rows opened. `chosen` sets variables; the others have all their values.

    Raises DocumentError for a query that Prometheus refuses, PrometheusError when it doesn't answer.
    """
    view = View(window, {**variables_of(dashboard), **chosen})
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(placed: Placed) -> Answered:
        async with gate:
            return Answered(placed, await _frames(placed, prometheus, view))

    return list(await asyncio.gather(*(one(placed) for placed in opened(dashboard))))


async def _frames(placed: Placed, prometheus: Prometheus, view: View) -> list[Frame]:
    points = placed.place.width * PAGE_WIDTH // COLUMNS
    found: list[Frame] = []
    for query in queries(placed.panel, view, points):
        try:
            found += await ask(prometheus, query, view.window)
        except QueryRefusedError as error:
            raise DocumentError(f"panel '{placed.title}', query {query.ref_id}: {error}: {query.expr}") from error
    return found


def page_input(title: str, panels: Sequence[Answered], window: Window, theme: Theme) -> dict[str, Any]:
    """What `src/input.ts` calls Input."""
    return {
        "title": title,
        "theme": theme,
        "from": round(window.start * 1000),
        "to": round(window.end * 1000),
        "panels": [
            {
                "panel": {key: value for key, value in each.placed.panel.items() if key not in _NOT_DRAWN},
                "place": asdict(each.placed.place),
                "frames": each.frames,
            }
            for each in panels
        ],
    }
