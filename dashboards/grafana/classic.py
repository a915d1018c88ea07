"""A definition → the classic dashboard model, which every Grafana reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from prefixwatch.dashboards.definition import EVERYWHERE, Dashboard, shipped
from prefixwatch.dashboards.grafana.appearance import PlacedRow, placed
from prefixwatch.dashboards.grafana.panels import DATASOURCE, classic_panel
from prefixwatch.dashboards.queries.expressions import EVERYTHING

TAG = "prefixwatch"
REFRESH = "30s"
SCRAPE_INTERVALS = ("15s", "5s", "30s", "1m")
"""What can be chosen; the first is the one that the provisioned datasource declares."""


@dataclass(frozen=True, slots=True)
class QueryVariable:
    """A variable whose values Prometheus knows."""

    name: str
    label: str
    metric: str
    value: str
    """The metric's label that has the values."""
    within: tuple[str, ...] = ()
    """Labels that variables before it restrict."""

    @property
    def query(self) -> str:
        matchers = ", ".join(f'{label}=~"${label}"' for label in self.within)
        selector = f"{self.metric}{{{matchers}}}" if matchers else self.metric
        return f"label_values({selector}, {self.value})"


_IN_JOB = ("cluster", "job")
QUERY_VARIABLES = {
    variable.name: variable
    for variable in (
        QueryVariable("cluster", "Cluster", "prefixwatch_target_up", "cluster"),
        QueryVariable("job", "Exporter job", "prefixwatch_target_up", "job", ("cluster",)),
        QueryVariable("model", "Model", "prefixwatch_target_up", "model", _IN_JOB),
        QueryVariable("worker", "Worker", "prefixwatch_target_up", "target", _IN_JOB),
        QueryVariable("tenant", "Tenant", "prefixwatch_tenant_requests_total", "tenant", _IN_JOB),
    )
}


def annotation_queries(dashboard: Dashboard) -> dict[str, str]:
    """Alerts that fire, by the annotation's name: those of this dashboard's groups, and those that page."""
    groups = "|".join(dashboard.groups)
    return {
        "Alerts of this page": f'ALERTS{{alertstate="firing", group=~"{groups}", cluster=~"$cluster"}}',
        "Alerts that page": 'ALERTS{alertstate="firing", severity="page", group=~".+", cluster=~"$cluster"}',
    }


def title_of(dashboard: Dashboard) -> str:
    """With its place in a diagnosis, as Grafana lists dashboards by their titles."""
    place = [one.uid for one in shipped().values()].index(dashboard.uid) + 1
    return f"prefixwatch / {place} {dashboard.title}"


def variables_of(dashboard: Dashboard) -> list[QueryVariable]:
    """The query variables of a dashboard, in the order of the page."""
    return [QUERY_VARIABLES[name] for name in (*EVERYWHERE, *dashboard.variables)]


def classic(dashboard: Dashboard, runbooks: str) -> dict[str, Any]:
    """The dashboard as JSON has it. `runbooks` is where the pages are served. Raises DocumentError."""
    found: dict[str, Any] = json.loads(json.dumps(classic_model(dashboard, runbooks), cls=JSONEncoder))
    found["id"] = None
    _without_noise(found)
    return found


_NOISE = frozenset({"auto", "auto_min", "auto_count", "placement", "repeatDirection", "transparent"})
"""Defaults that the SDK writes though nothing here sets them; `placement` would even hide links in a menu."""


def _without_noise(value: Any) -> None:
    if isinstance(value, dict):
        for key in _NOISE & value.keys():
            if not isinstance(value[key], dict) and not (key == "placement" and "calcs" in value):
                del value[key]
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _without_noise(inner)


def classic_model(dashboard: Dashboard, runbooks: str) -> model.Dashboard:
    """The same as the SDK's model."""
    built = builders.Dashboard(title_of(dashboard)).uid(dashboard.uid).description(dashboard.about)
    built.tags([TAG]).editable().refresh(REFRESH).time("now-1h", "now").timezone("browser")
    built.tooltip(model.DashboardCursorSync.CROSSHAIR)
    for variable in _variables(dashboard, runbooks):
        built.with_variable(variable)
    for name, expr in annotation_queries(dashboard).items():
        built.annotation(_annotation(name, expr))
    built.link(_other_dashboards())
    for row in placed(dashboard):
        _add_row(built, row, dashboard)
    return built.build()


def _add_row(built: builders.Dashboard, row: PlacedRow, dashboard: Dashboard) -> None:
    """Panels of a collapsed row belong to the row, those of an open one follow it."""
    header = builders.Row(row.row.title).id(row.id).grid_pos(model.GridPos(h=1, w=24, x=0, y=row.y))
    panels = [classic_panel(each, dashboard) for each in row.panels]
    if row.row.collapsed:
        for panel in panels:
            header.with_panel(panel)
        built.with_row(header)
        return
    built.with_row(header)
    for panel in panels:
        built.with_panel(panel)


def _variables(dashboard: Dashboard, runbooks: str) -> Iterator[Any]:
    yield builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    for variable in variables_of(dashboard):
        yield _query_variable(variable)
    options = [
        model.VariableOption(selected=not place, text=one, value=one) for place, one in enumerate(SCRAPE_INTERVALS)
    ]
    scrape = builders.CustomVariable("scrape").label("Scrape interval").values(",".join(SCRAPE_INTERVALS))
    yield scrape.options(options).current(options[0])
    yield builders.ConstantVariable("runbooks").value(runbooks).label("Runbooks")


def _query_variable(variable: QueryVariable) -> builders.QueryVariable:
    """All values by a pattern, not by a list of today's: a restarted or renamed instance is still among them."""
    built = builders.QueryVariable(variable.name).label(variable.label).datasource(DATASOURCE)
    built.query({"qryType": 1, "query": variable.query, "refId": f"{variable.name}-values"})
    built.definition(variable.query).refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    built.sort(model.VariableSort.ALPHABETICAL_ASC).multi(True).include_all(True).all_value(EVERYTHING)
    return built.current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))


def _annotation(name: str, expr: str) -> builders.AnnotationQuery:
    built = builders.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color("red").expr(expr)
    return built.title_format("{{alertname}}").text_format("{{slo}} {{target}} {{tenant}}").tag_keys("severity,group")


def _other_dashboards() -> builders.DashboardLink:
    link = builders.DashboardLink("Other pages").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def targets(panels: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every panel of a classic dashboard with each of its targets, those of collapsed rows included."""
    for panel in panels:
        yield from targets(panel.get("panels", ()))
        for target in panel.get("targets", ()):
            yield panel, target
