"""`prefixwatch drill`: make a fault in a small stack of your own and see what alerts and diagnosis make of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefixwatch.documents.hints import did_you_mean
from prefixwatch.runbooks.diagnosis import Diagnosis
from prefixwatch.stack.cli.command import JsonFlag, command, finish, new_app, output_option, print_json
from prefixwatch.stack.diagnose.report import print_report
from prefixwatch.stack.drill.drill import DrillResult, run_drill
from prefixwatch.stack.drill.faults import FAULTS
from prefixwatch.stack.errors import UsageError

app = new_app()
_NOTHING = "nothing"


def run_drills(names: Sequence[str], console: Console, *, as_json: bool) -> tuple[list[dict[str, Any]], int]:
    """Run these drills, or all; returns one document per drill, and 1 if one went wrong. Raises UsageError."""
    unknown = sorted(set(names) - set(FAULTS))
    if unknown:
        raise UsageError(f"no fault '{unknown[0]}': {did_you_mean(unknown[0], FAULTS)}; --list shows them all")
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:  # short, for the sockets' sake
        results = []
        for name in names or FAULTS:
            with console.status(f"{name}: {FAULTS[name].title} …"):
                results.append(asyncio.run(run_drill(name, FAULTS[name], Path(folder) / name)))
            if not as_json and len(names) == 1:
                print_report(results[-1].diagnosis, "the drill's Prometheus", None, results[-1].firing, console)
    if not as_json:
        print_results(results, console)
    return [as_document(each) for each in results], 0 if all(each.passed for each in results) else 1


async def run_in_lanes(names: Sequence[str], folder: Path, lanes: int) -> list[DrillResult]:
    """Run `lanes` drills at a time; results in the order of the names."""
    free = asyncio.Semaphore(lanes)

    async def one(name: str) -> DrillResult:
        async with free:
            return await run_drill(name, FAULTS[name], folder / name)

    return list(await asyncio.gather(*(one(name) for name in names)))


@command(app, "drill")
def drill(
    fault: Annotated[
        list[str] | None, typer.Argument(help="Faults by name; default: all of them.", show_default=False)
    ] = None,
    list_: Annotated[bool, output_option("--list", help="List the faults and exit.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Practise: inject a fault into a small local stack, and see which alerts fire and what the diagnosis says.

    Starts simulated engines, a router, the exporter, Prometheus and Alertmanager; under a minute per fault. 1 if an
    alert or the named cause isn't the right one.

    Example: `prefixwatch drill hot-prefix`
    """
    console = Console(stderr=as_json)
    if list_:
        _list_faults(console, as_json=as_json)
        return
    results, exit_code = run_drills(fault or [], console, as_json=as_json)
    finish({"drills": results}, exit_code, as_json=as_json)


def _list_faults(console: Console, *, as_json: bool) -> None:
    if as_json:
        print_json({"faults": [{"name": name, "title": fault.title} for name, fault in FAULTS.items()]})
        return
    table = Table("fault", "what happens")
    for name, fault in FAULTS.items():
        table.add_row(name, fault.title)
    console.print(table)


def print_results(results: Sequence[DrillResult], console: Console) -> None:
    """Print one row per drill."""
    table = Table("", "fault", "right alerts", "symptoms", "wrong or missed", "diagnosis", "without Prometheus")
    for each in results:
        mark = "[green]✓[/green]" if each.passed else "[red]✗[/red]"
        table.add_row(mark, *(escape(cell) for cell in _cells(each)))
    console.print(table)


def as_markdown(results: Sequence[DrillResult]) -> str:
    """The table and the confusion matrix."""
    lines = [
        "| | fault | right alerts (s after the fault) | symptoms | wrong or missed | diagnosis (score) "
        "| without Prometheus |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(("✓" if each.passed else "✗", *_cells(each))) + " |" for each in results]
    return "\n".join([*lines, "", *_confusion(results)])


def as_document(result: DrillResult) -> dict[str, Any]:
    """For `--json`."""
    return {
        "fault": result.name,
        "passed": result.passed,
        "cause": result.fault.cause,
        "named": result.named,
        "verdict": result.diagnosis.verdict,
        "notified": result.notified,
        "wrong_alerts": result.wrong_alerts,
        "missed_alerts": result.missed_alerts,
        "ranking": [{"cause": each.id, "score": each.score} for each in result.diagnosis.causes],
    }


def _cells(result: DrillResult) -> tuple[str, ...]:
    notified = result.notified
    right = ", ".join(f"{name} ({notified[name]:.0f})" for name in notified if name in result.fault.alerts)
    symptoms = ", ".join(sorted(set(notified) & result.fault.symptoms))
    wrong = [*(f"wrong: {name}" for name in result.wrong_alerts), *(f"missed: {n}" for n in result.missed_alerts)]
    fault = f"{result.name}: {result.fault.title}"
    return fault, right, symptoms, ", ".join(wrong), _ranking(result.diagnosis), _ranking(result.without_prometheus)


def _ranking(diagnosis: Diagnosis) -> str:
    if diagnosis.found is None:
        signs = [f"sign of {each.id}" for each in diagnosis.possible]
        signs += [f"unexplained: {each.step.id}" for each in diagnosis.unexplained]
        unchecked = [f"not checked: {each.id}" for each in diagnosis.unchecked]
        reasons = ", ".join(signs or unchecked)
        return f"{diagnosis.verdict} ({reasons})" if reasons else diagnosis.verdict
    return ", then ".join(f"{each.id} ({each.score})" for each in diagnosis.causes[:2])


def _confusion(results: Sequence[DrillResult]) -> list[str]:
    """Rows are faults, columns the causes that were named first; the diagonal is right."""
    wanted = [each.fault.cause or _NOTHING for each in results]
    silent = [_NOTHING if each.fault.cause is None and not each.unsure else each.diagnosis.verdict for each in results]
    named = [each.named or none for each, none in zip(results, silent, strict=True)]
    columns = list(dict.fromkeys([*wanted, *named]))
    legend = [f"{number} {name}" for number, name in enumerate(columns, 1)]
    lines = [f"Named first: {', '.join(legend)}.", ""]
    lines += ["| injected \\ named | " + " | ".join(str(number) for number in range(1, len(columns) + 1)) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for each, name in zip(results, named, strict=True):
        lines.append("| " + " | ".join([each.name, *("1" if name == column else "" for column in columns)]) + " |")
    return lines
