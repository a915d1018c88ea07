"""Finished runs, read back: the folder of a bench or of a Locust run, a request log alone, or another tool's result.

`slo grade`, `report`, `compare` and the Python API all grade what they read here with the same function, so they
reach the same verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from prefixwatch.documents import load, load_plain
from prefixwatch.documents.errors import InputError
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.grading.run_figures import RunFigures, figures_of_runs
from prefixwatch.loadgen.grading.summary import RunFacts, Summary, build_summary, read_summary
from prefixwatch.loadgen.request_log.engine_counters import foreign_traffic
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow, read_fleet
from prefixwatch.loadgen.request_log.records import read_request_table, table_of
from prefixwatch.loadgen.results.other_tools import ToolResult, read_tool_result
from prefixwatch.loadgen.scenario.fleet_section import Event, event_plan
from prefixwatch.loadgen.scenario.model import load_scenario
from prefixwatch.loadgen.scenario.reuse_section import ReuseObjective
from prefixwatch.slo.build import load_objectives
from prefixwatch.slo.objective import Objective

LOG = "requests.parquet"
TARGET = "target"
"""Instead of a kind of engine: those behind an endpoint that runs already."""


class _Kept(BaseModel):
    """A part of config.yaml, of which grading needs these keys."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Arrivals(_Kept):
    concurrency: int | None = None


class _Scenario(_Kept):
    arrivals: _Arrivals | None = None
    warm: bool = False
    slo: list[str] = []
    events: list[Event] = []
    reuse_objective: ReuseObjective | None = None


class _Report(_Kept):
    policy: str
    reasons: list[str]


class _Configuration(_Kept):
    scenario: _Scenario = _Scenario()
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1)
    runs: list[_Report] = []
    notes: list[str] = []
    incomplete: str | None = None


@dataclass(frozen=True)
class FinishedRun:
    """One finished run, graded when `summary` is first read."""

    path: Path
    """The folder, or the request log."""
    log: pa.Table
    objectives: list[Objective]
    facts: RunFacts
    configuration: dict[str, Any] = field(default_factory=dict)
    """The content of config.yaml; empty where there is none."""
    fleet: list[FleetRow] = field(default_factory=list)
    """Empty where the engines weren't watched."""

    @cached_property
    def summary(self) -> Summary:
        """The run, graded from its log."""
        return build_summary(self.log, self.objectives, self.facts, seed=min(self.facts.seeds, default=0))

    @property
    def block_size(self) -> int:
        return self.facts.block_size


def read_run(path: Path, slo: Sequence[str] = ()) -> FinishedRun:
    """A run's folder, its requests.parquet, or the result of another tool (see `other_tools`).

    `slo` replaces the objectives of its scenario. Raises InputError that names what is missing.
    """
    if not (path / LOG).exists() and path.exists() and (result := read_tool_result(path)) is not None:
        return _of_tool(path, result, slo)
    if path.is_dir():
        folder, log_file = path, path / LOG
    elif path.exists():
        folder, log_file = path.parent, path
    else:
        raise InputError(f"{path}: no such folder or file: give a run's folder, or its {LOG}")
    if path.is_dir() and not log_file.exists():
        raise InputError(f"{log_file}: No such file or directory: {path} is not the folder of a finished run")
    try:
        log = read_request_table(log_file)
        beside = log_file.name == LOG
        if beside and (folder / "config.yaml").exists():
            return _of_bench(path, folder, log, slo)
        if beside and (folder / "run.json").exists():
            return _of_locust(path, folder, log, slo)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:  # pydantic's is one, too
        raise InputError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: summary.json or run.json isn't as a run writes it ({error!r}): give a folder as a run left it"
        ) from error
    facts = RunFacts(scenario=log_file.stem, engine="unknown", workers=None, block_size=_block_size(log))
    return FinishedRun(path, log, load_objectives(slo), facts)


