"""The report's charts as plain data: a Plotly figure each, and the table that says the same without it.

A policy keeps its colour (Okabe & Ito's palette, told apart by colour-blind readers too) and its marker in every
chart; what differs within a policy differs by dash, so nothing rests on colour alone. Curves are thinned to a few
hundred points: the report of a million requests is no larger than that of a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixwatch.kvcache.cache_class import CACHE_CLASSES
from prefixwatch.loadgen.grading.figures import HOTSPOT_MIN_REQUESTS_PER_WORKER
from prefixwatch.loadgen.grading.statistics import percentile
from prefixwatch.loadgen.grading.wording import number
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.slo.objective import Floats, Objective, RequestField

Trace = dict[str, Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x", "triangle-down")
DASHES = {"hit": "solid", "partial": "dash", "miss": "dot"}
CURVE_POINTS = 200
TIME_BINS = 30
REQUESTS_PER_BIN = 40
GROUPS_SHOWN = 12
LOG_TICKS = [step * 10**power for power in range(7) for step in (1, 2, 5)]
LOG_AXIS: Mapping[str, Any] = {"type": "log", "tickvals": LOG_TICKS, "ticktext": [f"{tick:,}" for tick in LOG_TICKS]}


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, what it shows in a sentence, and its figures as a table."""

    id: str
    title: str
    description: str
    traces: list[Trace]
    layout: dict[str, Any]
    header: list[str]
    rows: list[list[str]]


def build_charts(
    columns: Mapping[str, Columns], objectives: Sequence[Objective], *, workers: int | None
) -> list[Chart]:
    """All charts that this run has data for, in the order to read them."""
    if not columns:
        return []
    thresholds = sorted({t for o in objectives for t in o.thresholds(RequestField.TTFT_SECONDS)})
    charts = [
        _ttft_distribution(columns, thresholds),
        _hit_tokens_by_group(columns),
        _balance_over_time(columns, workers),
        _ttft_over_time(columns, thresholds),
        _client_lag(columns),
    ]
    return [chart for chart in charts if chart.traces]


def _ttft_distribution(columns: Mapping[str, Columns], thresholds: Sequence[float]) -> Chart:
    traces, rows = [], []
    for place, (policy, own) in enumerate(columns.items()):
        classes = own.cache_class()
        for name in CACHE_CLASSES:
            values = np.sort(own.wait[(classes == name) & ~np.isnan(own.wait)]) * 1e3
            if not len(values):
                continue
            shares = np.linspace(0, 1, min(CURVE_POINTS, len(values)))
            x, y = rounded(np.quantile(values, shares)), rounded(shares * 100)
            traces.append(line(place, f"{policy}, {name}", x, y, dash=DASHES[name], markers=False))
            figures = [number(percentile(values, p)) for p in (50, 95, 99)]
            rows.append([policy, name, f"{len(values):,}", *figures])
    return Chart(
        id="ttft-distribution",
        title="Time to first token, by what the cache gave",
        description="Share of requests answered within a time, from the scheduled time. Solid: every reusable block "
        "was reused (hit); dashed: some (partial); dotted: none (miss). The grey line is the objective.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "TTFT, ms (logarithmic)"}, **LOG_AXIS},
            "yaxis": {"title": {"text": "requests, %"}, "range": [0, 101]},
            "shapes": [limit_line("x", t * 1e3) for t in thresholds],
        },
        header=["policy", "cache", "requests", "p50 ms", "p95 ms", "p99 ms"],
        rows=rows,
    )


def _hit_tokens_by_group(columns: Mapping[str, Columns]) -> Chart:
    """The busiest prefixes by requests, the others together."""
    names, counts = np.unique(np.concatenate([own.group for own in columns.values()]).astype(str), return_counts=True)
    shown = names[np.argsort(-counts, kind="stable")[:GROUPS_SHOWN]].tolist()
    labels = [*shown, "others"] if len(names) > len(shown) else shown
    traces, table = [], {label: [label] for label in labels}
    for place, (policy, own) in enumerate(columns.items()):
        group = np.where(np.isin(own.group, shown), own.group, "others")
        ratios = [_hit_percent(own, group == label) for label in labels]
        for label, ratio in zip(labels, ratios, strict=True):
            table[label].append(number(ratio))
        if any(ratio is not None for ratio in ratios):
            bar = {"color": COLOURS[place % len(COLOURS)], "pattern": {"shape": ("", "/", "x", ".")[place % 4]}}
            traces.append({"type": "bar", "name": policy, "x": labels, "y": ratios, "marker": bar})
    return Chart(
        id="hit-tokens",
        title="Hit tokens by prefix group",
        description="Reused prompt tokens, as a share of all prompt tokens of the group; the groups with the most "
        "requests first.",
        traces=traces,
        layout={
            "barmode": "group",
            "xaxis": {"title": {"text": "prefix group"}, "type": "category"},
            "yaxis": {"title": {"text": "hit tokens, % of prompt tokens"}, "range": [0, 100]},
        },
        header=["prefix group", *(f"{policy} %" for policy in columns)],
        rows=list(table.values()),
    )


def _hit_percent(own: Columns, rows: Any) -> float | None:
    known = rows & ~np.isnan(own.cached)
    prompt = own.prompt[known].sum()
    return round(float(own.cached[known].sum() / prompt) * 100, 2) if prompt else None


