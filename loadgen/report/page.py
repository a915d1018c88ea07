"""A run for people: `report.html` (one file, works offline), the console's table, a Markdown summary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from plotly.offline import get_plotlyjs
from rich import box
from rich.table import Table

from prefixwatch.loadgen.grading.summary import Summary, columns_by_policy, verdict_sentence
from prefixwatch.loadgen.grading.wording import UNKNOWN
from prefixwatch.loadgen.report.advice import what_to_do
from prefixwatch.loadgen.report.charts import Chart, build_charts
from prefixwatch.loadgen.report.event_section import EVENTS, MOVES, event_charts, event_row, move_row
from prefixwatch.loadgen.report.fleet_charts import WORKERS, fleet_charts, worker_rows
from prefixwatch.loadgen.report.headline import plain_sentence, provenance, tiles
from prefixwatch.loadgen.report.leaderboard import leaderboard_chart
from prefixwatch.loadgen.report.reuse_section import SESSIONS, parts_table, session_rows, weighted_sentences
from prefixwatch.loadgen.report.rows import (
    CLASSES,
    FIGURES,
    LEADERBOARD,
    REUSE,
    class_rows,
    comparison_rows,
    figure_rows,
    figures_by_policy,
    latencies_by_policy,
    latency_rows,
    leaderboard_row,
    loop_label,
    objective_row,
    prediction_rows,
    reason_rows,
    reuse_rows,
    run_table,
    secondary_rows,
)
from prefixwatch.loadgen.report.sections.caches import CACHES, cache_row
from prefixwatch.loadgen.request_log.columns import RequestLog
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.slo.objective import Objective

FIRST_CHART = "ttft-distribution"
"""The chart of the first screen."""
CONTENTS = {
    "leaderboard": "Policies",
    "objectives": "Objectives",
    "events": "Events",
    "moves": "Sessions moved on purpose",
    "caches": "Caches",
    "percentiles": "Latency",
    "figures": "Reuse, goodput, throughput",
    "comparison": "What changed",
    "classes": "By request class",
    "reuse": "Expected reuse",
    "parts": "Reuse by part and session",
    "validity": "Validity",
    "workers": "The workers",
    "runs": "The runs",
    "charts": "Charts",
    "reasons": "Routing reasons",
    "predictions": "Predicted reuse",
    "again": "Run it again",
    "definitions": "Definitions",
}
"""Sections, in the order of the page."""
_ROWS_OF = {**{id_: id_ for id_ in CONTENTS}, "figures": "other_figures"}
"""Sections that are left out without rows, and the name of their rows."""
COLUMN_POLICIES = 3
"""More policies than this don't fit side by side into a narrow terminal."""


def render_report(
    summary: Summary,
    log: RequestLog,
    objectives: Sequence[Objective],
    config: Mapping[str, Any],
    *,
    fleet: Sequence[FleetRow] = (),
) -> str:
    """The report as one HTML page; `config` is everything needed to run it again, `fleet` what the engines said."""
    columns = columns_by_policy(log, list(summary.policies), summary.block_size)
    drawn_events = event_charts(columns, summary.events)
    charts = build_charts(columns, objectives, workers=summary.workers) + fleet_charts(fleet)
    leaderboard_charts = [chart for chart in (leaderboard_chart(summary.policies),) if chart.traces]
    first = [chart for chart in charts if chart.id == FIRST_CHART]
    parts_header, parts = parts_table(summary)
    *sentences, verdict = verdict_sentence(summary).splitlines()
    policies = summary.policies.items()
    rows = {
        "objectives": [objective_row(name, objective) for name, own in policies for objective in own.objectives],
        "events": [event_row(own) for own in summary.events],
        "moves": [move_row(own) for own in summary.moves],
        "caches": [cache_row(own) for own in summary.caches],
        "comparison": comparison_rows(summary),
        "classes": [row for name, own in policies for row in class_rows(name, own)],
        "reuse": reuse_rows(summary),
        "parts": parts,
        "workers": worker_rows(fleet),
        "runs": run_table(summary.runs),
        "reasons": [row for name, own in policies for row in reason_rows(name, own)],
        "predictions": [row for name, own in policies for row in prediction_rows(name, own)],
        "other_figures": figures_by_policy(summary),
    }
    return render_page(
        "report.html.j2",
        (*leaderboard_charts, *drawn_events, *charts),
        config,
        state=summary.verdict,
        summary=summary,
        loop_kind=loop_label(summary.runs),
        provenance=provenance(summary),
        plain=plain_sentence(summary),
        tiles=tiles(summary),
        to_do=what_to_do(summary),
        notes=summary.notes,
        sentences=[*sentences, verdict.partition(" – ")[2]],
        contents=[(id_, title) for id_, title in CONTENTS.items() if rows.get(_ROWS_OF.get(id_, ""), True)],
        leaderboard=_side_by_side([list(LEADERBOARD), *(leaderboard_row(name, own) for name, own in policies)]),
        workers_header=WORKERS,
        latencies=latencies_by_policy(summary),
        classes_header=CLASSES,
        reuse_header=REUSE,
        parts_header=parts_header,
        sessions_header=SESSIONS,
        session_rows=session_rows(summary),
        weighted=weighted_sentences(summary),
        events_header=EVENTS,
        moves_header=MOVES,
        caches_header=CACHES,
        event_charts=drawn_events,
        first_charts=first,
        leaderboard_charts=leaderboard_charts,
        charts=[chart for chart in charts if chart not in first],
        **rows,
    )


