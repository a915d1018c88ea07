"""`prefixwatch simulate`: a scenario or a trace in virtual time, graded like a bench."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Console

from engines.model import EngineConfig
from engines.step_time import DEFAULT_PROFILE, StepTimeError, profile
from loadgen.plan import Trimming
from loadgen.report import console_table
from loadgen.run_figures import RunFigures
from loadgen.scenario import Scenario, load_scenario
from loadgen.summary import RunFacts, Summary, build_summary, exit_code, verdict_sentence
from router.policies import POLICIES
from slo.document import load_objectives
from slo.objective import Objective
from stack.disaggregated import DisaggregatedResult, SideView, simulate_disaggregated
from stack.errors import UsageError
from stack.load_levels import LevelRun, LevelsRequest, run_levels
from stack.multi_router import simulate_routers
from stack.options import check_policies
from stack.results import versions
from stack.scenario_traffic import ScenarioTraffic
from stack.simulate import Arrivals, SimulationResult, simulate_requests, simulate_trace
from stack.trace import TRACE_BLOCK_TOKENS, SimulatedRequest, read_trace

View = Literal["history", "events", "snapshots"]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of `prefixwatch simulate`, as given."""

    source: str | None
    trace: Path | None
    workers: int | None
    capacity_blocks: int | None
    policies: list[str]
    arrivals: str
    speed: float
    limit: int | None
    view: str
    profile: str | None
    repeats: int
    seed: int
    prefill_workers: int | None = None
    """Engines of a prefill side of its own; `workers` and `policies` are then those of the decode side."""
    prefill_policy: str = "round_robin"
    levels: LevelsRequest | None = None
    """Sweep or search, instead of comparing policies at one load."""


_ARRIVALS = ("auto", "serial", "trace")
_VIEWS = ("history", "events", "snapshots")


