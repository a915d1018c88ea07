"""Panels drawn from a Prometheus' answers as plain pages: a look at the dashboards where there is no Grafana.

Titles, units, thresholds and texts are those of the JSON; the drawing is Plotly's and not Grafana's.
"""

from __future__ import annotations

import asyncio
import html
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from prefixwatch.alerts.prometheus import Prometheus, QueryRefusedError, Series
from prefixwatch.dashboards.build import RUNBOOKS
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.grafana.appearance import METRIC_GONE
from prefixwatch.dashboards.grafana.classic import classic
from prefixwatch.dashboards.queries.inventory import Asked, Shown, asked_by

_TICKS = {"percentunit": ".0%", "currencyUSD": "$~g", "s": "~s"}
_LONG = ((2 * 86_400, 86_400, "d"), (2 * 3_600, 3_600, "h"), (2 * 60, 60, "min"), (1, 1, "s"))
"""From this many seconds on a duration is written in units of this many, with this name; below in ms."""
_COLOURS = {"red": "#a8380b", "orange": "#8a5a00", "green": "#006b4c", "text": "inherit"}
"""Dark enough to be read on white."""
_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:1rem;color:#1c1e21;background:#f4f5f5}
section{display:grid;grid-template-columns:repeat(24,1fr);gap:8px}
article{background:#fff;border:1px solid #d2d5da;padding:8px;min-width:0;overflow:auto}
h3{font-size:14px;margin:0}p{margin:.2rem 0;color:#4a4d52;font-size:12px}
.value{font-size:28px}.none{color:#6b3b00;padding:1rem 0}
td,th{text-align:left;padding:2px 8px}td.number{font-variant-numeric:tabular-nums}
"""

Answers = Mapping[tuple[str, str], Sequence[Series]]
"""Series by panel title and query reference."""


async def preview(prometheus: Prometheus, shown: Shown, names: Sequence[str] = ()) -> dict[str, str]:
    """Texts by file name: an index, one page per dashboard, Plotly itself. Raises KeyError for an unknown dashboard."""
    models = {name: classic(shipped()[name], RUNBOOKS) for name in names or shipped()}
    pages = {}
    for name, model in models.items():
        answers = await _answers(prometheus, shown, list(asked_by(name, model)))
        pages[f"{name}.html"] = _page(model, answers)
    entries = "".join(f'<li><a href="{name}.html">{html.escape(models[name]["title"])}</a></li>' for name in models)
    return {
        "index.html": _html("prefixwatch dashboards", f"<ul>{entries}</ul>"),
        **pages,
        "plotly.min.js": get_plotlyjs(),
    }


async def _answers(prometheus: Prometheus, shown: Shown, asked: Sequence[Asked]) -> Answers:
    now = time.time()

    async def one(query: Asked) -> Sequence[Series]:
        expr = shown.expanded(query.expr)
        try:
            if query.kind == "instant":
                return await prometheus.instant(expr, now)
            return await prometheus.range(expr, now - shown.range_seconds, now, shown.step_seconds)
        except QueryRefusedError:
            return []

    queries = [query for query in asked if query.kind != "label values"]
    found = await asyncio.gather(*(one(query) for query in queries))
    return {(query.panel, query.ref): series for query, series in zip(queries, found, strict=True)}


def _page(model: Mapping[str, Any], answers: Answers) -> str:
    parts = []
    for panel in model["panels"]:
        if panel["type"] == "row":
            inner = "".join(_panel(each, answers) for each in panel.get("panels", ()))
            parts.append(f"</section><h2>{html.escape(panel['title'])}</h2><section>{inner}")
        else:
            parts.append(_panel(panel, answers))
    above = f'<p><a href="index.html">All dashboards</a> {html.escape(model["description"])}</p>'
    return _html(model["title"], f"<section>{''.join(parts)}</section>", above)


def _panel(panel: Mapping[str, Any], answers: Answers) -> str:
    named = [
        (_legend(target["legendFormat"], series.labels), series)
        for target in panel["targets"]
        for series in answers.get((panel["title"], target["refId"]), ())
    ]
    about = html.escape(panel["description"].split("\n\n")[0])
    if not named:
        body = f'<div class="none">{html.escape(panel["fieldConfig"]["defaults"]["noValue"])}</div>'
    elif panel["type"] == "heatmap" and all("le" in series.labels for _, series in named):
        body = _heatmap(panel, named)
    elif panel["type"] in {"timeseries", "heatmap"}:  # of a native histogram its rate
        body = _lines(panel, named)
    else:
        body = _values(panel, named)
    style = f"grid-column:span {panel['gridPos']['w']}"
    return f'<article style="{style}"><h3>{html.escape(panel["title"])}</h3><p>{about}</p>{body}</article>'


def _lines(panel: Mapping[str, Any], named: Sequence[tuple[str, Series]]) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    figure = go.Figure()
    for name, series in named:
        x = [at * 1000 for at, _ in series.points]
        y = [None if math.isnan(value) else value for _, value in series.points]
        figure.add_scatter(x=x, y=y, name=name, mode="lines", stackgroup="all" if stacked else None)
    at = [round(step["value"], 6) for step in defaults["thresholds"]["steps"][1:]]  # just above 0 is 0 to a reader
    for value in at:
        figure.add_hline(y=value, line_dash="dash", line_color=_COLOURS["red"], annotation_text=f"{value:g}")
    figure.update_layout(height=panel["gridPos"]["h"] * 30, margin={"l": 40, "r": 8, "t": 8, "b": 24}, showlegend=True)
    figure.update_xaxes(type="date")
    unit = defaults["unit"]
    suffix = "s" if unit == "s" else "" if unit in _TICKS else f" {_unit_name(unit)}".rstrip()
    figure.update_yaxes(range=[defaults.get("min"), defaults.get("max")], ticksuffix=suffix)
    figure.update_yaxes(tickformat=_TICKS.get(unit, ",.6~g"))
    drawn: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return drawn


def _heatmap(panel: Mapping[str, Any], named: Sequence[tuple[str, Series]]) -> str:
    """Of a histogram's buckets, which are cumulative: what each holds beyond the one below it."""
    buckets = sorted((float(series.labels["le"]), series) for _, series in named)
    times = sorted({at for _, series in buckets for at, _ in series.points})
    below, rows = dict.fromkeys(times, 0.0), []
    for _, series in buckets:
        upto = dict(series.points)
        rows.append([max(upto.get(at, below[at]) - below[at], 0.0) for at in times])
        below = {at: upto.get(at, below[at]) for at in times}
    unit = panel["options"]["yAxis"].get("unit", "")
    names = [f"≤ {_figure(bound, unit)}" for bound, _ in buckets]
    figure = go.Figure(go.Heatmap(x=[at * 1000 for at in times], y=names, z=rows, colorscale="Viridis"))
    figure.update_layout(height=panel["gridPos"]["h"] * 30, margin={"l": 40, "r": 8, "t": 8, "b": 24})
    figure.update_xaxes(type="date")
    drawn: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return drawn


def _values(panel: Mapping[str, Any], named: Sequence[tuple[str, Series]]) -> str:
    """The newest value of each series."""
    if panel["type"] == "table":
        return _table(panel, named)
    if panel["type"] == "stat":
        return "".join(
            f'<div class="value">{_text(panel, series)}</div><p>{html.escape(name)}</p>' for name, series in named
        )
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{_text(panel, series)}</td></tr>" for name, series in named)
    return f"<table>{rows}</table>"


def _table(panel: Mapping[str, Any], named: Sequence[tuple[str, Series]]) -> str:
    """A row for each set of labels and a column for each query, in the panel's order."""
    organised = panel["transformations"][-1]["options"]
    rows: dict[tuple[tuple[str, str], ...], dict[str, Series]] = {}
    for name, series in named:
        rows.setdefault(tuple(sorted(series.labels.items())), {})[name] = series
    labels = [label for label in organised["indexByName"] if any(label in dict(key) for key in rows)]
    columns = [] if organised["excludeByName"].get("Value") else list(dict.fromkeys(name for name, _ in named))
    ordered = sorted(rows.items(), key=lambda row: _place(panel, dict(row[0]), row[1]))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (*labels, *columns))
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(dict(key).get(label, ''))}</td>" for label in labels)
        + "".join(f'<td class="number">{_text(panel, cells[c], c) if c in cells else "–"}</td>' for c in columns)
        + "</tr>"
        for key, cells in ordered
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _place(panel: Mapping[str, Any], labels: Mapping[str, str], cells: Mapping[str, Series]) -> tuple[float, str]:
    """What a row is sorted by, as the panel says: a figure, or a label."""
    for by in panel["options"].get("sortBy") or ():
        column = by["displayName"]
        if column in labels:
            return (0.0, labels[column])
        figure = _newest(cells[column]) if column in cells else None
        return (math.inf if figure is None else -figure if by["desc"] else figure, "")
    return (0.0, "")


def _newest(series: Series) -> float | None:
    return next((value for _, value in reversed(series.points) if not math.isnan(value)), None)


def _text(panel: Mapping[str, Any], series: Series, column: str = "") -> str:
    """The newest value in its unit, and in the colour of its threshold."""
    defaults, value = panel["fieldConfig"]["defaults"], _newest(series)
    if value is None:
        return METRIC_GONE
    text = html.escape(_figure(value, _own_unit(panel, column) or defaults["unit"]))
    steps = [step for step in defaults["thresholds"]["steps"] if step["value"] is None or step["value"] <= value]
    return f'<span style="color:{_COLOURS[steps[-1]["color"]]}">{text}</span>'


def _own_unit(panel: Mapping[str, Any], column: str) -> str | None:
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"] == {"id": "byName", "options": column}:
            return next((str(each["value"]) for each in override["properties"] if each["id"] == "unit"), None)
    return None


def _figure(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    if unit == "s":
        size, unit = next(((size, name) for least, size, name in _LONG if abs(value) >= least), (0.001, "ms"))
        value /= size
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {_unit_name(unit)}".strip()


def _unit_name(unit: str) -> str:
    return {"short": "", "currencyUSD": "USD"}.get(unit, unit.partition(":")[2].strip() or unit)


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), pattern)


def _html(title: str, body: str, above: str = "") -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    script = '<script src="plotly.min.js"></script>'
    page = f"<body><h1>{html.escape(title)}</h1>{above}{body}</body>"
    return f'<!doctype html><html lang="en"><head>{head}{script}</head>{page}</html>'