def _side_by_side(lines: list[list[str]]) -> list[list[str]]:
    """Few policies in columns, which a phone shows; many in rows. Figures that none has are left out."""
    columns = [list(column) for column in zip(*lines, strict=True)]
    known = [column for column in columns if set(column[1:]) != {UNKNOWN}]
    return known if len(lines) <= COLUMN_POLICIES + 1 else [list(line) for line in zip(*known, strict=True)]


def render_page(template: str, drawn: Sequence[Chart], config: Mapping[str, Any], **values: Any) -> str:
    """One page from a template beside this file, with the figures of the drawn charts and all scripts inside."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        figures=_script_safe({chart.id: {"data": chart.traces, "layout": chart.layout} for chart in drawn}),
        config=yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True),
        plotly_js=get_plotlyjs(),
        **values,
    )


def write_report(
    path: Path,
    summary: Summary,
    log: RequestLog,
    objectives: Sequence[Objective],
    config: Mapping[str, Any],
    *,
    fleet: Sequence[FleetRow] = (),
) -> None:
    """Write `report.html`."""
    page = render_report(summary, log, objectives, config, fleet=fleet)
    path.write_text(page, encoding="utf-8")


def console_table(summary: Summary) -> Table:
    """The leaderboard for a terminal: one column per policy, with intervals, gaps and the client's own figures; with
    many policies one row per policy, without these and TTFT p99."""
    lines = [list(LEADERBOARD), *(leaderboard_row(policy, own) for policy, own in summary.policies.items())]
    loop = loop_label(summary.runs)
    closed = "" if loop.startswith("open") or not loop else f", {loop}"
    title = f"{summary.scenario} on {summary.fleet}{closed}"
    if len(summary.policies) > COLUMN_POLICIES:
        left_out = LEADERBOARD.index("TTFT p99 ms")
        lines = [line[:left_out] + line[left_out + 1 :] for line in lines]
        lines[0] = [name.replace(" ", "\n", 1) for name in lines[0]]
        table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    else:
        lines = [list(line) for line in zip(*lines, strict=True)] + secondary_rows(summary)
        lines[0][0] = ""
        table = Table(title=title)
    header, *rows = lines
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left", no_wrap=not position)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_summary(summary: Summary) -> str:
    """Verdict, leaderboard, intervals, objectives and classes in GitHub's Markdown, for a pull request or a step
    summary."""
    sentences = "\n".join(f"- {line}" for line in verdict_sentence(summary).splitlines())
    policies = summary.policies.items()
    graded = [objective_row(name, o) for name, own in policies for o in own.objectives]
    keys = ("policy", "name", "rule", "measured", "ci95", "result")
    loop = loop_label(summary.runs)
    parts = [
        f"## prefixwatch: {summary.scenario} – {summary.verdict}",
        f"{summary.fleet}{', ' + loop if loop else ''}, {summary.repeats} repeats",
        " · ".join(provenance(summary)),
        sentences,
        "\n".join(f"- To do: {each}" for each in what_to_do(summary)),
        _markdown_table(LEADERBOARD, [leaderboard_row(name, own) for name, own in policies]),
        _markdown_table(("policy", "milliseconds", "p50", "p95", "p99"), _markdown_latencies(summary)),
        _markdown_table(FIGURES, [row for name, own in policies for row in figure_rows(name, own)]),
    ]
    if graded:
        header = ("policy", "objective", "rule", "measured", "95 % CI", "result")
        parts.append(_markdown_table(header, [[row[key] for key in keys] for row in graded]))
    if classes := [row for name, own in policies for row in class_rows(name, own)]:
        parts.append(_markdown_table(CLASSES, classes))
    if summary.events:
        parts.append(_markdown_table(EVENTS, [event_row(own) for own in summary.events]))
    if summary.moves:
        parts.append(_markdown_table(MOVES, [move_row(own) for own in summary.moves]))
    if summary.caches:
        parts.append(_markdown_table(CACHES, [cache_row(own) for own in summary.caches]))
    if reuse := reuse_rows(summary):
        parts.append(_markdown_table(REUSE, reuse))
    by_part, rows = parts_table(summary)
    if rows:
        parts.append(_markdown_table(by_part, rows))
    if sessions := session_rows(summary):
        parts.append(_markdown_table(SESSIONS, sessions))
    parts += weighted_sentences(summary)
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_latencies(summary: Summary) -> list[list[str]]:
    return [
        [name, row.figure, *(f"{value} ({limits})" if limits else value for value, limits in row.cells)]
        for name, own in summary.policies.items()
        for row in latency_rows(own)
    ]


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _script_safe(value: Any) -> str:
    """JSON that can stand inside a script element whatever a name in it contains."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
