"""`bench --tune`: the values of an option compared by the runs of a bench, the last repeat held back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from prefixwatch.stack.bench.results import BenchRuns, versions
from prefixwatch.stack.simulation.tune import Point, Tune, point, tune_table, tuned_policies
from prefixwatch.stack.simulation.tune_run import write_tune

_NOT_SURE = 3


def write_tuned(
    folder: Path, tune: Tune, runs: BenchRuns, graded: tuple[dict[str, Any], int], console: Console
) -> tuple[dict[str, Any], int]:
    """Write tune.json and tune.html beside the bench's own files, and print the table.

    `graded` is the bench's own result. The exit code is 0 where the choice holds on the held-back repeat and the runs
    are valid, else 3.
    """
    summary, _ = graded
    last = max(record.repeat for record in runs.records)
    found = {label: [_point(runs, label, repeat) for repeat in range(last + 1)] for label in tune.policies}
    result = tuned_policies(tune, found) | {
        "input": runs.scenario.name,
        "held_back": f"repeat {last + 1}",
        "validity": summary["validity"],
    }
    console.print(tune_table(result))
    console.print(f"{result['statement']} ({result['held_back']})", soft_wrap=True, highlight=False)
    config = {**runs.again, "versions": versions()}
    write_tune(folder, runs.scenario.name, result, config, page="tune")
    console.print(f"Report: {folder / 'tune.html'}", soft_wrap=True, highlight=False)
    return result, 0 if result["holds"] and summary["validity"]["valid"] else _NOT_SURE


def _point(runs: BenchRuns, policy: str, repeat: int) -> Point:
    return point([r for r in runs.records if (r.policy, r.repeat) == (policy, repeat)], runs.workers or 1)
