"""A run that is over, read back from its folder: its log, what it was graded on, and whether it can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from loadgen.fleet_rows import FleetRow, read_fleet
from loadgen.records import read_request_table
from loadgen.run_figures import figures_of_runs
from loadgen.summary import RunFacts, Summary, read_summary
from slo.document import load_objectives
from slo.objective import Objective
from stack.errors import UsageError
from stack.results import client_reasons


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """`configuration` is the content of config.yaml."""

    folder: Path
    log: pa.Table
    summary: Summary
    configuration: dict[str, Any]
    objectives: list[Objective]
    fleet: list[FleetRow]
    """Empty where the engines weren't watched."""

    @property
    def block_size(self) -> int:
        return int(self.configuration.get("block_size", DEFAULT_BLOCK_SIZE))

    def facts(self) -> RunFacts:
        """What the log doesn't say, as the summary has it."""
        kept, scenario = self.summary, self.configuration.get("scenario", {})
        return RunFacts(
            scenario=kept.scenario,
            engine=kept.engine,
            workers=kept.workers,
            policies=list(kept.policies),
            block_size=self.block_size,
            warm=bool(scenario.get("warm")),
            seeds=kept.seeds,
            versions=kept.versions,
            requested_in_flight=(scenario.get("arrivals") or {}).get("concurrency"),
            runs=figures_of_runs(self.configuration.get("runs", []), self.fleet),
            client_reasons=client_reasons(self.configuration.get("runs", []), self.configuration.get("incomplete")),
        )


def read_run(folder: Path, slo: Sequence[str] = ()) -> FinishedRun:
    """What `bench` left in its --out folder; `slo` replaces the objectives that it was graded on.

    Raises UsageError naming what is missing, and DocumentError for an SLO document.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder: give the --out folder of a bench")
    try:
        configuration = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        summary = read_summary(folder / "summary.json")
        log = read_request_table(folder / "requests.parquet")
        fleet = read_fleet(folder / "fleet.parquet") if (folder / "fleet.parquet").exists() else []
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}: {folder} is not the folder of a finished bench"
        ) from error
    except ValueError as error:  # pydantic's is one, too
        raise UsageError(f"{folder}: {error}") from error
    names = list(slo) or configuration.get("scenario", {}).get("slo") or []
    return FinishedRun(folder, log, summary, configuration, load_objectives(names), fleet)