def _balance_over_time(columns: Mapping[str, Columns], workers: int | None) -> Chart:
    traces, rows = [], []
    edges = _time_edges(columns)
    for place, (policy, own) in enumerate(columns.items()):
        placed = own.worker != ""
        names, worker = np.unique(own.worker[placed].astype(str), return_inverse=True)
        fleet = max(workers or 0, len(names))
        x, y = [], []
        for middle, inside in bins(own.scheduled[placed], edges):
            if inside.sum() < HOTSPOT_MIN_REQUESTS_PER_WORKER * fleet:
                continue
            load = np.bincount(worker[inside], weights=own.prompt[placed][inside], minlength=fleet)
            x.append(middle)
            y.append(round(float(load.max() / load.mean()), 3))
            rows.append(
                [policy, number(middle), *(f"{tokens:,.0f}" for tokens in (load.max(), load.mean())), number(y[-1])]
            )
        if x:
            traces.append(line(place, policy, x, y))
    return Chart(
        id="balance",
        title="Balance of the fleet over time",
        description="Prompt tokens sent to the busiest worker / mean of all workers, by stretch of the run. 1 is "
        "perfect; above the grey line at 1.5 a worker counts as overloaded. Repeats are laid over each other.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "scheduled time in the run, s"}},
            "yaxis": {"title": {"text": "busiest / mean"}, "rangemode": "tozero"},
            "shapes": [limit_line("y", 1.5)],
        },
        header=["policy", "time s", "busiest, tokens", "mean, tokens", "busiest / mean"],
        rows=rows,
    )


def _ttft_over_time(columns: Mapping[str, Columns], thresholds: Sequence[float]) -> Chart:
    traces, rows = [], []
    edges = _time_edges(columns)
    for place, (policy, own) in enumerate(columns.items()):
        waits = [(middle, own.wait[inside] * 1e3) for middle, inside in bins(own.scheduled, edges)]
        waits = [(middle, values) for middle, values in waits if not np.isnan(values).all()]
        x = [middle for middle, _ in waits]
        for p, dash in ((50, "dot"), (95, "solid")):
            y = [percentile(values, p) for _, values in waits]
            traces.append(line(place, f"{policy}, p{p}", x, rounded(y), dash=dash, markers=p == 95))
        rows += [
            [policy, number(middle), *(number(percentile(values, p)) for p in (50, 95)), str(len(values))]
            for middle, values in waits
        ]
    return Chart(
        id="ttft-over-time",
        title="Time to first token over time",
        description="Median (dotted) and p95 (solid) by scheduled time. A line that climbs to the end of the run is a "
        "queue that the fleet doesn't catch up with.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "scheduled time in the run, s"}},
            "yaxis": {"title": {"text": "TTFT, ms (logarithmic)"}, **LOG_AXIS},
            "shapes": [limit_line("y", t * 1e3) for t in thresholds],
        },
        header=["policy", "time s", "p50 ms", "p95 ms", "requests"],
        rows=rows,
    )


def _client_lag(columns: Mapping[str, Columns]) -> Chart:
    traces, rows = [], []
    shares = np.linspace(0, 1, CURVE_POINTS)
    for place, (policy, own) in enumerate(columns.items()):
        lag = own.lag[~np.isnan(own.lag)] * 1e3
        if not len(lag):
            continue
        traces.append(line(place, policy, rounded(np.quantile(lag, shares)), rounded(shares * 100), markers=False))
        rows.append([policy, *(number(percentile(lag, p)) for p in (50, 99, 100))])
    return Chart(
        id="client-lag",
        title="The load generator's own lag",
        description="How late requests were sent, against their schedule. TTFT counts from the schedule, so this is "
        "part of it.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "sent after the scheduled time, ms"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "requests, %"}, "range": [0, 101]},
        },
        header=["policy", "p50 ms", "p99 ms", "max ms"],
        rows=rows,
    )


def line(place: int, name: str, x: Any, y: Any, *, dash: str = "solid", markers: bool = True) -> Trace:
    """A line in the colour, and with the marker, of the policy at this place."""
    colour = COLOURS[place % len(COLOURS)]
    trace: Trace = {"type": "scatter", "name": name, "x": list(x), "y": list(y), "mode": "lines"}
    trace["line"] = {"color": colour, "dash": dash, "width": 2}
    if markers:
        trace["mode"] = "lines+markers"
        trace["marker"] = {"symbol": MARKERS[place % len(MARKERS)], "size": 7}
    return trace


def limit_line(axis: str, value: float) -> dict[str, Any]:
    """A dashed line across the plot, at a value of this axis."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "line",
        f"{axis}0": value,
        f"{axis}1": value,
        f"{other}0": 0,
        f"{other}1": 1,
        f"{other}ref": "paper",
        "line": {"color": "#888888", "width": 1.5, "dash": "dash"},
    }


def _time_edges(columns: Mapping[str, Columns]) -> Floats:
    """Equal stretches of the run: `TIME_BINS`, or fewer so that each has requests enough to mean something."""
    last = max((float(own.scheduled.max()) for own in columns.values() if len(own)), default=0.0)
    requests = min((len(own) for own in columns.values()), default=0)
    count = max(1, min(TIME_BINS, requests // REQUESTS_PER_BIN))
    return np.linspace(0, max(last, 1e-9) * (1 + 1e-9), count + 1)


def bins(times: Floats, edges: Floats) -> Iterator[tuple[float, Any]]:
    """The middle of each stretch that has any request, and which those are."""
    place = np.searchsorted(edges, times, side="right") - 1
    for k in range(len(edges) - 1):
        if (inside := place == k).any():
            yield round(float(edges[k] + edges[k + 1]) / 2, 3), inside


def rounded(values: Any) -> list[float | None]:
    """Six significant digits are plenty on a screen."""
    return [None if v is None else float(f"{v:.6g}") for v in values]
