"""The runs of `simulate --tune`, on all cores or a Ray cluster: each value under each seed, and held-back traffic."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixwatch.loadgen.scenario.model import load_scenario
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from prefixwatch.stack.bench.results import versions
from prefixwatch.stack.simulation.options import SimulateOptions
from prefixwatch.stack.simulation.pool import run_all
from prefixwatch.stack.simulation.runs import SimulatedFleet, Watching, recorded_requests
from prefixwatch.stack.simulation.tune import Point, Tune, point, tune_table, tuned_policies
from prefixwatch.stack.simulation.tune_page import write_tune_report

_Task = tuple[SimulateOptions, str, int]
"""The options, a policy, and which traffic: the number of the seed, or of the half of a recording."""


def run_tune(
    options: SimulateOptions, tune: Tune, console: Console, *, processes: int | None = None
) -> tuple[dict[str, Any], int]:
    """Tune, print, and write tune.json and report.html to `options.out`; the exit code is 0 where the choice holds on
    the held-back traffic, else 3. Raises InputError."""
    parts = 2 if options.is_recording else options.repeats + 1
    with console.status(f"{len(tune.policies)} policies × {parts} runs …"):
        tasks = [(options, spec, part) for spec in tune.policies.values() for part in range(parts)]
        points = run_all(_run, tasks, processes=processes or os.cpu_count() or 1, ray_address=options.ray)
    runs = {label: points[k * parts : (k + 1) * parts] for k, label in enumerate(tune.policies)}
    result = tuned_policies(tune, runs)
    result |= {
        "input": options.input,
        "held_back": "the second half of the recording"
        if options.is_recording
        else f"seed {options.seed + options.repeats}",
    }
    console.print(tune_table(result))
    console.print(f"{result['statement']} ({result['held_back']})", soft_wrap=True, highlight=False)
    if options.out is not None:
        given = {"tune": options.tune, "policy": options.policy, "versions": versions()}
        write_tune(options.out, Path(options.input).stem, result, given)
        console.print(f"Report: {options.out / 'report.html'}", soft_wrap=True, highlight=False)
    return result, 0 if result["holds"] else 3


def write_tune(folder: Path, name: str, result: dict[str, Any], config: dict[str, Any], page: str = "report") -> None:
    """Write `tune.json` and its page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tune.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    write_tune_report(folder / f"{page}.html", name, result, config)


def _run(task: _Task) -> Point:
    options, policy, part = task
    watching = Watching(Console(quiet=True))
    try:
        if options.is_recording:
            fleet, requests = _recorded(options, part)
        else:
            fleet, requests = _drawn(options, part)
        return point(fleet.serve(requests, policy, part, watching).records, fleet.workers)
    finally:
        watching.end()


@cache
def _drawn(options: SimulateOptions, part: int) -> tuple[SimulatedFleet, list[SimulatedRequest]]:
    scenario = load_scenario(options.input)
    requests = ScenarioTraffic(scenario).requests(seed=options.seed + part)
    return SimulatedFleet.of_scenario(scenario, options), requests


@cache
def _recorded(options: SimulateOptions, part: int) -> tuple[SimulatedFleet, list[SimulatedRequest]]:
    """A half of the recording, from its first arrival on."""
    trace = recorded_requests(options)
    middle = len(trace.requests) // 2
    half = trace.requests[middle:] if part else trace.requests[:middle]
    begins_s = half[0].arrival_s if half else 0.0
    requests = [replace(request, arrival_s=request.arrival_s - begins_s) for request in half]
    return SimulatedFleet.of_recording(options, trace), requests
