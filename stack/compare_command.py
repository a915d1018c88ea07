"""`prefixwatch compare`: which figures of two runs differ, by how much, and how surely; a gate for CI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table

from loadgen import wording
from loadgen.columns import Columns
from loadgen.comparison import METRIC_BY_NAME, Comparison, compare_runs, same_plan
from loadgen.comparison_chart import comparison_chart
from loadgen.report import render_page
from loadgen.summary import columns_by_policy
from stack.errors import UsageError
from stack.finished_run import FinishedRun, read_run

EXIT_CODES = {"same": 0, "better": 0, "worse": 1, "inconclusive": 3}
_STATES = {"same": "pass", "better": "pass", "worse": "fail", "inconclusive": "inconclusive"}
"""The colour of the page's verdict."""
HEADER = ("figure", "A", "B", "B − A", "relative", "95 % CI of B − A", "p (Holm)", "effect")


class RunsCompared(BaseModel):
    """The result of `prefixwatch compare`, and its JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = Field(default=1, serialization_alias="schema")
    a: str = Field(description="the baseline run")
    b: str = Field(description="the run that is compared with it")
    paired: bool = Field(description="both served one plan, so that requests were compared one by one")
    comparison: list[Comparison] = Field(description="`a` of each is the run B, its `b` the run A")
    reasons: list[str] = Field(description="why this says nothing; empty when it does")
    notes: list[str] = Field(
        default=[], description="what each run's own summary notes, such as that it was a closed loop"
    )
    verdict: Literal["same", "better", "worse", "inconclusive"]


def run_compare(
    a: Path, b: Path, policies: Sequence[str], slo: Sequence[str], tolerance_percent: float
) -> tuple[RunsCompared, int]:
    """Compare the runs in two folders; the exit code is 1 when B is significantly worse in any figure.

    `policies` names those to compare, none for all that both have; a single one on each side are compared whatever
    they are called. A loss of less than `tolerance_percent` of A's figure is let pass. Raises UsageError.
    """
    first, second = read_run(a, slo), read_run(b, slo)
    objectives = first.objectives
    if not slo and [o.rule for o in first.objectives] != [o.rule for o in second.objectives]:
        raise UsageError(f"{a} and {b} were graded on different objectives: name those to grade both on with --slo")
    pairs = _pairs(first, second, policies)
    runs = [(f"B {name_b}", of_b, f"A {name_a}", of_a) for name_a, of_a, name_b, of_b in pairs]
    found = compare_runs(runs, objectives)
    reasons = [f"{run.folder}: {reason}" for run in (first, second) for reason in run.summary.validity.reasons]
    if all(comparison.ci95 is None for comparison in found):
        reasons.append("too few requests for an interval: run longer, or more repeats")
    result = RunsCompared(
        a=str(a),
        b=str(b),
        paired=all(same_plan(of_a, of_b) for _, of_a, _, of_b in pairs),
        comparison=found,
        reasons=reasons,
        notes=[f"{run.folder}: {note}" for run in (first, second) for note in run.summary.notes],
        verdict="inconclusive" if reasons else _verdict(found, tolerance_percent / 100),
    )
    return result, EXIT_CODES[result.verdict]


def _pairs(first: FinishedRun, second: FinishedRun, policies: Sequence[str]) -> list[tuple[str, Columns, str, Columns]]:
    """(policy of A, its requests, policy of B, its requests) for each comparison."""
    a, b = columns_by_policy(first.log), columns_by_policy(second.log)
    for name in policies:
        for run, own in ((first, a), (second, b)):
            if name not in own:
                raise UsageError(f"{run.folder}: has no policy '{name}', only {', '.join(own)}")
    if policies:
        shared = list(policies)
    elif len(a) == len(b) == 1:
        return [(*next(iter(a.items())), *next(iter(b.items())))]
    else:
        shared = [name for name in a if name in b]
    if not shared:
        raise UsageError(
            f"no policy is in both runs: {first.folder} has {', '.join(a)}; {second.folder} {', '.join(b)}"
        )
    return [(name, a[name], name, b[name]) for name in shared]


def _verdict(found: Sequence[Comparison], tolerance: float) -> Literal["same", "better", "worse"]:
    effects = {wording.effect(c) for c in found if abs(c.relative if c.relative is not None else 1.0) > tolerance}
    return "worse" if "worse" in effects else "better" if "better" in effects else "same"


def print_comparison(result: RunsCompared, console: Console) -> None:
    table = Table(title=f"A {result.a} → B {result.b}", box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    for position, name in enumerate(HEADER):
        table.add_column(name, justify="right" if position else "left", overflow="fold")
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    for line in (*(f"Note: {note}" for note in result.notes), sentence(result)):
        console.print(line, soft_wrap=True, highlight=False)


def comparison_markdown(result: RunsCompared) -> str:
    """The same in GitHub's Markdown, for a pull request or a step summary."""
    lines = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)], *_rows(result)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    title = f"## prefixwatch compare: {result.verdict}\n\nA `{result.a}` → B `{result.b}`"
    notes = "\n".join(f"- Note: {note}" for note in result.notes)
    return "\n\n".join(part for part in (title, table, notes, sentence(result)) if part) + "\n"


def comparison_page(result: RunsCompared) -> str:
    """The same as one HTML page, in the look of a bench's report."""
    rows = _rows(result)
    chart = comparison_chart(result.comparison, [row[0] for row in rows])
    charts = [chart] if chart.traces else []
    return render_page(
        "compared.html.j2",
        charts,
        {"a": result.a, "b": result.b, "paired": result.paired},
        state=_STATES[result.verdict],
        verdict=result.verdict,
        sentence=sentence(result),
        a=result.a,
        b=result.b,
        notes=result.notes,
        header=HEADER,
        rows=rows,
        charts=charts,
    )


def sentence(result: RunsCompared) -> str:
    """The verdict in words."""
    how = "request by request, on one plan" if result.paired else "as two samples: the runs had different plans"
    if result.reasons:
        return f"Inconclusive: {'; '.join(result.reasons)}"
    words = {
        "same": "no significant difference beyond the tolerance",
        "better": "B is significantly better, and nowhere worse",
        "worse": "B is significantly worse",
    }[result.verdict]
    worse = [METRIC_BY_NAME[c.metric].title for c in result.comparison if wording.effect(c) == "worse"]
    where = f" in {', '.join(dict.fromkeys(worse))}" if result.verdict == "worse" else ""
    return f"{words[0].upper()}{words[1:]}{where} (compared {how})."


def _rows(result: RunsCompared) -> list[list[str]]:
    several = len({comparison.a for comparison in result.comparison}) > 1
    return [_row(comparison, several) for comparison in result.comparison]


def _row(found: Comparison, several: bool) -> list[str]:
    metric = METRIC_BY_NAME[found.metric]
    title = f"{metric.title}{', ' + metric.unit if metric.unit else ''}"
    return [
        f"{found.a.removeprefix('B ')}: {title}" if several else title,
        wording.number(found.b_value),
        wording.number(found.a_value),
        wording.signed(found.difference),
        wording.signed_percent(found.relative),
        wording.interval(found.ci95),
        wording.number(found.p_adjusted, 2),
        wording.effect(found),
    ]


def as_json(result: RunsCompared) -> dict[str, Any]:
    return result.model_dump(mode="json", by_alias=True)
