"""Every query of every dashboard, run against a Prometheus: it has an answer, or `may_be_empty.yaml` says why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from prefixwatch.alerts.prometheus import Prometheus, QueryRefusedError
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.queries.expressions import metrics_of, series_labels
from prefixwatch.dashboards.queries.inventory import ANNOTATION, Asked, Shown, everything_asked
from prefixwatch.documents import DocumentError, load
from prefixwatch.documents.section import Section

MAY_BE_EMPTY = Path(__file__).parents[1] / "may_be_empty.yaml"
AT_ONCE = 4
NOTHING_FIRES = "no alert fires in a healthy fleet"
LOST_METRIC = "shows metrics that an engine lost: empty while none is"

Status = Literal["data", "listed", "early", "empty", "refused"]
"""`early`: no answer, and too little was measured yet to say whether there should be one."""


class EmptyQuery(Section):
    dashboard: str = Field(description="its file's name, or * for every dashboard")
    panel: str = Field(description="the panel's title, or 'variable' or 'annotation'")
    ref: str = Field(description="A for the first query; a variable's or annotation's name")
    reason: str = Field(min_length=1)

    def is_about(self, asked: Asked) -> bool:
        """Whether this is the reason of that query."""
        return self.dashboard in {"*", asked.dashboard} and (self.panel, self.ref) == (asked.panel, asked.ref)


class MayBeEmpty(Section):
    metrics: dict[str, str] = Field(description="series: why not every fleet has it")
    queries: list[EmptyQuery] = Field(description="queries whose answer is empty in a healthy fleet")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a query."""

    asked: Asked
    status: Status
    series: int
    why: str = ""
    """The reason it may be empty, or Prometheus' complaint."""

    @property
    def ok(self) -> bool:
        return self.status in {"data", "listed"}


@cache
def may_be_empty(path: Path = MAY_BE_EMPTY) -> MayBeEmpty:
    """Raises DocumentError, also for a name that no dashboard asks for."""
    listed = load(path, MayBeEmpty)
    asked = everything_asked()
    read = {name for one in asked for name in metrics_of(one.expr)}
    for name in listed.metrics:
        if name not in series_labels() or name not in read:
            raise DocumentError(f"{path}: metrics.{name}: no panel reads a series of this name: take it out")
    for one in listed.queries:
        if not any(map(one.is_about, asked)):
            raise DocumentError(f"{path}: queries: there is no {one.dashboard} › {one.panel} › {one.ref}: take it out")
    return listed


def reason(asked: Asked, listed: MayBeEmpty) -> str | None:
    """Why this query may have no answer; None where it must have one."""
    if asked.explains:
        return LOST_METRIC
    if asked.panel == ANNOTATION:
        return NOTHING_FIRES
    for one in listed.queries:
        if one.is_about(asked):
            return one.reason
    return next((listed.metrics[name] for name in metrics_of(asked.expr) if name in listed.metrics), None)


async def check(
    prometheus: Prometheus, shown: Shown, end: float | None = None, measured: Set[str] | None = None
) -> list[Outcome]:
    """Return the outcome of every query. `measured`: names of the series that exist; None: all that panels read.

    Raises PrometheusError when the Prometheus can't be asked, DocumentError.
    """
    listed = may_be_empty()
    now = time.time() if end is None else end
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(asked: Asked) -> Outcome:
        async with gate:
            why = _needs_more(asked, measured) or reason(asked, listed)
            return await _outcome(asked, prometheus, shown, now, why)

    return list(await asyncio.gather(*(one(asked) for asked in everything_asked())))


async def answers(
    asked: Asked, prometheus: Prometheus, shown: Shown, start: float, end: float, *, instant: bool = True
) -> int:
    """How many series, or values of a label, the query has from `start` to `end`; where it asks for an `instant`: then.

    Raises PrometheusError, QueryRefusedError.
    """
    expr = shown.expanded(asked.expr)
    if asked.kind == "label values":
        return len([value for value in await prometheus.label_values(expr, asked.label, start, end) if value])
    if asked.kind == "instant" and instant:
        found = await prometheus.instant(expr, end)
    else:
        found = await prometheus.range(expr, start, end, shown.step_seconds)
    return sum(asked.explains or series.known for series in found)


async def _outcome(asked: Asked, prometheus: Prometheus, shown: Shown, now: float, listed: str | None) -> Outcome:
    try:
        count = await answers(asked, prometheus, shown, now - shown.range_seconds, now)
    except QueryRefusedError as error:
        return Outcome(asked, "refused", 0, str(error))
    if count:
        return Outcome(asked, "data", count)
    return (
        Outcome(asked, "listed", 0, listed)
        if listed
        else Outcome(asked, "empty", 0, f"no data: {_what_it_takes(asked)}")
    )


def _needs_more(asked: Asked, measured: Set[str] | None) -> str | None:
    """What only the exporter gives of a query; None where all of it can be had without."""
    if measured is None:
        return None
    if asked.label == "job":
        return "series that rules record have no job"
    missing = sorted(set(metrics_of(asked.expr)) - measured)
    return f"needs the exporter, which gives {', '.join(missing)}" if missing else None


def _what_it_takes(asked: Asked) -> str:
    """The panel's own words for having nothing to show."""
    panels = (panel for panel in shipped()[asked.dashboard].panels if panel.title == asked.panel)
    return next((panel.empty for panel in panels), "nothing has this label")


def counted(outcomes: Sequence[Outcome]) -> Mapping[Status, int]:
    """Outcomes by status."""
    return {status: sum(one.status == status for one in outcomes) for status in get_args(Status)}
