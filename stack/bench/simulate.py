"""`prefixwatch simulate`: a scenario or a trace in virtual time, graded like a bench."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from prefixwatch.engines.model.profiles import DEFAULT_PROFILE
from prefixwatch.loadgen.grading.run_figures import RunFigures
from prefixwatch.loadgen.grading.summary import RunFacts, Summary, build_summary, exit_code
from prefixwatch.loadgen.report.levels import write_levels_report
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.loadgen.scenario.reuse_section import ReuseObjective
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic
from prefixwatch.slo.build import load_objectives
from prefixwatch.slo.objective import Objective
from prefixwatch.stack.bench.levels import LevelRun, run_levels, write_levels
from prefixwatch.stack.bench.results import options_document, print_summary, versions, write_run
from prefixwatch.stack.cli.command import command, finish, new_app, plain_console
from prefixwatch.stack.local.out_folder import make_out_folder
from prefixwatch.stack.simulation.caches import figures_of_results
from prefixwatch.stack.simulation.constants import Constants, calibrated, constants_note
from prefixwatch.stack.simulation.options import SimulateOptions, check
from prefixwatch.stack.simulation.runs import SimulatedFleet, Watching, recorded_requests
from prefixwatch.stack.simulation.tune import parse_tune
from prefixwatch.stack.simulation.tune_run import run_tune

app = new_app()


def run_simulate(options: SimulateOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Simulate; returns the bench's summary and exit code, and writes its files to `options.out`. Raises InputError."""
    check(options)
    if options.out is not None:
        make_out_folder(options.out)
    if options.tune:
        return run_tune(options, parse_tune(options.tune, options.policy), console)
    notes: list[str] = []
    if options.calibrate:
        constants = _constants(options)
        options = replace(options, policy=",".join(calibrated(options.specs, constants).values()))
        notes.append(constants_note(constants))
        console.print(f"Note: {notes[0]}", soft_wrap=True, highlight=False)
    watching = Watching(console, keeps_rows=options.out is not None)
    try:
        if options.levels is not None:
            return _levels(options, watching)
        run = _of_recording if options.is_recording else _of_scenario
        return run(options, watching, notes)
    finally:
        watching.end()


def _constants(options: SimulateOptions) -> Constants:
    if options.is_recording:
        trace = recorded_requests(options)
        return SimulatedFleet.of_recording(options, trace).constants(trace.requests)
    scenario = load_scenario(options.input)
    requests = ScenarioTraffic(scenario).requests(seed=options.seed)
    return SimulatedFleet.of_scenario(scenario, options).constants(requests)


def _of_recording(options: SimulateOptions, watching: Watching, notes: Sequence[str]) -> tuple[dict[str, Any], int]:
    trace = recorded_requests(options)
    fleet = SimulatedFleet.of_recording(options, trace)
    runs = [fleet.serve_all(trace.requests, policy, 0, watching) for policy in options.specs.values()]
    results = [result for own in runs for result in own]
    facts = _facts(Path(options.input).name, fleet, results, options.profile or DEFAULT_PROFILE, [options.seed])
    summary = build_summary(_records(results), [], facts, seed=options.seed)
    # A trace names a prompt's last, partial block too; the published hit rates count it, so the engines' own counts do.
    ratios = {result.policy: result.block_hit_ratio for result in results}
    policies = {name: own.with_value("block_hit_ratio", ratios[name]) for name, own in summary.policies.items()}
    notes = [*notes, *trace.notes]
    summary = summary.model_copy(update={"policies": policies, "notes": [*notes, *summary.notes]})
    return _finished(options, watching, summary, results, [], None, notes)


def _of_scenario(options: SimulateOptions, watching: Watching, notes: Sequence[str]) -> tuple[dict[str, Any], int]:
    scenario = load_scenario(options.input)
    fleet = SimulatedFleet.of_scenario(scenario, options)
    results: list[SimulationResult] = []
    traffic, seeds = ScenarioTraffic(scenario), range(options.seed, options.seed + options.repeats)
    for repeat, seed in enumerate(seeds):
        requests = traffic.requests(seed=seed)
        for policy in options.specs.values():
            results += fleet.serve_all(requests, policy, repeat, watching)
    objectives = load_objectives(scenario.slo)
    profile_name = options.profile or scenario.profiles or DEFAULT_PROFILE
    facts = _facts(scenario.name, fleet, results, profile_name, seeds, scenario.reuse_objective)
    summary = build_summary(_records(results), objectives, replace(facts, notes=notes), seed=options.seed)
    return _finished(options, watching, summary, results, objectives, scenario, notes)


