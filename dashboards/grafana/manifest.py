"""The classic dashboard → the v2 manifest (`dashboard.grafana.app/v2beta1`), element by element.

Options and field settings of a panel are the same in both; the frame around them isn't. Everything passes through the
SDK's v2 models, which know the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboardv2beta1 as v2

from prefixwatch.dashboards.definition import Dashboard
from prefixwatch.dashboards.grafana.classic import variables_of

API_VERSION = "dashboard.grafana.app/v2beta1"
_DATASOURCE = v2.Dashboardv2beta1DataQueryKindDatasource(name="${datasource}")
_ALL = v2.VariableOption(selected=True, text=["All"], value=["$__all"])


def manifest(dashboard: Dashboard, classic: dict[str, Any]) -> dict[str, Any]:
    """The same dashboard as a resource; `classic` is what `dashboards.grafana.classic` made of the definition."""
    spec = v2.Dashboard(
        title=classic["title"],
        description=classic["description"],
        tags=classic["tags"],
        editable=True,
        cursor_sync=v2.DashboardCursorSync.CROSSHAIR,
        time_settings=v2.TimeSettingsSpec(
            timezone="browser",
            from_val=classic["time"]["from"],
            to=classic["time"]["to"],
            auto_refresh=classic["refresh"],
            auto_refresh_intervals=["5s", "15s", "30s", "1m", "5m"],
        ),
        annotations=[_annotation(each) for each in classic["annotations"]["list"]],
        links=[v2.DashboardLink.from_json(each) for each in classic["links"]],
        variables=list(_variables(dashboard, classic)),
        elements={_name(panel): _element(panel) for _, panel in _panels(classic)},
        layout=_layout(classic),
    )
    return {
        "apiVersion": API_VERSION,
        "kind": "Dashboard",
        "metadata": {"name": dashboard.uid},
        "spec": json.loads(json.dumps(spec, cls=JSONEncoder)),
    }


def _panels(classic: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each panel with the row that it belongs to."""
    row: dict[str, Any] = {}
    for panel in classic["panels"]:
        if panel["type"] != "row":
            yield row, panel
            continue
        row = panel
        for inner in panel.get("panels", ()):
            yield row, inner


def _name(panel: dict[str, Any]) -> str:
    return f"panel-{panel['id']}"


def _element(panel: dict[str, Any]) -> v2.PanelKind:
    data = v2.QueryGroupSpec(
        queries=[_query(target) for target in panel["targets"]],
        transformations=[
            v2.TransformationKind(kind=each["id"], spec=v2.DataTransformerConfig.from_json(each))
            for each in panel.get("transformations", ())
        ],
        query_options=v2.QueryOptionsSpec(),
    )
    look = v2.VizConfigSpec(options=panel["options"], field_config=v2.FieldConfigSource.from_json(panel["fieldConfig"]))
    return v2.PanelKind(
        v2.PanelSpec(
            id_val=panel["id"],
            title=panel["title"],
            description=panel["description"],
            links=[v2.DataLink(title=link["title"], url=link["url"]) for link in panel["links"]],
            data=v2.QueryGroupKind(data),
            viz_config=v2.VizConfigKind(group=panel["type"], version="", spec=look),
        )
    )


def _query(target: dict[str, Any]) -> v2.PanelQueryKind:
    spec = {key: value for key, value in target.items() if key not in {"refId", "datasource"}}
    query = v2.DataQueryKind(group="prometheus", version="v0", datasource=_DATASOURCE, spec=spec)
    return v2.PanelQueryKind(v2.PanelQuerySpec(query=query, ref_id=target["refId"], hidden=False))


def _layout(classic: dict[str, Any]) -> v2.RowsLayoutKind:
    rows = [panel for panel in classic["panels"] if panel["type"] == "row"]
    return v2.RowsLayoutKind(v2.RowsLayoutSpec([_row(row, classic) for row in rows]))


def _row(row: dict[str, Any], classic: dict[str, Any]) -> v2.RowsLayoutRowKind:
    """Places count from the row's own first line."""
    items = []
    for owner, panel in _panels(classic):
        if owner is row:
            place = panel["gridPos"]
            item = v2.GridLayoutItemSpec(
                x=place["x"],
                y=place["y"] - row["gridPos"]["y"] - 1,
                width=place["w"],
                height=place["h"],
                element=v2.ElementReference(_name(panel)),
            )
            items.append(v2.GridLayoutItemKind(item))
    grid = v2.GridLayoutKind(v2.GridLayoutSpec(items))
    return v2.RowsLayoutRowKind(v2.RowsLayoutRowSpec(title=row["title"], collapse=row["collapsed"], layout=grid))


def _annotation(each: dict[str, Any]) -> v2.AnnotationQueryKind:
    kept = ("expr", "titleFormat", "textFormat", "tagKeys")
    spec = {key: each[key] for key in kept}
    query = v2.DataQueryKind(group="prometheus", version="v0", datasource=_DATASOURCE, spec=spec)
    return v2.AnnotationQueryKind(
        v2.AnnotationQuerySpec(query=query, enable=True, icon_color=each["iconColor"], name=each["name"])
    )


def _variables(dashboard: Dashboard, classic: dict[str, Any]) -> Iterator[Any]:
    plain = {each["name"]: each for each in classic["templating"]["list"]}
    yield v2.DatasourceVariableKind(
        v2.DatasourceVariableSpec(
            name="datasource",
            label=plain["datasource"]["label"],
            plugin_id="prometheus",
            refresh=v2.VariableRefresh.ON_DASHBOARD_LOAD,
            hide=v2.VariableHide.DONT_HIDE,
        )
    )
    for variable in variables_of(dashboard):
        spec = plain[variable.name]["query"]
        yield v2.QueryVariableKind(
            v2.QueryVariableSpec(
                name=variable.name,
                label=variable.label,
                current=_ALL,
                hide=v2.VariableHide.DONT_HIDE,
                refresh=v2.VariableRefresh.ON_TIME_RANGE_CHANGED,
                query=v2.DataQueryKind(group="prometheus", version="v0", datasource=_DATASOURCE, spec=spec),
                sort=v2.VariableSort.ALPHABETICAL_ASC,
                definition=variable.query,
                multi=True,
                include_all=True,
                all_value=plain[variable.name]["allValue"],
            )
        )
    yield v2.CustomVariableKind(
        v2.CustomVariableSpec(
            name="scrape",
            label=plain["scrape"]["label"],
            query=plain["scrape"]["query"],
            current=v2.VariableOption.from_json(plain["scrape"]["current"]),
            options=[v2.VariableOption.from_json(each) for each in plain["scrape"]["options"]],
            hide=v2.VariableHide.DONT_HIDE,
        )
    )
    yield v2.ConstantVariableKind(
        v2.ConstantVariableSpec(
            name="runbooks", query=plain["runbooks"]["query"], hide=v2.VariableHide.HIDE_VARIABLE, skip_url_sync=False
        )
    )
