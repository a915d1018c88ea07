"""What a bench collects, and the files it leaves in its folder."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.grading.run_figures import figures_of_runs
from prefixwatch.loadgen.grading.summary import RunFacts, Summary, build_summary, exit_code, verdict_sentence
from prefixwatch.loadgen.report.event_section import event_table, move_table
from prefixwatch.loadgen.report.page import console_table
from prefixwatch.loadgen.report.reuse_section import reuse_table
from prefixwatch.loadgen.report.sections.caches import break_even_lines, cache_table
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow, put_on_clock, write_fleet
from prefixwatch.loadgen.request_log.records import RequestRecord, table_of, write_requests
from prefixwatch.loadgen.results.run_folder import TARGET, client_reasons, shared_engines, started_at
from prefixwatch.loadgen.results.write import write_summary_files
from prefixwatch.loadgen.scenario.fleet_section import EventPlan
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.slo.objective import Objective
from prefixwatch.stack.bench.schedule import Run


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
    events: EventPlan | None = None
    """What happened to the fleet in each run."""
    notes: list[str] = field(default_factory=list)
    """What to know first."""
    incomplete: str | None = None
    """Why these aren't all the runs that were to be made."""

    def add(self, run: Run, records: list[RequestRecord], report: dict[str, Any], fleet_rows: list[FleetRow]) -> None:
        """`report` is the load generator's run.json."""
        put_on_clock(fleet_rows, report["zero_unix_seconds"])
        self.records += records
        self.reports.append({"position": run.position, **report})
        self.fleet += fleet_rows

    def summary(self) -> Summary:
        runs = figures_of_runs(self.reports, self.fleet)
        shared = list(shared_engines(runs, table_of(self.records))) if self.engine == TARGET else []
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
            started_at=started_at(self.reports),
            host=platform.node(),
            profile=self.scenario.profiles if self.engine == "simulated" else None,
            client_reasons=[*shared, *client_reasons(self.reports, self.incomplete)],
            notes=self.notes,
            runs=runs,
            events=self.events,
            reuse_objective=self.scenario.reuse_objective,
        )
        return build_summary(self.records, self.objectives, facts, seed=self.seed)


def write_results(folder: Path, runs: BenchRuns, console: Console) -> tuple[dict[str, Any], int]:
    """Grade, write every file and print the verdict; returns the content of summary.json and the exit code."""
    summary = runs.summary()
    configuration = {**runs.again, "incomplete": runs.incomplete, "runs": runs.reports, "notes": runs.notes}
    write_run(folder, summary, runs.records, runs.fleet, runs.objectives, configuration=configuration)
    print_summary(summary, console)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    return summary.model_dump(by_alias=True, mode="json"), exit_code(summary)


def print_summary(summary: Summary, console: Console) -> None:
    """The tables of a run, and its verdict."""
    console.print(console_table(summary))
    if summary.events:
        console.print(event_table(summary.events))
    if (parts := reuse_table(summary)) is not None:
        console.print(parts)
    if summary.moves:
        console.print(move_table(summary.moves))
    if summary.caches:
        console.print(cache_table(summary.caches))
        console.print("\n".join(break_even_lines(summary.caches)), soft_wrap=True, highlight=False)
    console.print(verdict_sentence(summary), soft_wrap=True, highlight=False)


def options_document(options: Any) -> dict[str, Any]:
    """A command's options as they go into config.yaml; paths are texts."""
    given: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return given


def write_run(
    folder: Path,
    summary: Summary,
    records: Sequence[RequestRecord],
    fleet: Sequence[FleetRow],
    objectives: Sequence[Objective],
    *,
    configuration: Mapping[str, Any],
) -> None:
    """Every file of a graded run, for `report` and `compare`; `configuration` is needed to repeat it."""
    write_requests(folder / "requests.parquet", records, summary.block_size)
    write_fleet(folder / "fleet.parquet", fleet)
    configuration = {**configuration, "block_size": summary.block_size, "versions": versions()}
    text = yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    write_summary_files(folder, summary, records, objectives, configuration=configuration, fleet=fleet)


def versions() -> dict[str, str]:
    """What the figures may depend on."""
    packages = ("prefixwatch", "aiohttp", "locust", "tokenizers", "numpy")
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        **{package: version(package) for package in packages},
    }
