"""What a bench collects, and the files it leaves in its folder."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from loadgen.fleet_rows import FleetRow, put_on_clock, write_fleet
from loadgen.junit import write_junit
from loadgen.records import RequestRecord, write_requests
from loadgen.report import console_table, markdown_summary, write_report
from loadgen.run_figures import figures_of_runs
from loadgen.scenario import Scenario
from loadgen.summary import RunFacts, Summary, build_summary, exit_code, verdict_sentence, write_summary
from slo.objective import Objective
from stack.schedule import Run


@dataclass(slots=True)
class BenchRuns:
    """All runs of a bench, as they come in."""

    scenario: Scenario
    objectives: list[Objective]
    engine: str
    workers: int | None
    """None: a target's, which nobody here knows."""
    policies: list[str]
    seed: int
    again: Mapping[str, Any]
    """Everything needed to run it again."""
    block_size: int = DEFAULT_BLOCK_SIZE
    records: list[RequestRecord] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    fleet: list[FleetRow] = field(default_factory=list)
    incomplete: str | None = None
    """Why these aren't all the runs that were to be made."""

    def add(self, run: Run, records: list[RequestRecord], report: dict[str, Any], fleet_rows: list[FleetRow]) -> None:
        """`report` is the load generator's run.json."""
        put_on_clock(fleet_rows, report["zero_unix_seconds"])
        self.records += records
        self.reports.append({"position": run.position, **report})
        self.fleet += fleet_rows

    def summary(self) -> Summary:
        facts = RunFacts(
            scenario=self.scenario.name,
            engine=self.engine,
            workers=self.workers,
            policies=self.policies,
            block_size=self.block_size,
            warm=self.scenario.warm,
            requested_in_flight=self.scenario.arrivals.concurrency if self.scenario.arrivals is not None else None,
            seeds=sorted({report["seed"] for report in self.reports}),
            versions=versions(),
            client_reasons=client_reasons(self.reports, self.incomplete),
            runs=figures_of_runs(self.reports, self.fleet),
        )
        return build_summary(self.records, self.objectives, facts, seed=self.seed)


def write_results(folder: Path, runs: BenchRuns, console: Console) -> tuple[dict[str, Any], int]:
    """Grade, write every file and print the verdict; answers the content of summary.json and the exit code."""
    write_requests(folder / "requests.parquet", runs.records)
    write_fleet(folder / "fleet.parquet", runs.fleet)
    summary = runs.summary()
    write_summary(folder / "summary.json", summary)
    write_junit(folder / "junit.xml", summary)
    (folder / "summary.md").write_text(markdown_summary(summary), encoding="utf-8")
    configuration = {
        **runs.again,
        "block_size": runs.block_size,
        "versions": versions(),
        "incomplete": runs.incomplete,
        "runs": runs.reports,
    }
    (folder / "config.yaml").write_text(
        yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    write_report(
        folder / "report.html",
        summary,
        runs.records,
        runs.objectives,
        configuration,
        block_size=runs.block_size,
        fleet=runs.fleet,
    )
    console.print(console_table(summary))
    console.print(verdict_sentence(summary), soft_wrap=True, highlight=False)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    return summary.model_dump(by_alias=True, mode="json"), exit_code(summary)


def client_reasons(reports: Sequence[Mapping[str, Any]], incomplete: str | None) -> list[str]:
    """Why the runs can't be believed, told by how they were made; `reports` are their run.json."""
    return [
        *([incomplete] if incomplete else []),
        *(f"{report['policy']}: {reason}" for report in reports for reason in report["reasons"]),
    ]


def versions() -> dict[str, str]:
    """What the figures may depend on."""
    packages = ("prefixwatch", "aiohttp", "locust", "tokenizers", "numpy")
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        **{package: version(package) for package in packages},
    }
