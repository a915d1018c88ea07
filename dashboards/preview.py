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

from dashboards.asked import Asked, Shown, asked_by
from dashboards.build import RUNBOOKS
from dashboards.classic import classic
from dashboards.definition import shipped
from dashboards.look import METRIC_GONE
from dashboards.prometheus import Prometheus, QueryRefusedError, Series

_TICKS = {"percentunit": ".0%", "s": ".3s", "currencyUSD": "$.4f"}
_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:1rem;color:#1c1e21;background:#f4f5f5}
section{display:grid;grid-template-columns:repeat(24,1fr);gap:8px}
article{background:#fff;border:1px solid #d2d5da;padding:8px;min-width:0;overflow:auto}
h3{font-size:14px;margin:0}p{margin:.2rem 0;color:#4a4d52;font-size:12px}
.value{font-size:28px}.none{color:#6b3b00;padding:1rem 0}td,th{text-align:left;padding:2px 8px}
"""

Answers = Mapping[tuple[str, str], Sequence[Series]]
"""Series by panel title and query reference."""


async def preview(prometheus: Prometheus, shown: Shown, names: Sequence[str] = ()) -> dict[str, str]:
    """Texts by file name: an index, a page a dashboard, Plotly itself. Raises KeyError for an unknown dashboard."""
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
    return _html(model["title"], f"<section>{''.join(parts)}</section>")


def _panel(panel: Mapping[str, Any], answers: Answers) -> str:
    named = [
        (_legend(target["legendFormat"], series.labels), series)
        for target in panel["targets"]
        for series in answers.get((panel["title"], target["refId"]), ())
    ]
    about = html.escape(panel["description"].split("\n\n")[0])
    if not named:
        body = f'<div class="none">{html.escape(panel["fieldConfig"]["defaults"]["noValue"])}</div>'
    elif panel["type"] in {"timeseries", "heatmap"}:
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
    for step in defaults["thresholds"]["steps"][1:]:
        figure.add_hline(y=step["value"], line_dash="dash", line_color="#b00020", annotation_text=f"{step['value']:g}")
    figure.update_layout(height=panel["gridPos"]["h"] * 30, margin={"l": 40, "r": 8, "t": 8, "b": 24}, showlegend=True)
    figure.update_xaxes(type="date")
    figure.update_yaxes(range=[defaults.get("min"), defaults.get("max")], tickformat=_TICKS.get(defaults["unit"]))
    drawn: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return drawn


def _values(panel: Mapping[str, Any], named: Sequence[tuple[str, Series]]) -> str:
    """The newest value of each series."""
    texts = _texts(panel)
    if panel["type"] == "stat":
        return "".join(f'<div class="value">{texts(series)}</div><p>{html.escape(name)}</p>' for name, series in named)
    if panel["type"] == "table":
        labelled = ((" ".join(series.labels.values()), name, texts(series)) for name, series in named)
        return "".join(
            f"<div>{html.escape(where)} · {html.escape(name)}: {value}</div>" for where, name, value in labelled
        )
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{texts(series)}</td></tr>" for name, series in named)
    return f"<table>{rows}</table>"


def _texts(panel: Mapping[str, Any]) -> Any:
    defaults = panel["fieldConfig"]["defaults"]
    unit, mappings = defaults["unit"], [each["options"] for each in defaults["mappings"] if each["type"] == "value"]

    def text(series: Series) -> str:
        known = [value for _, value in series.points if not math.isnan(value)]
        if not known:
            return METRIC_GONE
        value = known[-1]
        for options in mappings:
            if f"{value:g}" in options:
                return str(options[f"{value:g}"]["text"])
        if unit == "percentunit":
            return f"{value:.1%}"
        if unit == "bool_yes_no":
            return "Yes" if value else "No"
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        name = {"short": "", "currencyUSD": "USD"}.get(unit, unit.partition(":")[2].strip() or unit)
        return html.escape(f"{number} {name}".strip())

    return text


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), pattern)


def _html(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    script = '<script src="plotly.min.js"></script>'
    page = f"<body><h1>{html.escape(title)}</h1>{body}</body>"
    return f'<!doctype html><html lang="en"><head>{head}{script}</head>{page}</html>'
