"""A definition's panel → a builder of the grafana-foundation-sdk, kind by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_options
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.definition import Dashboard, Kind, Panel
from dashboards.lines import Step, steps, threshold
from dashboards.look import METRIC_GONE, UNITS, Placed, beyond_buckets, links
from dashboards.panel_queries import LOST, PanelQuery, description, missing_signals, queries_of, top_bound
from documents import DocumentError

DATASOURCE = options.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The variable, never a fixed uid: the dashboard works wherever it is imported (SL13)."""
SCRAPE_INTERVAL = "${scrape}"
"""The shortest step of every query: `$__rate_interval` is at least four of these (SL08)."""


_WIDE = 12
"""Columns from which a legend may be a table."""
_SOFT_MAXIMUM_RATIO = 0.1
"""An axis of shares that are all 0 would end at 10,000 %."""


def classic_panel(placed: Placed, dashboard: Dashboard) -> Any:
    """A builder with everything that the definition says. Raises DocumentError."""
    panel = placed.panel
    place = f"{dashboard.title}: {panel.title}"
    thresholds = [threshold(line, place) for line in panel.lines]
    if len({one.bad for one in thresholds}) > 1:
        raise DocumentError(f"{place}: lines: one is a floor and one a ceiling: draw them on panels of their own")
    built = _BY_KIND[panel.kind](panel)
    built.id(placed.id).title(panel.title).datasource(DATASOURCE)
    built.description(description(panel, [one.says for one in thresholds]))
    built.grid_pos(model.GridPos(h=panel.height, w=panel.width, x=placed.x, y=placed.y))
    built.unit(UNITS[panel.unit]).no_value(panel.empty)
    built.mappings(_mappings(panel)).thresholds(_thresholds(steps(thresholds)))
    built.links([_link(link.title, link.url) for link in links(panel)])
    for query in queries_of(panel, dashboard):
        built.with_target(_target(query, panel.kind))
    if panel.minimum is not None:
        built.min(panel.minimum)
    if panel.maximum is not None:
        built.max(panel.maximum)
    return built


def _target(query: PanelQuery, kind: Kind) -> Dataquery:
    instant = kind in {"table", "bargauge"}
    formats = {"table": PromQueryFormat.TABLE, "heatmap": PromQueryFormat.HEATMAP}
    built = Dataquery().expr(query.expr).legend_format(query.legend).ref_id(query.ref).datasource(DATASOURCE)
    built.format(formats.get(kind, PromQueryFormat.TIME_SERIES)).interval(SCRAPE_INTERVAL)
    return built.instant() if instant else built.range()


def _stat(panel: Panel) -> stat.Panel:
    coloured = options.BigValueColorMode.VALUE if panel.lines else options.BigValueColorMode.NONE
    built = stat.Panel().reduce_options(_last()).graph_mode(options.BigValueGraphMode.AREA).color_mode(coloured)
    named = missing_signals(panel)  # what tells of a lost metric says in its name whose it was
    return built.text_mode(options.BigValueTextMode.VALUE_AND_NAME if named else options.BigValueTextMode.AUTO)


def _timeseries(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(options.LegendPlacement.BOTTOM)
    if panel.width >= _WIDE:
        legend.display_mode(options.LegendDisplayMode.TABLE).calcs(["lastNotNull", "max"])
    else:
        legend.display_mode(options.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING)
    built = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).show_points(options.VisibilityMode.AUTO)
    built.span_nulls(False)
    if panel.lines:
        style = common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED)
        built.thresholds_style(style)
    if panel.unit == "percentunit" and panel.maximum is None:
        built.axis_soft_max(_SOFT_MAXIMUM_RATIO)
    if panel.stacked:
        built.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL)).fill_opacity(30)
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
    organised = {"excludeByName": hidden, "renameByName": names}
    nothing = model.DynamicConfigValue(id_val="noValue", value="–")
    return (
        table.Panel()
        .with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(model.DataTransformerConfig(id_val="organize", options=organised))
        .cell_height(options.TableCellHeight.SM)
        .filterable(True)
        .override_by_field_type("number", [nothing])
        .override_by_field_type("string", [nothing])
    )


def _heatmap(panel: Panel) -> heatmap.Panel:
    colours = heatmap.HeatmapColorOptions().mode(heatmap_options.HeatmapColorMode.SCHEME).scheme("Viridis").steps(32)
    return heatmap.Panel().calculate(False).color(colours)


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
    if panel.kind == "stat" and missing_signals(panel):
        found.append(model.ValueMap({str(LOST): model.ValueMappingResult(text=METRIC_GONE, index=2)}))
    top = top_bound(panel)
    if top is not None:
        result = model.ValueMappingResult(text=beyond_buckets(top, panel.unit), index=1)
        found.append(model.RangeMap(model.DashboardRangeMapOptions(from_val=top, to=top, result=result)))
    return found


def _link(title: str, url: str) -> builders.DashboardLink:
    return builders.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url)
