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
from loadgen import wording
from loadgen.charts import build_charts
from loadgen.columns import RequestLog
from loadgen.comparison import METRIC_BY_NAME, Comparison
from loadgen.grade import ObjectiveGrade, PolicyGrade, PredictionCount, PredictionGrade
from loadgen.leaderboard import leaderboard_chart
from loadgen.summary import Summary, columns_by_policy, decided, verdict_sentence
from slo.objective import Objective

COLUMN_POLICIES = 3
"""More policies than this don't fit side by side into a narrow terminal."""
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
    log: RequestLog,
    objectives: Sequence[Objective],
    config: Mapping[str, Any],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> str:
    """The report as one HTML page; `config` is everything needed to run it again."""
    columns = columns_by_policy(log, list(summary.policies))
    charts = build_charts(columns, objectives, block_size=block_size, workers=summary.workers)
    leaderboard_charts = [chart for chart in (leaderboard_chart(summary.policies),) if chart.traces]
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
        reasons=[row for name, own in summary.policies.items() for row in _reason_rows(name, own)],
        predictions=[row for name, own in summary.policies.items() for row in _prediction_rows(name, own)],
        leaderboard_charts=leaderboard_charts,
        charts=charts,
        figures=_script_safe({c.id: {"data": c.traces, "layout": c.layout} for c in (*leaderboard_charts, *charts)}),
        config=yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True),
        plotly_js=get_plotlyjs(),
    )


def write_report(
    path: Path,
    summary: Summary,
    log: RequestLog,
    objectives: Sequence[Objective],
    config: Mapping[str, Any],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> None:
    """Write `report.html`."""
    path.write_text(render_report(summary, log, objectives, config, block_size=block_size), encoding="utf-8")


def console_table(summary: Summary) -> Table:
    """The leaderboard for a terminal: a column a policy; where they are many, a row a policy, without TTFT p99."""
    lines = [list(LEADERBOARD), *(leaderboard_row(policy, own) for policy, own in summary.policies.items())]
    title = f"{summary.scenario} on {summary.workers} × {summary.engine}"
    if len(summary.policies) > COLUMN_POLICIES:
        left_out = LEADERBOARD.index("TTFT p99 ms")
        lines = [line[:left_out] + line[left_out + 1 :] for line in lines]
        lines[0] = [name.replace(" ", "\n", 1) for name in lines[0]]
        table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    else:
        lines = [list(line) for line in zip(*lines, strict=True)]
        lines[0][0] = ""
        table = Table(title=title)
    header, *rows = lines
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left", no_wrap=not position)
    for row in rows:
        table.add_row(*row)
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


def _reason_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    placed = sum(own.reasons.values())
    return [[policy, reason, wording.percent(count / placed), f"{count:,}"] for reason, count in own.reasons.items()]


def _prediction_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    """What became of the predicted hit tokens, all together and by cause."""
    prediction = own.prediction
    if prediction is None:
        return []
    causes = [(cause.replace("_", " "), *_counts(count)) for cause, count in prediction.by_cause.items()]
    rows = [("all", *_counts(prediction)), *causes] if len(causes) > 1 else causes
    return [
        [policy, cause, wording.percent(requests / prediction.requests), f"{requests:,}", *(f"{n:,}" for n in tokens)]
        for cause, requests, *tokens in rows
    ]


def _counts(count: PredictionCount | PredictionGrade) -> tuple[int, int, int]:
    return count.requests, count.predicted_tokens or 0, count.delivered_tokens or 0


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _script_safe(value: Any) -> str:
    """JSON that can stand inside a script element whatever a name in it contains."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