def _levels(options: SimulateOptions, watching: Watching) -> tuple[dict[str, Any], int]:
    """Sweep or search in virtual time."""
    assert options.levels is not None
    scenario = load_scenario(options.input)
    unwatched = Watching(Console(file=None, quiet=True))  # the levels print their own lines

    async def run_level(level: Scenario, policy: str, repeat: int) -> LevelRun:
        requests = ScenarioTraffic(level).requests(seed=options.seed + repeat)
        fleet = SimulatedFleet.of_scenario(level, options)
        return LevelRun(fleet.serve(requests, options.specs[policy], repeat, unwatched).records)

    found, code = asyncio.run(
        run_levels(
            scenario,
            load_objectives(scenario.slo),
            options.policies,
            options.levels,
            run=run_level,
            console=watching.console,
        )
    )
    if options.out is not None:
        write_levels(options.out, found)
        report = options.out / "report.html"
        write_levels_report(report, found, code, {**_again(options, scenario), "versions": versions()})
        watching.console.print(f"Report: {report}", soft_wrap=True, highlight=False)
    return found, code


def _facts(
    name: str,
    fleet: SimulatedFleet,
    results: Sequence[SimulationResult],
    profile_name: str,
    seeds: Sequence[int],
    reuse_objective: ReuseObjective | None = None,
) -> RunFacts:
    prefill = fleet.prefill_workers
    return RunFacts(
        scenario=name,
        engine="simulated in virtual time" + ("" if prefill is None else f", behind {prefill} prefill workers"),
        workers=fleet.workers,
        policies=list(dict.fromkeys(result.policy for result in results)),
        block_size=fleet.engine.block_size,
        seeds=list(seeds),
        versions=versions(),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        host=platform.node(),
        profile=profile_name,
        requested_in_flight=fleet.concurrency,
        runs=[_run_figures(result, fleet) for result in results],
        events=fleet.events,
        reuse_objective=reuse_objective,
        caches=figures_of_results(results, fleet.events) if fleet.caches else (),
    )


def _run_figures(result: SimulationResult, fleet: SimulatedFleet) -> RunFigures:
    repeat = result.records[0].repeat if result.records else 0
    loop: Literal["open", "closed", "serial"] = "serial" if fleet.serial else "closed" if fleet.concurrency else "open"
    return RunFigures(policy=result.policy, repeat=repeat, loop=loop, concurrency=fleet.concurrency)


def _records(results: Sequence[SimulationResult]) -> list[RequestRecord]:
    return [record for result in results for record in result.records]


def _finished(
    options: SimulateOptions,
    watching: Watching,
    summary: Summary,
    results: Sequence[SimulationResult],
    objectives: Sequence[Objective],
    scenario: Scenario | None,
    notes: Sequence[str],
) -> tuple[dict[str, Any], int]:
    """`notes` are those that the request log doesn't give."""
    watching.end()
    console = watching.console
    print_summary(summary, console)
    if options.out is not None:
        records, again = _records(results), _again(options, scenario) | {"notes": list(notes)}
        write_run(options.out, summary, records, watching.rows, objectives, configuration=again)
        console.print(f"Report: {options.out / 'report.html'}", soft_wrap=True, highlight=False)
    return summary.model_dump(by_alias=True, mode="json"), exit_code(summary)


def _again(options: SimulateOptions, scenario: Scenario | None) -> dict[str, Any]:
    """What a second simulation needs to repeat this one."""
    return {
        "options": options_document(options),
        "scenario": {} if scenario is None else scenario.model_dump(mode="json", exclude_unset=True),
    }


@command(app, "simulate")
def simulate(options: SimulateOptions) -> None:
    """Run the same policies and engine model in virtual time: an hour on 64 engines in 20 s, exactly repeatable.

    Example: `prefixwatch simulate shared-prefix --policy round_robin,cache_aware,score --workers 16`

    Example: `prefixwatch simulate --trace conversation_trace.jsonl --workers 1 --capacity-blocks 10000`

    Example: `prefixwatch simulate cache-restart --cache sticky,shared,transfer,tiers --policy score`

    Example: `prefixwatch simulate shared-prefix --tune loadaware.beta=0:2 --workers 8`

    Example: `prefixwatch simulate shared-prefix --prefill-workers 4 --prefill-policy mooncake --policy flexlb_decode`
    """
    finish(*run_simulate(options, plain_console(stderr=options.as_json)), as_json=options.as_json)
