"""`prefixwatch report`: grade a finished run again, from its log, and write its files anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from rich.console import Console

from loadgen.junit import write_junit
from loadgen.report import console_table, markdown_summary, write_report
from loadgen.summary import build_summary, exit_code, verdict_sentence, write_summary
from loadgen.vllm_bench import vllm_bench_result
from stack.errors import UsageError
from stack.finished_run import FinishedRun, read_run
from stack.out_folder import make_out_folder

FORMATS = ("vllm-bench",)


def run_report(
    folder: Path, slo: Sequence[str], out: Path | None, console: Console, *, also: str | None = None
) -> tuple[dict[str, Any], int]:
    """Answers the content of summary.json and the exit code; `also` is a further format of `FORMATS`.

    Raises UsageError or DocumentError.
    """
    if also is not None and also not in FORMATS:
        raise UsageError(f"--as {also}: choose {' or '.join(FORMATS)}")
    run = read_run(folder, slo)
    target = make_out_folder(out or folder)
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
    if also is not None:
        for path in _write_vllm_bench(run, target):
            console.print(f"Wrote {path}", soft_wrap=True, highlight=False)
    console.print(console_table(summary))
    console.print(verdict_sentence(summary), soft_wrap=True, highlight=False)
    console.print(f"Report: {target / 'report.html'}", soft_wrap=True, highlight=False)
    return summary.model_dump(by_alias=True, mode="json"), exit_code(summary)


def _write_vllm_bench(run: FinishedRun, folder: Path) -> list[Path]:
    """A file a policy."""
    written = []
    for policy in run.summary.policies:
        labels = {"label": policy, "backend": "openai-chat", "scenario": run.summary.scenario}
        rows = run.log.filter(pc.equal(run.log["policy"], policy))
        path = folder / f"vllm-bench-{policy}.json"
        path.write_text(json.dumps(vllm_bench_result(rows, run.objectives, labels), indent=2) + "\n", encoding="utf-8")
        written.append(path)
    return written
