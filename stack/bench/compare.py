"""`prefixwatch compare`: which figures of two runs differ, by how much, and with what confidence; a gate for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from prefixwatch.loadgen.grading import wording
from prefixwatch.loadgen.grading.figures import DEFINITIONS
from prefixwatch.loadgen.report.comparison_chart import comparison_chart
from prefixwatch.loadgen.report.page import render_page
from prefixwatch.loadgen.results.comparison import RunDifference, RunsCompared, run_compare
from prefixwatch.router.policies.spec import split
from prefixwatch.stack.cli.command import JsonFlag, command, finish, load_option, new_app, output_option, plain_console
from prefixwatch.stack.local.out_folder import append_text, write_text

app = new_app()

_STATES = {"same": "pass", "better": "pass", "worse": "fail", "inconclusive": "inconclusive"}
"""The colour of the page's verdict."""
HEADER = ("figure", "A", "B", "B − A", "relative", "95 % CI of B − A", "p (Holm)", "effect")


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
    worse = [DEFINITIONS[c.metric].title for c in result.comparison if c.effect == "worse"]
    where = f" in {', '.join(dict.fromkeys(worse))}" if result.verdict == "worse" else ""
    return f"{words[0].upper()}{words[1:]}{where} (compared {how})."


def _rows(result: RunsCompared) -> list[list[str]]:
    several = len({comparison.a for comparison in result.comparison}) > 1
    return [_row(comparison, several) for comparison in result.comparison]


def _row(found: RunDifference, several: bool) -> list[str]:
    title = DEFINITIONS[found.metric].heading
    return [
        f"{found.b}: {title}" if several else title,
        wording.value_text(found.a_value, found.unit),
        wording.value_text(found.b_value, found.unit),
        wording.difference_text(found.difference, found.unit),
        wording.signed_percent(found.relative),
        wording.difference_limits(found.ci95, found.unit),
        wording.number(found.p_adjusted, 2),
        found.effect,
    ]


@command(app, "compare")
def compare(
    run_a: Annotated[
        Path,
        typer.Argument(
            help="The baseline: folder of a run, or the result of AIPerf, GuideLLM, inference-perf or vllm bench."
        ),
    ],
    run_b: Annotated[Path, typer.Argument(help="The run to compare with it, of any of these kinds.")],
    policy: Annotated[
        str, load_option(help="Policies to compare, comma-separated; default: all that both runs have.")
    ] = "",
    slo: Annotated[
        list[str] | None, load_option(help="SLO document that defines goodput; default: the runs' own.")
    ] = None,
    tolerance: Annotated[
        float, load_option(min=0, help="Ignore significant regressions smaller than this percentage.")
    ] = 0.0,
    markdown: Annotated[
        Path | None, output_option(help="Append the result to this file as Markdown, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    html: Annotated[Path | None, output_option(help="Write the result to this HTML file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which figures of two runs differ, by how much and with what confidence; 1 if the second is worse.

    Example: `prefixwatch compare results/baseline results/latest --tolerance 3`
    """
    result, exit_code = run_compare(run_a, run_b, split(policy), slo or [], tolerance)
    if markdown is not None:
        append_text(markdown, comparison_markdown(result), "--markdown")
    if html is not None:
        write_text(html, comparison_page(result), "--html")
    if not as_json:
        print_comparison(result, plain_console())
    finish(result.model_dump(mode="json", by_alias=True), exit_code, as_json=as_json)