def _of_bench(path: Path, folder: Path, log: pa.Table, slo: Sequence[str]) -> FinishedRun:
    configuration = load_plain(folder / "config.yaml")
    found = load(folder / "config.yaml", _Configuration)
    kept = read_summary(folder / "summary.json")
    fleet = read_fleet(folder / "fleet.parquet") if (folder / "fleet.parquet").exists() else []
    scenario, reports = found.scenario, configuration.get("runs", [])
    runs = figures_of_runs(reports, fleet) or kept.runs
    shared = list(shared_engines(runs, log)) if kept.engine == TARGET else []
    facts = RunFacts(
        scenario=kept.scenario,
        engine=kept.engine,
        workers=kept.workers,
        policies=list(kept.policies),
        block_size=found.block_size,
        warm=scenario.warm,
        seeds=kept.seeds,
        versions=kept.versions,
        started_at=kept.started_at,
        host=kept.host,
        profile=kept.profile,
        requested_in_flight=scenario.arrivals.concurrency if scenario.arrivals is not None else None,
        notes=found.notes,
        runs=runs,
        caches=kept.caches,
        events=event_plan(scenario.events, kept.workers) if scenario.events and kept.workers else None,
        client_reasons=[*shared, *client_reasons(reports, found.incomplete)],
        reuse_objective=scenario.reuse_objective,
    )
    return FinishedRun(path, log, load_objectives(list(slo) or scenario.slo), facts, configuration, fleet)


def _of_locust(path: Path, folder: Path, log: pa.Table, slo: Sequence[str]) -> FinishedRun:
    report = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    names = list(slo) or _objectives_of(str(report["scenario"]))
    facts = RunFacts(
        scenario=report["scenario"],
        engine=TARGET,
        workers=None,
        block_size=_block_size(log),
        seeds=[report["seed"]],
        started_at=started_at([report]),
        requested_in_flight=report.get("concurrency"),
        runs=figures_of_runs([report], []),
        client_reasons=client_reasons([report], None),
    )
    return FinishedRun(path, log, load_objectives(names), facts)


def _of_tool(path: Path, result: ToolResult, slo: Sequence[str]) -> FinishedRun:
    facts = RunFacts(
        scenario=path.stem,
        engine=f"target, load by {result.tool}",
        workers=None,
        warm=True,  # what the prompts share is unknown, so that no hit is unexpected
        notes=result.notes,
    )
    return FinishedRun(path, table_of(result.records), load_objectives(slo), facts)


def _objectives_of(scenario: str) -> list[str]:
    """Of a shipped scenario; none for a scenario that isn't at hand."""
    try:
        return list(load_scenario(scenario).slo)
    except InputError:
        return []


def _block_size(log: pa.Table) -> int:
    return int((log.schema.metadata or {}).get(b"prefixwatch.block_size", DEFAULT_BLOCK_SIZE))


def started_at(reports: Sequence[Mapping[str, Any]]) -> str | None:
    """When the first measured phase began, ISO 8601 in UTC; None if none did. `reports` are the runs' run.json."""
    zeros = [zero for report in reports if (zero := report.get("zero_unix_seconds")) is not None]
    return datetime.fromtimestamp(min(zeros), UTC).isoformat(timespec="seconds") if zeros else None


def client_reasons(reports: Sequence[Mapping[str, Any]], incomplete: str | None) -> list[str]:
    """Why the runs aren't valid, from how they were made; `reports` are their run.json."""
    return [
        *([incomplete] if incomplete else []),
        *(f"{report['policy']}: {reason}" for report in reports for reason in report["reasons"]),
    ]


def shared_engines(runs: Sequence[RunFigures], log: pa.Table) -> Iterator[str]:
    """Runs against a target whose engines others used too. Engines that a bench starts have no other clients."""
    for run in runs:
        if run.engine is None:
            continue
        own = log.filter(pc.and_(pc.equal(log["policy"], run.policy), pc.equal(log["repeat"], run.repeat)))
        if (why := foreign_traffic(run.engine, own)) is not None:
            yield f"{run.policy}, repeat {run.repeat + 1}: {why}"
