"""A definition's panel → a builder of the grafana-foundation-sdk, kind by kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_options
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from prefixwatch.dashboards.definition import Dashboard, Kind, Panel, Unit
from prefixwatch.dashboards.grafana.appearance import METRIC_GONE, UNITS, Placed, beyond_buckets, links
from prefixwatch.dashboards.queries.panel_queries import PanelQuery, description, queries_of, top_bound
from prefixwatch.dashboards.queries.threshold_lines import Step, Threshold, steps, threshold
from prefixwatch.documents import DocumentError

DATASOURCE = options.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The variable, never a fixed uid: the dashboard works wherever it is imported (SL13)."""
SCRAPE_INTERVAL = "${scrape}"
"""The shortest step of every query: `$__rate_interval` is at least four of these (SL08)."""


_WIDE = 12
"""Columns from which a legend may be a table."""
_SOFT_MAXIMUM_RATIO = 0.1
"""An axis of shares that are all 0 would end at 10,000 %."""
_SOFT_MAXIMUM_COUNT = 1.0
"""An axis of counts that are all 0 would end at 100, and no single event be seen to come."""
_COUNTS: frozenset[Unit] = frozenset({"short", "requests"})
_LABEL_WIDTH, _YES_NO_WIDTH, _LEAST_WIDTH = 140, 90, 80
"""Pixels of a table's columns of labels after its first, of one that says yes or no, and of any other at least:
Grafana's own least is 150, with which the last columns of a narrow table can't be seen."""


_RANGE = "${__url_time_range}"
_LEADS_TO = {
    "target": f"/d/prefixwatch-affinity?var-worker=${{__value.raw}}&{_RANGE}",
    "model": f"/d/prefixwatch-overview?var-model=${{__value.raw}}&{_RANGE}",
    "tenant": f"/d/prefixwatch-tenants?var-tenant=${{__value.raw}}&{_RANGE}",
    "slo": f"/d/prefixwatch-slo?{_RANGE}",
    "alertname": "${runbooks}/${__value.raw}.md",
}
"""Where a cell of a table's column leads."""


def classic_panel(placed: Placed, dashboard: Dashboard) -> Any:
    """A builder with everything that the definition says. Raises DocumentError."""
    panel = placed.panel
    place = f"{dashboard.title}: {panel.title}"
    thresholds = [threshold(line, place) for line in panel.lines]
    if len({one.bad for one in thresholds}) > 1:
        raise DocumentError(f"{place}: lines: one is a floor and one a ceiling: draw them on panels of their own")
    built = _BY_KIND[panel.kind](panel)
    if panel.kind == "timeseries":
        _axis(built, panel, thresholds)
    built.id(placed.id).title(panel.title).datasource(DATASOURCE)
    built.description(description(panel, [one.says for one in thresholds]))
    built.grid_pos(model.GridPos(h=panel.height, w=panel.width, x=placed.x, y=placed.y))
    built.unit(UNITS[panel.unit]).no_value(panel.empty)
    built.mappings(_mappings(panel)).thresholds(_thresholds(steps(thresholds)))
    built.links([_link(link.title, link.url) for link in links(panel)])
    for query in queries_of(panel, dashboard):
        built.with_target(_target(query, panel))
    _own_units(built, panel)
    if panel.minimum is not None:
        built.min(panel.minimum)
    if panel.maximum is not None:
        built.max(panel.maximum)
    return built


def _own_units(built: Any, panel: Panel) -> None:
    """A time series has an axis for each unit. A table's columns go by their names, as merged frames have no query; a
    heatmap has the unit at its axis."""
    if panel.kind == "heatmap":
        return
    for number, query in enumerate(panel.queries):
        if query.unit is not None:
            unit = [model.DynamicConfigValue(id_val="unit", value=UNITS[query.unit])]
            if panel.maximum is not None and panel.kind == "timeseries":
                unit.append(model.DynamicConfigValue(id_val="max"))  # the panel's is of its own unit
            if query.unit == "percentunit" and panel.kind == "timeseries":
                unit.append(model.DynamicConfigValue(id_val="custom.axisSoftMax", value=_SOFT_MAXIMUM_RATIO))
            if panel.kind == "table":
                built.override_by_name(query.legend, unit)
            else:
                built.override_by_query(chr(ord("A") + number), unit)


def _axis(built: Any, panel: Panel, thresholds: Sequence[Threshold]) -> None:
    """Ends of the value axis where the values themselves set none that can be read."""
    if panel.unit == "percentunit" and panel.maximum is None:
        built.axis_soft_max(_SOFT_MAXIMUM_RATIO)
    if any(one.value == 0 for one in thresholds):
        built.axis_soft_min(0)  # a line outside the axis is drawn over the times below it
        if panel.unit in _COUNTS:
            built.axis_soft_max(_SOFT_MAXIMUM_COUNT)


def _target(query: PanelQuery, panel: Panel) -> Dataquery:
    """At one moment where nothing is drawn over time."""
    kind = panel.kind
    instant = kind in {"table", "bargauge"}
    formats = {"table": PromQueryFormat.TABLE, "heatmap": PromQueryFormat.HEATMAP}
    built = Dataquery().expr(query.expr).legend_format(query.legend).ref_id(query.ref).datasource(DATASOURCE)
    built.format(formats.get(kind, PromQueryFormat.TIME_SERIES)).interval(SCRAPE_INTERVAL)
    return built.instant() if instant else built.range()


