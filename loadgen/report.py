"""What people read of a run: `report.html` (one file, works offline), the console's table, a Markdown summary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from plotly.offline import get_plotlyjs
from rich.table import Table

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from loadgen import wording
from loadgen.charts import build_charts
from loadgen.comparison import METRIC_BY_NAME, Comparison
from loadgen.grade import ObjectiveGrade, PolicyGrade
from loadgen.records import RequestRecord
from loadgen.summary import Summary, columns_by_policy, decided, verdict_sentence
from slo.objective import Objective

LEADERBOARD = (
    "policy",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "TTFT p99 ms",
    "TPOT p95 ms",
    "hit tokens",
    "goodput req/s",
    "not completed",
    "busiest / mean",
    "decision p99 µs",
)


def render_report(
    summary: Summary,
    records: Iterable[RequestRecord],
    objectives: Sequence[Objective],
    config: Mapping[str, Any],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> str:
    """The report as one HTML page; `config` is everything needed to run it again."""
    columns = columns_by_policy(records, list(summary.policies))
    charts = build_charts(columns, objectives, block_size=block_size, workers=summary.workers)
    *sentences, verdict = verdict_sentence(summary).splitlines()
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html.j2")
    return template.render(
        summary=summary,
        sentences=[*sentences, verdict.partition(" – ")[2]],
        leaderboard_header=LEADERBOARD,
        leaderboard=[leaderboard_row(name, own) for name, own in summary.policies.items()],
        comparison=_comparison_rows(summary),
        objectives=[
            _objective_row(name, objective) for name, own in summary.policies.items() for objective in own.objectives
        ],
        charts=charts,
        figures=_script_safe({c.id: {"data": c.traces, "layout": c.layout} for c in charts}),
        config=yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True),
        plotly_js=get_plotlyjs(),
    )


def write_report(
    path: Path,
    summary: Summary,
    records: Iterable[RequestRecord],
    objectives: Sequence[Objective],
    config: Mapping[str, Any],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> None:
    """Write `report.html`."""
    path.write_text(render_report(summary, records, objectives, config, block_size=block_size), encoding="utf-8")


def console_table(summary: Summary) -> Table:
    """The leaderboard for a terminal, a row a figure: many policies are rarer than narrow terminals."""
    table = Table(title=f"{summary.scenario} on {summary.workers} × {summary.engine}")
    columns = [leaderboard_row(policy, own) for policy, own in summary.policies.items()]
    table.add_column("")
    for policy, *_ in columns:
        table.add_column(policy, justify="right")
    for position, name in enumerate(LEADERBOARD[1:], start=1):
        table.add_row(name, *(figures[position] for figures in columns))
    return table


def markdown_summary(summary: Summary) -> str:
    """Verdict, leaderboard and objectives in GitHub's Markdown, for a pull request or a step summary."""
    sentences = "\n".join(f"- {line}" for line in verdict_sentence(summary).splitlines())
    rows = [leaderboard_row(name, own) for name, own in summary.policies.items()]
    graded = [_objective_row(name, o) for name, own in summary.policies.items() for o in own.objectives]
    parts = [
        f"## prefixwatch: {summary.scenario} – {summary.verdict}",
        sentences,
        _markdown_table(LEADERBOARD, rows),
    ]
    if graded:
        header = ("policy", "objective", "rule", "measured", "95 % CI", "result")
        keys = ("policy", "name", "rule", "measured", "ci95", "result")
        parts.append(_markdown_table(header, [[row[key] for key in keys] for row in graded]))
    return "\n\n".join(parts) + "\n"


def leaderboard_row(policy: str, own: PolicyGrade) -> list[str]:
    """A policy's figures in the order of `LEADERBOARD`; latency beside the share of requests that got none."""
    lost = own.requests.scheduled - own.requests.completed
    return [
        policy,
        *(wording.number(value) for value in (own.ttft_ms.p50, own.ttft_ms.p95, own.ttft_ms.p99, own.tpot_ms.p95)),
        wording.percent(own.prefix.hit_ratio),
        wording.number(own.goodput_rps),
        wording.percent(lost / own.requests.scheduled if own.requests.scheduled else None),
        wording.number(own.hotspot.max_over_mean),
        wording.number(own.router_decision_us.p99),
    ]


def _comparison_rows(summary: Summary) -> dict[str, list[dict[str, Any]]]:
    """The comparisons with the baseline, by policy."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for found in summary.comparison:
        rows.setdefault(found.a, []).append(_comparison_row(found))
    return rows


def _comparison_row(found: Comparison) -> dict[str, Any]:
    metric = METRIC_BY_NAME[found.metric]
    return {
        "metric": f"{metric.title}{', ' + metric.unit if metric.unit else ''}",
        "pairs": found.pairs,
        "b": wording.number(found.b_value),
        "a": wording.number(found.a_value),
        "difference": wording.signed(found.difference),
        "relative": wording.signed_percent(found.relative),
        "ci95": wording.interval(found.ci95),
        "p": wording.number(found.p_adjusted, 2),
        "effect": wording.effect(found),
    }


def _objective_row(policy: str, objective: ObjectiveGrade) -> dict[str, str]:
    return {
        "policy": policy,
        "name": objective.name,
        "rule": objective.rule,
        "measured": wording.percent(objective.measured),
        "ci95": wording.percent_interval(objective.ci95),
        "good": f"{objective.good:,} of {objective.total:,}",
        "excluded": f"{objective.excluded:,}",
        "result": {"pass": "met", "fail": "missed", "inconclusive": "undecided"}[decided(objective)],
    }


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _script_safe(value: Any) -> str:
    """JSON that can stand inside a script element whatever a name in it contains."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
