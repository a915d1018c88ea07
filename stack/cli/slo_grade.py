"""`prefixwatch slo grade`: a load test's request log, graded by SLO documents as `bench` and `report` grade it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from prefixwatch.loadgen.grading.summary import exit_code, verdict_sentence
from prefixwatch.loadgen.report.rows import objective_row
from prefixwatch.loadgen.results.run_folder import read_run


def grade(requests: Path, names_or_paths: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Each policy's grade by each objective with its interval, the run's validity and verdict; and the exit code.

    `requests` is a run's folder or its requests.parquet. Raises InputError, also for an SLO that single requests can't
    be graded by.
    """
    summary = read_run(requests, names_or_paths).summary
    policies = {
        name: [
            {**objective.model_dump(), "result": objective_row(name, objective)["result"]}
            for objective in own.objectives
        ]
        for name, own in summary.policies.items()
    }
    found = {
        "requests": str(requests),
        "policies": policies,
        "baseline": summary.baseline,
        "validity": summary.validity.model_dump(),
        "verdict": summary.verdict,
        "sentence": verdict_sentence(summary),
    }
    return found, exit_code(summary)


def grade_table(found: Mapping[str, Any]) -> Table:
    """The objectives of each policy, one row each."""
    table = Table("policy", "objective", "rule", "measured", "95 % CI", "good", "result")
    for policy, rows in found["policies"].items():
        for row in rows:
            share = "unknown" if row["measured"] is None else f"{row['measured'] * 100:.2f} %"
            limits = "–" if row["ci95"] is None else "…".join(f"{100 * limit:.1f}" for limit in row["ci95"]) + " %"
            good = f"{row['good']:,} of {row['total']:,}"
            table.add_row(policy, row["name"], row["rule"], share, limits, good, row["result"])
    return table
