"""What people read of a run: `report.html` (one file, works offline), the console's table, a Markdown summary."""

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

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from loadgen.charts import Chart, build_charts
from loadgen.columns import RequestLog
from loadgen.fleet_charts import fleet_charts
from loadgen.fleet_rows import FleetRow
from loadgen.leaderboard import leaderboard_chart
from loadgen.report_rows import (
    CLASSES,
    FIGURES,
    LEADERBOARD,
    REUSE,
    class_rows,
    comparison_rows,
    figure_rows,
    further_rows,
    latency_rows,
    leaderboard_row,
    loop_label,
    objective_row,
    prediction_rows,
    reason_rows,
    reuse_rows,
    run_table,
)
from loadgen.summary import Summary, columns_by_policy, verdict_sentence
from slo.objective import Objective

COLUMN_POLICIES = 3
"""More policies than this don't fit side by side into a narrow terminal."""


def render_report(
    summary: Summary,
    log: RequestLog,
    objectives: Sequence[Objective],
    config: Mapping[str, Any],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    fleet: Sequence[FleetRow] = (),
) -> str:
    """The report as one HTML page; `config` is everything needed to run it again, `fleet` what the engines said."""
    columns = columns_by_policy(log, list(summary.policies))
    charts = build_charts(columns, objectives, block_size=block_size, workers=summary.workers) + fleet_charts(fleet)
    leaderboard_charts = [chart for chart in (leaderboard_chart(summary.policies),) if chart.traces]
    *sentences, verdict = verdict_sentence(summary).splitlines()
    policies = summary.policies.items()
    return render_page(
        "report.html.j2",
        (*leaderboard_charts, *charts),
        config,
        state=summary.verdict,
        summary=summary,
        loop_kind=loop_label(summary.runs),
        sentences=[*sentences, verdict.partition(" – ")[2]],
        leaderboard_header=LEADERBOARD,
        leaderboard=[leaderboard_row(name, own) for name, own in policies],
        latencies={name: latency_rows(own) for name, own in policies},
        figures_header=FIGURES,
        other_figures=[row for name, own in policies for row in figure_rows(name, own)],
        comparison=comparison_rows(summary),
        objectives=[objective_row(name, objective) for name, own in policies for objective in own.objectives],
        classes_header=CLASSES,
        classes=[row for name, own in policies for row in class_rows(name, own)],
        reuse_header=REUSE,
        reuse=reuse_rows(summary),
        runs=run_table(summary.runs),
        reasons=[row for name, own in policies for row in reason_rows(name, own)],
        predictions=[row for name, own in policies for row in prediction_rows(name, own)],
        leaderboard_charts=leaderboard_charts,
        charts=charts,
    )


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
    block_size: int = DEFAULT_BLOCK_SIZE,
    fleet: Sequence[FleetRow] = (),
) -> None:
    """Write `report.html`."""
    page = render_report(summary, log, objectives, config, block_size=block_size, fleet=fleet)
    path.write_text(page, encoding="utf-8")


def console_table(summary: Summary) -> Table:
    """The leaderboard for a terminal: a column a policy, with what there is to know of intervals, gaps and the client;
    where they are many, a row a policy, without these and TTFT p99."""
    lines = [list(LEADERBOARD), *(leaderboard_row(policy, own) for policy, own in summary.policies.items())]
    loop = loop_label(summary.runs)
    closed = f", {loop}" if loop.startswith("closed") else ""
    title = f"{summary.scenario} on {summary.fleet}{closed}"
    if len(summary.policies) > COLUMN_POLICIES:
        left_out = LEADERBOARD.index("TTFT p99 ms")
        lines = [line[:left_out] + line[left_out + 1 :] for line in lines]
        lines[0] = [name.replace(" ", "\n", 1) for name in lines[0]]
        table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    else:
        lines = [list(line) for line in zip(*lines, strict=True)] + further_rows(summary)
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
        sentences,
        _markdown_table(LEADERBOARD, [leaderboard_row(name, own) for name, own in policies]),
        _markdown_table(("policy", "milliseconds", "p50", "p95", "p99"), _markdown_latencies(summary)),
        _markdown_table(FIGURES, [row for name, own in policies for row in figure_rows(name, own)]),
    ]
    if graded:
        header = ("policy", "objective", "rule", "measured", "95 % CI", "result")
        parts.append(_markdown_table(header, [[row[key] for key in keys] for row in graded]))
    if classes := [row for name, own in policies for row in class_rows(name, own)]:
        parts.append(_markdown_table(CLASSES, classes))
    if reuse := reuse_rows(summary):
        parts.append(_markdown_table(REUSE, reuse))
    return "\n\n".join(parts) + "\n"


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
