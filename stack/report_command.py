"""`prefixwatch report`: grade a finished run again, from its log, and write its files anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.junit import write_junit
from loadgen.report import console_table, markdown_summary, write_report
from loadgen.summary import build_summary, exit_code, verdict_sentence, write_summary
from stack.finished_run import read_run


def run_report(folder: Path, slo: Sequence[str], out: Path | None, console: Console) -> tuple[dict[str, Any], int]:
    """Answers the content of summary.json and the exit code. Raises UsageError or DocumentError."""
    run = read_run(folder, slo)
    target = out or folder
    target.mkdir(parents=True, exist_ok=True)
    summary = build_summary(run.log, run.objectives, run.facts(), seed=min(run.summary.seeds, default=0))
    write_summary(target / "summary.json", summary)
    write_junit(target / "junit.xml", summary)
    (target / "summary.md").write_text(markdown_summary(summary), encoding="utf-8")
    write_report(
        target / "report.html",
        summary,
        run.log,
        run.objectives,
        run.configuration,
        block_size=run.block_size,
        fleet=run.fleet,
    )
    console.print(console_table(summary))
    console.print(verdict_sentence(summary), soft_wrap=True, highlight=False)
    console.print(f"Report: {target / 'report.html'}", soft_wrap=True, highlight=False)
    return summary.model_dump(by_alias=True, mode="json"), exit_code(summary)
