"""Drills for people: what came of each, and a confusion matrix of faults and the causes that were named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runbooks.diagnosis import Diagnosis
from stack.drill import DrillResult

_NOTHING = "nothing"


def print_results(results: Sequence[DrillResult], console: Console) -> None:
    """A row a drill on a terminal."""
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
        return diagnosis.verdict
    return ", then ".join(f"{each.id} ({each.score})" for each in diagnosis.causes[:2])


def _confusion(results: Sequence[DrillResult]) -> list[str]:
    """Rows are faults, columns the causes that were named first; the diagonal is right."""
    wanted = [each.fault.cause or _NOTHING for each in results]
    named = [each.named or each.diagnosis.verdict.replace("nothing wrong", _NOTHING) for each in results]
    columns = list(dict.fromkeys([*wanted, *named]))
    legend = [f"{number} {name}" for number, name in enumerate(columns, 1)]
    lines = [f"Named first: {', '.join(legend)}.", ""]
    lines += ["| injected \\ named | " + " | ".join(str(number) for number in range(1, len(columns) + 1)) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for each, name in zip(results, named, strict=True):
        lines.append("| " + " | ".join([each.name, *("1" if name == column else "" for column in columns)]) + " |")
    return lines