def run_simulate(options: SimulateOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Simulate; answers the bench's summary and exit code. Raises one of INPUT_ERRORS."""
    _check(options)
    source = str(options.trace or options.source)
    if options.levels is not None:
        return _levels(source, options, console)
    summary = _of_trace(source, options) if _is_trace(source, options) else _of_scenario(source, options)
    console.print(console_table(summary))
    console.print(verdict_sentence(summary), soft_wrap=True, highlight=False)
    return summary.model_dump(by_alias=True, mode="json"), exit_code(summary)


def _of_trace(source: str, options: SimulateOptions) -> Summary:
    workers = options.workers or 1
    if options.prefill_workers is not None:
        results: Sequence[SimulationResult] = _split_trace(source, workers, options)
    else:
        results = _whole_trace(source, workers, options)
    summary = _graded(Path(source).name, workers, results, [], options, block_size=TRACE_BLOCK_TOKENS)
    # A trace names a prompt's last, partial block too; the published hit rates count it, so the engines' own counts do.
    ratios = {result.policy: result.block_hit_ratio for result in results}
    policies = {
        name: own.model_copy(update={"prefix": own.prefix.model_copy(update={"block_hit_ratio": ratios[name]})})
        for name, own in summary.policies.items()
    }
    return summary.model_copy(update={"policies": policies})


def _whole_trace(source: str, workers: int, options: SimulateOptions) -> list[SimulationResult]:
    return [
        simulate_trace(
            source,
            workers=workers,
            capacity_blocks=options.capacity_blocks,
            policy=policy,
            seed=options.seed,
            arrivals=cast(Arrivals, options.arrivals),
            speed=options.speed,
            limit=options.limit,
            step_time_profile=options.profile or DEFAULT_PROFILE,
            view=cast(View, options.view),
        )
        for policy in options.policies
    ]


def _split_trace(source: str, workers: int, options: SimulateOptions) -> list[DisaggregatedResult]:
    if not options.speed > 0:
        raise UsageError(f"--speed must be above 0, got {options.speed}")
    engine = EngineConfig(
        step_time=profile(options.profile or DEFAULT_PROFILE),
        block_size=TRACE_BLOCK_TOKENS,
        capacity_blocks=options.capacity_blocks,
    )
    requests = [
        replace(request, arrival_s=request.arrival_s / options.speed) for request in read_trace(source, options.limit)
    ]
    return [_split(requests, policy, workers, engine, options) for policy in options.policies]


def _split(
    requests: Sequence[SimulatedRequest],
    policy: str,
    workers: int,
    engine: EngineConfig,
    options: SimulateOptions,
) -> DisaggregatedResult:
    assert options.prefill_workers is not None
    return simulate_disaggregated(
        requests,
        prefill_workers=options.prefill_workers,
        decode_workers=workers,
        prefill_policy=options.prefill_policy,
        decode_policy=policy,
        engine=engine,
        seed=options.seed,
        view=cast(SideView, options.view),
    )


def _of_scenario(source: str, options: SimulateOptions) -> Summary:
    scenario = load_scenario(source)
    fleet = _Fleet.of(scenario, options)
    results: list[SimulationResult] = []
    traffic = ScenarioTraffic(scenario)
    for repeat in range(options.repeats):
        requests = traffic.requests(seed=options.seed + repeat)
        results += [fleet.serve(requests, policy, repeat) for policy in options.policies]
    objectives = load_objectives(scenario.slo)
    block_size = fleet.engine.block_size
    return _graded(
        scenario.name,
        fleet.workers,
        results,
        objectives,
        options,
        block_size=block_size,
        concurrency=fleet.concurrency,
    )


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The simulated fleet that a scenario, or options in its place, ask for."""

    workers: int
    engine: EngineConfig
    routers: int
    concurrency: int | None
    trimming: Trimming
    options: SimulateOptions

    @classmethod
    def of(cls, scenario: Scenario, options: SimulateOptions) -> _Fleet:
        hints = scenario.engine
        return cls(
            workers=options.workers or hints.workers or 4,
            engine=EngineConfig(
                step_time=profile(options.profile or hints.profile or DEFAULT_PROFILE),
                capacity_blocks=options.capacity_blocks or hints.capacity_blocks,
            ),
            routers=hints.routers,
            concurrency=scenario.arrivals.concurrency if scenario.arrivals is not None else None,
            trimming=scenario.trimming,
            options=options,
        )

    def serve(self, requests: Sequence[SimulatedRequest], policy: str, repeat: int) -> SimulationResult:
        """One run of these requests."""
        options = self.options
        seed = options.seed + repeat
        if options.prefill_workers is not None:
            result: SimulationResult = _split(requests, policy, self.workers, self.engine, replace(options, seed=seed))
        elif self.routers > 1:
            result = simulate_routers(
                requests,
                policy=policy,
                routers=self.routers,
                workers=self.workers,
                engine=self.engine,
                seed=seed,
                serial=options.arrivals == "serial",
                view=cast(View, options.view),
            )
        else:
            result = simulate_requests(
                requests,
                policy=policy,
                workers=self.workers,
                engine=self.engine,
                seed=seed,
                arrivals=cast(Arrivals, options.arrivals),
                view=cast(View, options.view),
                concurrency=self.concurrency,
            )
        for record in result.records:
            record.repeat = repeat
            record.phase = self.trimming.phase_at(record.scheduled_s)
        return result


def _levels(source: str, options: SimulateOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Sweep or search in virtual time."""
    assert options.levels is not None
    scenario = load_scenario(source)

    async def run_level(level: Scenario, policy: str, repeat: int) -> LevelRun:
        requests = ScenarioTraffic(level).requests(seed=options.seed + repeat)
        return LevelRun(_Fleet.of(level, options).serve(requests, policy, repeat).records)

    return asyncio.run(
        run_levels(
            scenario,
            load_objectives(scenario.slo),
            options.policies,
            options.levels,
            run=run_level,
            console=console,
        )
    )


def _graded(
    name: str,
    workers: int,
    results: Sequence[SimulationResult],
    objectives: Sequence[Objective],
    options: SimulateOptions,
    *,
    block_size: int,
    concurrency: int | None = None,
) -> Summary:
    prefill = options.prefill_workers
    facts = RunFacts(
        scenario=name,
        engine="simulated in virtual time" + ("" if prefill is None else f", behind {prefill} prefill workers"),
        workers=workers,
        policies=list(dict.fromkeys(result.policy for result in results)),
        block_size=block_size,
        seeds=[options.seed],
        versions=versions(),
        requested_in_flight=concurrency,
        runs=[_run_figures(result, concurrency) for result in results],
    )
    records = [record for result in results for record in result.records]
    return build_summary(records, objectives, facts, seed=options.seed)


def _run_figures(result: SimulationResult, concurrency: int | None) -> RunFigures:
    repeat = result.records[0].repeat if result.records else 0
    loop: Literal["open", "closed"] = "open" if concurrency is None else "closed"
    return RunFigures(policy=result.policy, repeat=repeat, loop=loop, concurrency=concurrency)


def _check(options: SimulateOptions) -> None:
    if (options.source is None) == (options.trace is None):
        raise UsageError(
            "give a scenario or a trace: prefixwatch simulate SCENARIO (`prefixwatch scenarios` lists them), or "
            "--trace FILE"
        )
    if options.arrivals not in _ARRIVALS:
        raise UsageError(f"--arrivals {options.arrivals}: choose one of {', '.join(_ARRIVALS)}")
    if options.view not in _VIEWS:
        raise UsageError(f"--view {options.view}: choose one of {', '.join(_VIEWS)}")
    check_policies(options.policies)
    if not _is_trace(str(options.trace or options.source), options) and (options.speed != 1.0 or options.limit):
        raise UsageError("--speed and --limit are for traces: a scenario has arrivals and duration_seconds in its file")
    if options.levels is not None and _is_trace(str(options.trace or options.source), options):
        raise UsageError("a trace has the rate it was recorded at: sweep or search with a scenario")
    if options.prefill_workers is not None:
        _check_split(options)
    if options.profile is not None:
        try:
            profile(options.profile)
        except StepTimeError as error:
            raise UsageError(f"--profile: {error}") from error


def _check_split(options: SimulateOptions) -> None:
    check_policies([options.prefill_policy], option="--prefill-policy")
    if options.arrivals == "serial" or options.view == "snapshots":
        raise UsageError(
            "--prefill-workers goes neither with --arrivals serial nor with --view snapshots: leave these out"
        )
    for policy in (options.prefill_policy, *options.policies):
        if POLICIES[policy].needs.truth:
            raise UsageError(f"policy {policy} doesn't go with --prefill-workers: a split fleet doesn't tell its truth")


def _is_trace(source: str, options: SimulateOptions) -> bool:
    return options.trace is not None or source.endswith(".jsonl")
