"""What happened to the fleet during the run, and its effect: rows of a table, and two charts over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from prefixwatch.loadgen.grading.statistics import percentile
from prefixwatch.loadgen.grading.wording import UNKNOWN, number, percent, recovery_words
from prefixwatch.loadgen.report.charts import LOG_AXIS, Chart, bins, limit_line, line, rounded
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.event_effects import EventEffect
from prefixwatch.loadgen.request_log.session_moves import HARD, SOFT, UNDISTURBED, MoveEffect
from prefixwatch.slo.objective import Floats

EVENTS = (
    "event",
    "policy",
    "hit tokens, before → lowest",
    "reuse",
    "TTFT p95 ms, before → after",
    "sessions moved",
    "consistent hash",
    "copies of a prefix",
    "lost before a token",
    "lost streaming",
)
MOVES = ("event", "policy", "moved", "soft", "hard", "decided by", "drained after s", "soft", "hard", "undisturbed")
"""Headings; the last three are the TTFT of the next turn, ms p50 / p95."""
_BINS = 60
_REQUESTS_PER_BIN = 20
_LABEL = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "textangle": -20}


def event_row(own: EventEffect) -> list[str]:
    """One line of the table."""
    return [
        f"{own.event}, {number(own.at_s)} s",
        own.policy,
        f"{percent(own.hit_ratio_before)} → {percent(own.hit_ratio_lowest)}",
        recovery_words(own),
        f"{number(own.ttft_p95_before_ms)} → {number(own.ttft_p95_after_ms)}",
        percent(own.moved_share),
        percent(own.fair_share),
        f"{number(own.copies_before)} → {number(own.copies_after)}",
        f"{own.lost_before_first_token:,}",
        f"{own.lost_streaming:,}",
    ]


def event_table(effects: Sequence[EventEffect]) -> Table:
    """The same for a terminal, policies below each other under each event."""
    table = Table(title="Events: the 60 s before and after, or to the next one", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("event", "policy", "hits %", "back after", "TTFT p95 ms", "moved %", "lost"):
        table.add_column(name, justify="left" if name in ("event", "policy") else "right")
    previous = 0.0
    for own in sorted(effects, key=lambda effect: effect.at_s):
        table.add_row(
            "" if own.at_s == previous else f"{own.at_s:g} s: {own.event}",
            own.policy,
            f"{_whole(own.hit_ratio_before, 100)} → {_whole(own.hit_ratio_lowest, 100)}",
            _seconds(own),
            f"{_whole(own.ttft_p95_before_ms)} → {_whole(own.ttft_p95_after_ms)}",
            _whole(own.moved_share, 100),
            f"{own.lost_before_first_token} + {own.lost_streaming}",
        )
        previous = own.at_s
    table.caption = "Back after: until hits are at 95 % of before. Lost: before a first token + while streaming."
    return table


def _whole(value: float | None, factor: float = 1) -> str:
    return UNKNOWN if value is None else f"{value * factor:,.0f}"


def _seconds(own: EventEffect) -> str:
    if own.hit_ratio_lowest is None:
        return UNKNOWN
    return "not back" if own.seconds_to_recover is None else f"{own.seconds_to_recover:.0f} s"


def event_charts(columns: Mapping[str, Columns], effects: Sequence[EventEffect]) -> list[Chart]:
    """Hit tokens and TTFT over time, with a line at each event; none without events."""
    if not effects:
        return []
    last = max((float(own.scheduled.max()) for own in columns.values() if len(own)), default=0.0)
    requests = min((len(own) for own in columns.values()), default=0)
    edges = np.linspace(0, max(last, 1e-9) * (1 + 1e-9), max(1, min(_BINS, requests // _REQUESTS_PER_BIN)) + 1)
    events = dict.fromkeys((own.at_s, own.event) for own in effects)
    marks: dict[str, Any] = {
        "shapes": [limit_line("x", at_s) for at_s, _ in events],
        "annotations": [
            {
                "x": at_s,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "text": title,
                "showarrow": False,
                "textangle": -20,
            }
            for at_s, title in events
        ],
    }
    hits = _over_time(columns, edges, _hit_percent)
    ttft = _over_time(columns, edges, _ttft_p95_ms)
    x = {"title": {"text": "scheduled time in the run, s"}}
    charts = [
        Chart(
            id="event-hits",
            title="Hit tokens around the events",
            description="Reused prompt tokens, as a share of all prompt tokens, by scheduled time. A line marks each "
            "event; repeats are laid over each other.",
            traces=hits[0],
            layout={"xaxis": x, "yaxis": {"title": {"text": "hit tokens, %"}, "range": [0, 100]}, **marks},
            header=["policy", "time s", "hit tokens %"],
            rows=hits[1],
        ),
        Chart(
            id="event-ttft",
            title="TTFT p95 around the events",
            description="95th percentile of the time to first token, by scheduled time.",
            traces=ttft[0],
            layout={"xaxis": x, "yaxis": {"title": {"text": "TTFT p95, ms (logarithmic)"}, **LOG_AXIS}, **marks},
            header=["policy", "time s", "TTFT p95 ms"],
            rows=ttft[1],
        ),
    ]
    return [chart for chart in charts if chart.traces]


def _over_time(columns: Mapping[str, Columns], edges: Floats, figure: Any) -> tuple[list[Any], list[list[str]]]:
    traces, rows = [], []
    for place, (policy, own) in enumerate(columns.items()):
        found = [(middle, figure(own, inside)) for middle, inside in bins(own.scheduled, edges)]
        points = [(middle, value) for middle, value in found if value is not None]
        if points:
            x, y = zip(*points, strict=True)
            traces.append(line(place, policy, x, rounded(y)))
            rows += [[policy, number(middle), number(value)] for middle, value in points]
    return traces, rows


def _hit_percent(own: Columns, inside: Any) -> float | None:
    known = inside & ~np.isnan(own.cached)
    prompt = float(own.prompt[known].sum())
    return float(own.cached[known].sum()) / prompt * 100 if prompt else None


def _ttft_p95_ms(own: Columns, inside: Any) -> float | None:
    waits = own.wait[inside]
    return None if np.isnan(waits).all() else float(percentile(waits, 95) or 0.0) * 1e3


def move_row(own: MoveEffect) -> list[str]:
    """One line of the table."""
    return [
        f"{own.event}, {number(own.at_s)} s",
        own.policy,
        f"{own.moved:,}",
        f"{own.soft:,}",
        f"{own.hard:,}",
        ", ".join(f"{why} {count}" for why, count in sorted(own.why.items())) or UNKNOWN,
        number(own.seconds_to_drain),
        *(_times(own, kind) for kind in (SOFT, HARD, UNDISTURBED)),
    ]


def move_table(effects: Sequence[MoveEffect]) -> Table:
    """The same for a terminal, what decided below it."""
    title = "Sessions moved on purpose, and the TTFT of their next turn, ms p50 / p95"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("at s", "policy", "moved", "soft", "hard", "drained after s", "soft", "hard", "undisturbed"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for own in effects:
        _, policy, moved, soft, hard, _, drained, *times = move_row(own)
        table.add_row(number(own.at_s), policy, moved, soft, hard, drained, *times)
    table.caption = "\n".join(f"{own.event}, {own.policy}: {move_row(own)[5]}" for own in effects)
    return table


def _times(own: MoveEffect, kind: str) -> str:
    turns = own.next_turns.get(kind)
    if turns is None or turns.ttft_p50_ms is None:
        return UNKNOWN
    return f"{number(turns.ttft_p50_ms)} / {number(turns.ttft_p95_ms)}"
