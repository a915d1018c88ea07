"""The files that people and CI read of a graded run, written beside its request log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixwatch.loadgen.grading.summary import Summary, write_summary
from prefixwatch.loadgen.report.junit import write_junit
from prefixwatch.loadgen.report.page import markdown_summary, write_report
from prefixwatch.loadgen.request_log.columns import RequestLog
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.loadgen.results.run_folder import FinishedRun
from prefixwatch.slo.objective import Objective


def write_graded(folder: Path, run: FinishedRun) -> Summary:
    """Write summary.json, summary.md, junit.xml and report.html; returns the summary."""
    write_summary_files(folder, run.summary, run.log, run.objectives, configuration=run.configuration, fleet=run.fleet)
    return run.summary


def write_summary_files(
    folder: Path,
    summary: Summary,
    log: RequestLog,
    objectives: Sequence[Objective],
    *,
    configuration: Mapping[str, Any],
    fleet: Sequence[FleetRow],
) -> None:
    """The same of a summary; `configuration` is the content of config.yaml."""
    write_summary(folder / "summary.json", summary)
    write_junit(folder / "junit.xml", summary)
    (folder / "summary.md").write_text(markdown_summary(summary), encoding="utf-8")
    write_report(folder / "report.html", summary, log, objectives, configuration, fleet=fleet)
