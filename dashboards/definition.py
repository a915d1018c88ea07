"""Dashboards as data: `definitions/*.yaml` → models.

A panel answers one question. What every panel needs anyhow (filters by the dashboard's variables, the metrics' names
in the description, thresholds' values, links to runbooks) isn't written there but added when it is built.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from prefixwatch.documents import DocumentError, load
from prefixwatch.documents.section import Section

FOLDER = Path(__file__).parent / "definitions"
ORDER = (
    "overview",
    "slo-budgets",
    "prefix-cache",
    "router-affinity",
    "cold-prefill",
    "topology-transfer",
    "coupled-optimisations",
    "tenants-isolation",
    "exporter-health",
)
"""In the order of a diagnosis."""

EVERYWHERE = ("cluster", "job", "model")
"""Variables of every dashboard."""

Kind = Literal["stat", "timeseries", "bargauge", "table", "heatmap"]
Unit = Literal[
    "percentunit", "s", "short", "tokens", "blocks", "requests", "reqps", "tokens/s", "per minute", "currencyUSD",
    "currencyUSD/h", "bytes", "Bps", "watt", "factor", "bool",
]  # fmt: skip


class Query(Section):
    """One PromQL query of a panel, with the macros of `dashboards.queries.expressions` and without any filter."""

    expr: str = Field(min_length=1)
    legend: str = Field(description="the series' name, e.g. {{target}}; of a table the column's")
    unit: Unit | None = Field(default=None, description="where it isn't the panel's")


class Line(Section):
    """A threshold, named and never restated: of an alert, of an SLO, of a burn rate, or of an error budget."""

    alert: str | None = Field(default=None, description="an alert of alerts/thresholds.yaml")
    bad: Literal["above", "below"] | None = Field(
        default=None, description="the alert's bad side here, where the panel counts what the alert looks at one by one"
    )
    slo: str | None = Field(default=None, description="a shipped SLO")
    of: Literal["bound", "target"] = Field(default="bound", description="the SLO's threshold, or its target")
    burn: str | None = Field(default=None, description="the long window of a burn rate that is alerted on, e.g. 1h")
    budget: Literal["gone"] | None = Field(default=None, description="where nothing of an error budget is left")

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if sum(name is not None for name in (self.alert, self.slo, self.burn, self.budget)) != 1:
            raise ValueError("give one of alert, slo, burn and budget")
        return self


class Sorted(Section):
    """The column that a table is sorted by at first."""

    column: str
    descending: bool = False


class Panel(Section):
    title: str = Field(min_length=1, description="a question or a quantity")
    kind: Kind
    about: str = Field(min_length=1, description="the definition of what is shown, and how to read it")
    unit: Unit
    queries: list[Query] = Field(min_length=1)
    empty: str = Field(min_length=1, description="what it means when there is nothing to show")
    lines: list[Line] = Field(default=[], description="thresholds, by name")
    runbooks: list[str] = Field(default=[], description="alerts whose pages lead on, beside those of `lines`")
    see: list[str] = Field(default=[], description="dashboards that lead on")
    width: int = Field(default=12, ge=3, le=24, description="of 24 columns")
    height: int = Field(default=8, ge=3, le=20)
    minimum: float | None = Field(default=None, alias="min")
    maximum: float | None = Field(default=None, alias="max")
    stacked: bool = False
    sort: Sorted | None = Field(default=None, description="of a table; the answer to its question comes first")
    labels_only: bool = Field(default=False, description="whether a table leaves its value out, which is always 1")
    logarithmic: bool = Field(default=False, description="whether the value axis is")


class Row(Section):
    title: str
    collapsed: bool = Field(default=False, description="for what only some fleets have")
    panels: list[Panel] = Field(min_length=1)


class Dashboard(Section):
    uid: str = Field(pattern=r"^prefixwatch-[a-z-]+$", description="what alerts link to")
    title: str
    about: str
    groups: list[str] = Field(default=[], description="groups of alerts that are marked in its panels")
    variables: list[Literal["worker", "tenant"]] = Field(default=[], description="besides those of every dashboard")
    rows: list[Row] = Field(min_length=1)

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


@cache
def shipped() -> dict[str, Dashboard]:
    """The dashboards of `definitions/` by file name, in the order of a diagnosis. Raises DocumentError."""
    found = {name: load(FOLDER / f"{name}.yaml", Dashboard) for name in ORDER}
    for name, dashboard in found.items():
        for panel in dashboard.panels:
            for other in panel.see:
                if other not in found:
                    raise DocumentError(f"{FOLDER / name}.yaml: {panel.title}: see: there is no dashboard '{other}'")
    return found