def _stat(panel: Panel) -> stat.Panel:
    coloured = options.BigValueColorMode.VALUE if panel.lines else options.BigValueColorMode.NONE
    built = stat.Panel().reduce_options(_last()).graph_mode(options.BigValueGraphMode.AREA).color_mode(coloured)
    return built.text_mode(options.BigValueTextMode.AUTO)


def _timeseries(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True)
    if panel.width >= _WIDE:
        legend.display_mode(options.LegendDisplayMode.TABLE).calcs(["lastNotNull", "max"])
        legend.placement(options.LegendPlacement.RIGHT)  # below, it would leave a few lines to the curves
    else:
        legend.display_mode(options.LegendDisplayMode.LIST).placement(options.LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING)
    built = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).show_points(options.VisibilityMode.AUTO)
    built.span_nulls(False)
    if panel.lines:
        style = common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED)
        built.thresholds_style(style)
    if panel.stacked:  # without lines: that of a layer of nothing would lie on the one below and look like its own
        built.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL)).fill_opacity(60).line_width(0)
        built.min(0)  # an area that doesn't begin at 0 shows no share
    if panel.logarithmic:
        scale = common.ScaleDistributionConfig().type(options.ScaleDistribution.LOG).log(10)
        built.scale_distribution(scale)
    return built


def _bargauge(panel: Panel) -> bargauge.Panel:
    built = bargauge.Panel().reduce_options(_last()).display_mode(options.BarGaugeDisplayMode.BASIC)
    return built.orientation(options.VizOrientation.HORIZONTAL)


def _table(panel: Panel) -> table.Panel:
    """A row for each set of labels, a column for each query."""
    values = ["Value", *(f"Value #{chr(ord('A') + number)}" for number in range(len(panel.queries)))]
    names = dict(zip(values[1:], (query.legend for query in panel.queries), strict=True))
    if len(panel.queries) == 1:
        names["Value"] = panel.queries[0].legend
    hidden = {"Time": True, "Value": True} if panel.labels_only else {"Time": True}
    places = {name: place for place, name in enumerate([*_labels(panel), *values])}
    organised = {"excludeByName": hidden, "renameByName": names, "indexByName": places}
    nothing = model.DynamicConfigValue(id_val="noValue", value="–")
    least = model.DynamicConfigValue(id_val="custom.minWidth", value=_LEAST_WIDTH)
    built = table.Panel()
    if panel.sort is not None:
        order = common.TableSortByFieldState().display_name(panel.sort.column).desc(panel.sort.descending)
        built.sort_by([order])
    narrow = dict.fromkeys(_labels(panel)[1:], _LABEL_WIDTH)
    if panel.unit == "bool" and not panel.labels_only:
        narrow |= dict.fromkeys((query.legend for query in panel.queries), _YES_NO_WIDTH)
    for name in _labels(panel):
        if name in _LEADS_TO:
            link = {"title": f"More on this {name}", "url": _LEADS_TO[name]}
            built.override_by_name(name, [model.DynamicConfigValue(id_val="links", value=[link])])
    for name, width in narrow.items():  # the first column takes what these leave: long names are cut off otherwise
        built.override_by_name(name, [model.DynamicConfigValue(id_val="custom.width", value=width)])
    return (
        built.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(model.DataTransformerConfig(id_val="organize", options=organised))
        .cell_height(options.TableCellHeight.SM)
        .filterable(True)
        .override_by_field_type("number", [nothing, least])
        .override_by_field_type("string", [nothing, least])
    )


def _labels(panel: Panel) -> list[str]:
    """Of a table's rows, in the order in which its query names them."""
    by = re.search(r"\bby \(([^)]*)\)", panel.queries[0].expr)
    return [label.strip() for label in by[1].split(",")] if by else []


def _heatmap(panel: Panel) -> heatmap.Panel:
    axis = heatmap.YAxisConfig().unit(UNITS[panel.queries[0].unit or panel.unit])
    colours = heatmap.HeatmapColorOptions().mode(heatmap_options.HeatmapColorMode.SCHEME).scheme("Viridis").steps(32)
    return heatmap.Panel().calculate(False).color(colours).y_axis(axis)


_BY_KIND: Mapping[Kind, Callable[[Panel], Any]] = {
    "stat": _stat,
    "timeseries": _timeseries,
    "bargauge": _bargauge,
    "table": _table,
    "heatmap": _heatmap,
}


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _thresholds(found: list[Step]) -> builders.ThresholdsConfig:
    built = builders.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE)
    return built.steps([model.Threshold(value=step.value, color=step.colour) for step in found])


def _mappings(panel: Panel) -> list[model.ValueMapping]:
    """What a number that is no number means: a lost metric, or a quantile beyond the buckets."""
    gone = model.DashboardSpecialValueMapOptions(
        match=model.SpecialValueMatch.NA_N, result=model.ValueMappingResult(text=METRIC_GONE, index=0)
    )
    found: list[model.ValueMapping] = [model.SpecialValueMap(gone)]
    top = top_bound(panel)
    if top is not None:
        result = model.ValueMappingResult(text=beyond_buckets(top, panel.unit), index=1)
        found.append(model.RangeMap(model.DashboardRangeMapOptions(from_val=top, to=top, result=result)))
    return found


def _link(title: str, url: str) -> builders.DashboardLink:
    return builders.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url)
