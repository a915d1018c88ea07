"""`prefixwatch report`: grade a finished run again, from its log, and rewrite its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow.compute as pc
import typer
from rich.console import Console

from prefixwatch.loadgen.grading.summary import exit_code, verdict_sentence
from prefixwatch.loadgen.report.page import console_table
from prefixwatch.loadgen.report.vllm_bench import vllm_bench_result
from prefixwatch.loadgen.results.run_folder import FinishedRun, read_run
from prefixwatch.loadgen.results.write import write_graded
from prefixwatch.stack.cli.command import JsonFlag, command, finish, load_option, new_app, output_option, plain_console
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import file_name, make_out_folder

app = new_app()
FORMATS = ("vllm-bench",)


def run_report(
    folder: Path, slo: Sequence[str], out: Path | None, console: Console, *, also: str | None = None
) -> tuple[dict[str, Any], int]:
    """Returns the content of summary.json and the exit code; `also` is a further format of `FORMATS`.

    Raises UsageError or DocumentError.
    """
    if also is not None and also not in FORMATS:
        raise UsageError(f"--as {also}: choose {' or '.join(FORMATS)}")
    run = read_run(folder, slo)
    target = make_out_folder(out or (folder if folder.is_dir() else folder.parent))
    summary = write_graded(target, run)
    if also is not None:
        for path in _write_vllm_bench(run, target):
            console.print(f"Wrote {path}", soft_wrap=True, highlight=False)
    console.print(console_table(summary))
    console.print(verdict_sentence(summary), soft_wrap=True, highlight=False)
    console.print(f"Report: {target / 'report.html'}", soft_wrap=True, highlight=False)
    return summary.model_dump(by_alias=True, mode="json"), exit_code(summary)


def _write_vllm_bench(run: FinishedRun, folder: Path) -> list[Path]:
    """One file per policy."""
    written = []
    for policy in run.summary.policies:
        labels = {"label": policy, "backend": "openai-chat", "scenario": run.summary.scenario}
        rows = run.log.filter(pc.equal(run.log["policy"], policy))
        path = folder / f"vllm-bench-{file_name(policy)}.json"
        path.write_text(json.dumps(vllm_bench_result(rows, run.objectives, labels), indent=2) + "\n", encoding="utf-8")
        written.append(path)
    return written


@command(app, "report")
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, as `bench --out` left it.")],
    slo: Annotated[list[str] | None, load_option(help="SLO document to grade on instead of the run's own.")] = None,
    out: Annotated[Path | None, output_option(help="Folder for the new files; default: the run's.")] = None,
    also: Annotated[
        str | None,
        output_option("--as", help="An additional format: `vllm-bench` writes one JSON file per policy."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade a finished run again from its request log, for instance on other SLOs, and rewrite its report.

    Example: `prefixwatch report results/latest --slo ttft --slo goodput`
    """
    finish(*run_report(run, slo or [], out, plain_console(stderr=as_json), also=also), as_json=as_json)
