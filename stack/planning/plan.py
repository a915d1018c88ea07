"""`prefixwatch plan`: the smallest fleet that meets the objectives under some traffic, by simulation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefixwatch.documents.units import MOST_BLOCKS, MOST_WORKERS
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.kinds import EngineKind
from prefixwatch.engines.model.profiles import Profile, profile
from prefixwatch.engines.model.step_time import StepTimeError
from prefixwatch.loadgen.grading.grade import grade
from prefixwatch.router.policies.spec import parse_spec
from prefixwatch.simulator.planning import (
    Plan,
    Trial,
    first_guess,
    ideal_engine_hours,
    prefill_engine_hours,
    smallest_fleet,
)
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from prefixwatch.slo.build import load_objectives
from prefixwatch.slo.objective import Objective
from prefixwatch.stack.bench.recording_options import RecordingOptions
from prefixwatch.stack.bench.results import versions
from prefixwatch.stack.bench.scenario_choice import POLICY_HELP, chosen_policies
from prefixwatch.stack.cli.command import (
    JsonFlag,
    command,
    finish,
    load_option,
    names,
    new_app,
    output_option,
    plain_console,
    target_option,
)
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import make_out_folder, write_text
from prefixwatch.stack.planning.page import write_plan_page
from prefixwatch.stack.planning.traffic import PlannedTraffic, planned_traffic
from prefixwatch.stack.simulation.options import KIND_HELP

app = new_app()
_LARGEST_FACTOR = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(RecordingOptions):
    """The options of `prefixwatch plan`."""

    source: Annotated[
        str, typer.Argument(help="A scenario, a recording of any kind, or an exporter's URL: its live requests.")
    ]
    profile: Annotated[str, target_option(help="Hardware of an engine: a shipped profile or a file (*.yaml).")] = (
        "h100-llama-8b"
    )
    engine_kind: Annotated[EngineKind, target_option(help=KIND_HELP)] = "vllm"
    policy: Annotated[str, target_option(help=POLICY_HELP)] = "round_robin,dynamo_kv"
    cache_sizes: Annotated[
        str, target_option(help="Cache sizes as multiples of the profile's KV blocks, comma-separated.")
    ] = "1"
    capacity_blocks: Annotated[
        int | None,
        target_option(min=1, max=MOST_BLOCKS, help="KV blocks of 16 tokens per engine; default: the profile's."),
    ] = None
    model_dir: Annotated[
        Path | None,
        target_option(help="Of a recording with texts: folder with the tokenizer; default: the built-in tiny model's."),
    ] = None
    max_workers: Annotated[int, target_option(min=1, max=MOST_WORKERS, help="The largest fleet to consider.")] = 256
    gpu_usd_per_hour: Annotated[float | None, target_option(min=0, help="Price of one GPU; adds costs.")] = None
    slo: Annotated[str, load_option(help="Objectives, comma-separated: shipped names or OpenSLO files.")] = "ttft,tpot"
    speed: Annotated[
        float, load_option(help="Replay a recording this many times as fast as recorded: 1.3 is 30 % more traffic.")
    ] = 1.0
    seeds: Annotated[int, load_option(min=1, help="Runs per fleet; it must hold in each.")] = 1
    out: Annotated[
        Path | None,
        output_option(help="Folder for plan.json and report.html, with the Pareto front.", show_default=False),
    ] = None
    as_json: JsonFlag = False


def run_plan(options: PlanOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Plan and print; returns the result and the exit code: 1 if no fleet within `--max-workers` holds."""
    policies = chosen_policies(options.policy)
    folder = None if options.out is None else make_out_folder(options.out)
    hardware = _hardware(options)
    factors = _factors(options.cache_sizes)
    objectives = load_objectives(names(options.slo))
    if not objectives:
        raise UsageError("--slo: name at least one objective, such as ttft,tpot")
    traffic = planned_traffic(options.source, options, options.speed, options.model_dir)
    _check_reachable(options, hardware, traffic, objectives)
    rows = [
        _row(options, hardware, traffic, objectives, policy, factor)
        for policy in policies.values()
        for factor in factors
    ]
    result = {
        "traffic": traffic.name,
        "requests": len(traffic.requests),
        "traffic_hours": traffic.seconds / 3600,
        "profile": {
            "name": hardware.name,
            "measured": hardware.measured,
            "assumed": hardware.assumed,
            "gpus": hardware.gpus,
        },
        "objectives": [objective.name for objective in objectives],
        "plans": rows,
        "notes": list(traffic.notes),
    }
    _print(result, console)
    if folder is not None:
        write_text(folder / "plan.json", json.dumps(result, indent=2) + "\n", "--out")
        write_plan_page(folder / "report.html", result, _again(options))
        console.print(f"Report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    return result, 0 if all(row["workers"] for row in rows) else 1


def _row(
    options: PlanOptions,
    hardware: Profile,
    traffic: PlannedTraffic,
    objectives: Sequence[Objective],
    policy: str,
    factor: float,
) -> dict[str, Any]:
    engine = EngineConfig(
        hardware.step_time,
        block_size=traffic.block_size,
        capacity_blocks=_capacity_blocks(options, hardware, traffic, factor),
        max_num_batched_tokens=hardware.max_num_batched_tokens,
        kind=options.engine_kind,
    )

    def prefill_s(prompt: int, cached: int) -> float:
        return engine.step_time.prefill_s(prompt, cached, engine.max_num_batched_tokens)

    def run(workers: int, seed: int) -> Trial:
        result = simulate_requests(
            traffic.requests,
            policy=policy,
            workers=workers,
            engine=engine,
            seed=seed,
            arrivals="trace",
            keeps_scores=False,
        )
        graded = grade(result.records, objectives, workers=workers, block_size=traffic.block_size)[result.policy]
        served = [(r.prompt_tokens, r.cached_tokens or 0) for r in result.records if r.prompt_tokens is not None]
        saved = prefill_engine_hours(served, prefill_s, 0.1)
        return Trial(workers, seed, tuple(graded.objectives), result.token_hit_ratio, saved)

    begun = time.process_time()
    first = first_guess(sum(_alone_s(engine, request) for request in traffic.requests), traffic.seconds)
    plan = smallest_fleet(run, range(options.seeds), first=first, largest=options.max_workers)
    return _figures(options, hardware, traffic, plan, policy, factor) | {
        "capacity_blocks": engine.capacity_blocks,
        "fleets": [_fleet(trial, hardware.gpus * traffic.seconds / 3600) for trial in plan.trials],
        "cpu_seconds": time.process_time() - begun,
    }


def _capacity_blocks(options: PlanOptions, hardware: Profile, traffic: PlannedTraffic, factor: float) -> int | None:
    """In blocks of the traffic. Raises UsageError where they hold not even the smallest request."""
    blocks = options.capacity_blocks or hardware.capacity_blocks
    if blocks is None:
        return None
    capacity = int(blocks * hardware.block_size * factor) // traffic.block_size
    needed = min(-(-(each.prompt_tokens + each.output_tokens) // traffic.block_size) for each in traffic.requests)
    if capacity < needed:
        raise UsageError(
            f"capacity_blocks: {blocks} blocks of {hardware.block_size} tokens times {factor:g} are {capacity} of the "
            f"traffic's blocks of {traffic.block_size} tokens, and its smallest request needs {needed}: give engines "
            "more (--capacity-blocks, --cache-sizes, --profile)"
        )
    return capacity


def _fleet(trial: Trial, gpu_hours_per_engine: float) -> dict[str, Any]:
    """A simulated fleet; `margin` is how far its tightest objective is above its target, as a share of requests."""
    margins = [None if each.measured is None else each.measured - each.objective for each in trial.objectives]
    return {
        "workers": trial.workers,
        "seed": trial.seed,
        "holds": trial.holds,
        "gpu_hours": trial.workers * gpu_hours_per_engine,
        "margin": None if None in margins else min(each for each in margins if each is not None),
        "hit_ratio": trial.hit_ratio,
    }


def _again(options: PlanOptions) -> dict[str, Any]:
    """What was planned, as options."""
    given = {field.name: getattr(options, field.name) for field in fields(PlanOptions)}
    return {
        "prefixwatch plan": {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in given.items()
            if value is not None and name not in {"as_json", "out"}
        },
        "versions": versions(),
    }


def _check_reachable(
    options: PlanOptions, hardware: Profile, traffic: PlannedTraffic, objectives: Sequence[Objective]
) -> None:
    """Raise UsageError if not even an idle engine per request, with all that was sent before in its cache, is fast
    enough: then no number of engines is."""
    engine = EngineConfig(
        hardware.step_time, block_size=traffic.block_size, max_num_batched_tokens=hardware.max_num_batched_tokens
    )
    alone = simulate_requests(traffic.requests, policy="round_robin", workers=1, engine=engine, arrivals="serial")
    graded = grade(alone.records, objectives, workers=1, block_size=traffic.block_size)["round_robin"]
    missed = [
        f"{each.name} ({each.rule}): {each.measured:.1%} of {each.objective:.1%}"
        if each.measured is not None
        else f"{each.name}: no request counts for it"
        for each in graded.objectives
        if each.ok is not True
    ]
    if missed:
        raise UsageError(
            f"no fleet of {hardware.name} meets {'; '.join(missed)}, not even with an idle engine for each request and "
            f"everything sent before in its cache: choose faster hardware (--profile) or another objective (--slo)"
        )


def _figures(
    options: PlanOptions, hardware: Profile, traffic: PlannedTraffic, plan: Plan, policy: str, factor: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": parse_spec(policy).label, "cache_size": factor, "workers": plan.workers}
    trials = plan.of_size(plan.workers or options.max_workers)
    row["objectives"] = [
        {"name": each.name, "measured": each.measured, "ci95": each.ci95, "ok": each.ok}
        for each in trials[-1].objectives
    ]
    row["hit_ratio"] = trials[-1].hit_ratio
    saved = trials[-1].ten_points_engine_hours
    row["ten_points_gpu_hours"] = None if saved is None else saved * hardware.gpus
    if plan.workers is None:
        return row
    hours = plan.workers * hardware.gpus * traffic.seconds / 3600
    ideal = ideal_engine_hours([request.arrival_s for request in traffic.requests], plan.workers) * hardware.gpus
    row |= {"gpu_hours": hours, "ideal_gpu_hours": ideal}
    if options.gpu_usd_per_hour is not None:
        row["usd_per_1000_requests"] = hours * options.gpu_usd_per_hour / len(traffic.requests) * 1000
    return row


def _alone_s(engine: EngineConfig, request: SimulatedRequest) -> float:
    """Seconds of an engine that a request takes alone, without reuse, in batches of 32 while it generates."""
    batch = 32
    context = batch * (request.prompt_tokens + request.output_tokens // 2)
    decode_s = engine.step_time.duration_s(decode_sequences=batch, context_tokens=context) / batch
    prefill_s = engine.step_time.prefill_s(request.prompt_tokens, 0, engine.max_num_batched_tokens)
    return prefill_s + request.output_tokens * decode_s


def _hardware(options: PlanOptions) -> Profile:
    try:
        return profile(options.profile)
    except StepTimeError as error:
        raise UsageError(f"--profile: {error}") from error


def _factors(given: str) -> list[float]:
    try:
        factors = [float(each) for each in names(given)]
    except ValueError as error:
        raise UsageError(f"--cache-sizes {given}: expected numbers such as 0.5,1,2") from error
    if not factors or not all(0 < each <= _LARGEST_FACTOR for each in factors):
        raise UsageError(f"--cache-sizes {given}: expected numbers above 0, up to 1,000,000, such as 0.5,1,2")
    return factors


def _print(result: dict[str, Any], console: Console) -> None:
    hardware = result["profile"]
    console.print(
        f"{result['traffic']}: {result['requests']:,} requests in {result['traffic_hours']:.2f} h · engines: "
        f"{hardware['name']} ({hardware['gpus']} GPU) · objectives: {', '.join(result['objectives'])}",
        soft_wrap=True,
    )
    table = Table("policy", "cache", "engines", "GPU h", "GPU h, ideal", "hits", "+10 points, GPU h")
    priced = any("usd_per_1000_requests" in row for row in result["plans"])
    if priced:
        table.add_column("USD / 1,000")
    for row in result["plans"]:
        found = row["workers"]
        cells = [row["policy"], f"{row['cache_size']:g} ×", str(found) if found else "none"]
        cells += [f"{row[key]:.1f}" if key in row else "unknown" for key in ("gpu_hours", "ideal_gpu_hours")]
        cells.append("unknown" if row["hit_ratio"] is None else f"{row['hit_ratio']:.1%}")
        worth = row["ten_points_gpu_hours"]
        cells.append("unknown" if worth is None else f"{worth:.2f}")
        if priced:
            cells.append(f"{row['usd_per_1000_requests']:.2f}" if "usd_per_1000_requests" in row else "unknown")
        table.add_row(*cells)
    console.print(table)
    for row in result["plans"]:
        if row["workers"] is None:
            missed = [f"{each['name']} ({each['measured']:.1%})" for each in row["objectives"] if not each["ok"]]
            largest = max(fleet["workers"] for fleet in row["fleets"])
            console.print(f"{row['policy']}: {largest} engines miss {', '.join(missed)}; more engines share less.")
    console.print(
        "GPU h, ideal: with instant scaling. +10 points: prefill saved if a tenth more of each prompt were cached."
        + (" USD / 1,000: dollars per 1,000 requests." if priced else ""),
        soft_wrap=True,
    )
    for note in result["notes"]:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"Measured: {hardware['measured']} Assumed: {hardware['assumed']}", soft_wrap=True)


@command(app, "plan")
def plan(options: PlanOptions) -> None:
    """Find the smallest fleet that meets the objectives under some traffic, by policy and cache size.

    Example: `prefixwatch plan conversation_trace.jsonl --profile h200x4-llama-70b --slo ttft,tpot`

    Example: `prefixwatch plan http://exporter:9477 --profile h100-llama-8b --speed 1.5`: half as much again as now

    Example: `prefixwatch plan shared-prefix --profile h100-llama-8b --cache-sizes 0.5,1,2 --gpu-usd-per-hour 2.5`
    """
    finish(*run_plan(options, plain_console(stderr=options.as_json)), as_json=options.as_json)
