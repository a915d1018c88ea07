"""The runs of `prefixwatch simulate`: of a recording once per policy, of a scenario once per policy and repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.engines.model.step_time import StepDuration, StepTimeError
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.plan.request import Trimming
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.loadgen.scenario.fleet_section import EventPlan, Workers, event_plan
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.router.policies.spec import parse_spec
from prefixwatch.router.policy import Place
from prefixwatch.simulator.caches.fleet import simulate_caches
from prefixwatch.simulator.disaggregation.fleet import simulate_disaggregated
from prefixwatch.simulator.disaggregation.policies import DisaggregationOptions
from prefixwatch.simulator.disaggregation.side import SideView
from prefixwatch.simulator.event_engine import EventEngine
from prefixwatch.simulator.fleet_events import simulate_events
from prefixwatch.simulator.multi_router import simulate_routers
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import SNAPSHOTS
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.sessions.moving_fleet import simulate_moves
from prefixwatch.simulator.traffic.trace import SimulatedRequest, Trace, simulated
from prefixwatch.simulator.watching import FleetSamples, Steps, Watcher
from prefixwatch.stack.bench.recording_options import check_speed
from prefixwatch.stack.bench.scenario_choice import check_fleet_options
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.simulation.caches import chosen_caches, run_label
from prefixwatch.stack.simulation.constants import SECONDS, Constants, fit_constants
from prefixwatch.stack.simulation.options import SimulateOptions

_ALL = Trimming()


@dataclass(slots=True)
class Watching:
    """A bar on a terminal, and the rows of fleet.parquet where `keeps_rows`."""

    console: Console
    keeps_rows: bool = False
    rows: list[FleetRow] = field(default_factory=list)
    _bar: Progress | None = None

    def run(self, label: str, repeat: int) -> _Run:
        """The watch of one run; not of a split fleet."""
        return _Run(self, label, repeat)

    @property
    def bar(self) -> Progress:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
            self._bar.start()
        return self._bar

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@dataclass(frozen=True, slots=True)
class _Run:
    watching: Watching
    policy: str
    repeat: int

    def __call__(self, engines: Mapping[str, EventEngine], requests: Sequence[SimulatedRequest]) -> list[Watcher]:
        begins_s, ends_s = (requests[0].arrival_s, requests[-1].arrival_s) if requests else (0.0, 0.0)
        bar = self.watching.bar
        task = bar.add_task(f"{self.policy}, repeat {self.repeat + 1}", total=1.0)

        def show(share: float) -> None:
            bar.update(task, completed=share, visible=share < 1.0)

        watchers: list[Watcher] = [Steps(show, begins_s, ends_s)]
        if self.watching.keeps_rows:
            samples = FleetSamples(
                self.policy,
                self.repeat,
                engines=engines,
                begins_s=begins_s,
                ends_s=ends_s,
                rows=self.watching.rows,
            )
            watchers.append(samples)
        return watchers


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The fleet that a scenario or a recording, and the options in its place, ask for."""

    engines: Sequence[EngineConfig]
    """Those at the start; of a split fleet the ones that decode."""
    options: SimulateOptions
    prefill_workers: int | None = None
    events: EventPlan | None = None
    routers: int = 1
    concurrency: int | None = None
    trimming: Trimming = _ALL
    moves: Moves | None = None
    caches: Mapping[str, Cache] = field(default_factory=dict)
    """Beyond the GPUs, by what results call them; empty: not asked for."""
    places: Sequence[Place] = ()
    """Where the engines are; empty where the scenario doesn't say."""

    def __post_init__(self) -> None:
        given = self.options
        far = given.prefill_policy, given.prefill_from_tokens, given.prefill_profile, given.prefill_link
        if self.prefill_workers is None and any(value is not None for value in far):
            raise UsageError(
                "--prefill-policy, --prefill-from-tokens, --prefill-profile and --prefill-link belong to a split "
                "fleet: add --prefill-workers"
            )

    @classmethod
    def of_scenario(cls, scenario: Scenario, options: SimulateOptions) -> SimulatedFleet:
        check_fleet_options(scenario, options.workers)
        hints = scenario.engine
        kinds = scenario.fleet or [Workers(count=options.workers or scenario.workers)]
        if scenario.prefill_workers and len({(kind.profile, kind.capacity_blocks, kind.kind) for kind in kinds}) > 1:
            raise UsageError(f"scenario {scenario.name}: fleet: all workers of a split fleet are alike in a simulation")
        caches = chosen_caches(options.cache, scenario.cache)
        if scenario.moves is not None and any(cache.architecture != "sticky" for cache in caches.values()):
            raise UsageError(
                f"scenario {scenario.name}: moves sends sessions' KV, cache that of requests: simulate one of them"
            )
        if scenario.cache is not None and (options.arrivals == "serial" or options.prefill_workers):
            raise UsageError(
                "--arrivals serial and --prefill-workers don't go with the scenario's cache: leave them out"
            )
        if scenario.events and (options.arrivals == "serial" or options.prefill_workers):
            raise UsageError("--arrivals serial and --prefill-workers don't go with events: leave them out")
        return cls(
            engines=[
                EngineConfig(
                    step_time=_step_time(options.profile or kind.profile or hints.profile),
                    block_size=hints.block_size or DEFAULT_BLOCK_SIZE,
                    capacity_blocks=options.capacity_blocks or kind.capacity_blocks or hints.capacity_blocks,
                    kind=options.engine_kind or kind.kind or "vllm",
                )
                for kind in kinds
                if kind.role != "prefill"
                for _ in range(kind.count)
            ],
            options=options,
            prefill_workers=options.prefill_workers or scenario.prefill_workers,
            events=scenario.event_plan(options.workers) if scenario.events else None,
            routers=hints.routers,
            concurrency=scenario.arrivals.concurrency if scenario.arrivals is not None else None,
            trimming=scenario.trimming,
            moves=scenario.moves,
            caches=caches,
            places=_places(kinds),
        )

    @classmethod
    def of_recording(cls, options: SimulateOptions, trace: Trace) -> SimulatedFleet:
        return cls(
            engines=[
                EngineConfig(
                    step_time=_step_time(options.profile),
                    block_size=trace.block_size,
                    capacity_blocks=options.capacity_blocks,
                    kind=options.engine_kind or "vllm",
                )
            ]
            * (options.workers or 1),
            options=options,
            prefill_workers=options.prefill_workers,
            caches=chosen_caches(options.cache),
        )

    @property
    def workers(self) -> int:
        return len(self.engines)

    @property
    def engine(self) -> EngineConfig:
        """The first one; all are like it where nothing else is said."""
        return self.engines[0]

    @property
    def serial(self) -> bool:
        """Whether requests are served one after another."""
        if self.options.arrivals == "auto":
            return self.options.is_serial_replay
        return self.options.arrivals == "serial"

    def serve_all(
        self, requests: Sequence[SimulatedRequest], policy: str, repeat: int, watching: Watching
    ) -> list[SimulationResult]:
        """One run under each of the caches; one where they weren't asked for."""
        if not self.caches:
            return [self.serve(requests, policy, repeat, watching)]
        return [self.serve(requests, policy, repeat, watching, cache) for cache in self.caches]

    def serve(
        self,
        requests: Sequence[SimulatedRequest],
        policy: str,
        repeat: int,
        watching: Watching,
        cache: str | None = None,
    ) -> SimulationResult:
        """One run of these requests; the seed counts up with the repeats. `cache` is one of `caches`, by default the
        first. Raises UsageError if no engine can hold any of them."""
        cache = next(iter(self.caches), "") if cache is None else cache
        label = run_label(parse_spec(policy).label, cache, self.caches)
        watch = watching.run(label, repeat)
        beyond = self.caches.get(cache)
        fleet = self if beyond is None else self._with_gpus(beyond)
        check_some_fit(requests, fleet.engines)
        seed = self.options.seed + repeat
        if beyond is None or beyond.architecture == "sticky":
            result = fleet._serve(requests, policy, seed, watch)
        else:
            result = simulate_caches(requests, beyond, events=fleet.events, **fleet._common(policy, seed, watch))
        for record in result.records:
            record.repeat = repeat
            record.phase = self.trimming.phase_at(record.scheduled_s)
            if len(self.caches) > 1:
                record.policy = label
        return replace(result, policy=label) if len(self.caches) > 1 else result

    def _with_gpus(self, cache: Cache) -> SimulatedFleet:
        """With as many blocks in each GPU as this cache says, whatever its architecture."""
        if cache.gpu_blocks is None:
            return self
        return replace(self, engines=[replace(engine, capacity_blocks=cache.gpu_blocks) for engine in self.engines])

    def _common(self, policy: str, seed: int, watch: _Run) -> dict[str, Any]:
        """What all fleets of unlike or changing engines are run with."""
        return {
            "policy": policy,
            "engines": self.engines,
            "seed": seed,
            "routers": self.routers,
            "view": self.options.view,
            "concurrency": self.concurrency,
            "watch": watch,
        }

    def constants(self, requests: Sequence[SimulatedRequest]) -> Constants:
        """From the first minute's requests, one after another. Raises UsageError where they don't say enough."""
        if any(engine != self.engine for engine in self.engines):
            raise UsageError("--calibrate: the fleet's workers are unlike, so no constants are right for all of them")
        first_s = requests[0].arrival_s if requests else 0.0
        minute = [request for request in requests if request.arrival_s < first_s + SECONDS]
        served = simulate_requests(
            minute, policy="round_robin", workers=self.workers, engine=self.engine, arrivals="serial"
        )
        return fit_constants(served.records)

    def _serve(self, requests: Sequence[SimulatedRequest], policy: str, seed: int, watch: _Run) -> SimulationResult:
        options = self.options
        view = options.view
        if self.prefill_workers is not None:
            assert not view.startswith(SNAPSHOTS)
            return simulate_disaggregated(
                requests,
                prefill_workers=self.prefill_workers,
                decode_workers=self.workers,
                prefill_policy=options.prefill_spec,
                decode_policy=policy,
                engine=self.engine,
                seed=seed,
                view=cast(SideView, view),
                options=DisaggregationOptions(
                    conditional=options.prefill_from_tokens is not None,
                    local_below_tokens=options.prefill_from_tokens or 0,
                    local_below_ratio=inf,
                    link_tokens_per_second=options.prefill_link,
                ),
                prefill_engine=replace(self.engine, step_time=_step_time(options.prefill_profile))
                if options.prefill_profile
                else None,
            )
        events, common = self.events or event_plan([], self.workers), self._common(policy, seed, watch)
        if self.moves is not None:
            return simulate_moves(requests, events, self.moves, **common)
        if self.events is not None or self.places or any(engine != self.engine for engine in self.engines):
            return simulate_events(requests, events, places=self.places, **common)
        if self.routers > 1:
            return simulate_routers(
                requests,
                policy=policy,
                routers=self.routers,
                workers=self.workers,
                engine=self.engine,
                seed=seed,
                serial=self.serial,
                view=view,
                watch=watch,
            )
        return simulate_requests(
            requests,
            policy=policy,
            workers=self.workers,
            engine=self.engine,
            seed=seed,
            arrivals="serial" if self.serial else "trace",
            view=view,
            concurrency=self.concurrency,
            watch=watch,
            keeps_scores=watch.watching.keeps_rows,
        )


def check_some_fit(requests: Sequence[SimulatedRequest], engines: Sequence[EngineConfig]) -> None:
    """Raise UsageError where no engine could ever hold any of these requests."""
    roomy = max(engines, key=lambda engine: (engine.capacity_blocks or inf) * engine.block_size)
    if roomy.capacity_blocks is None or not requests:
        return
    needed = min(-(-(each.prompt_tokens + each.output_tokens) // roomy.block_size) for each in requests)
    if needed > roomy.capacity_blocks:
        raise UsageError(
            f"capacity_blocks: {roomy.capacity_blocks} blocks of {roomy.block_size} tokens hold none of the requests: "
            f"the smallest needs {needed}; give engines more blocks"
        )


def _step_time(name: str | None) -> StepDuration:
    try:
        return profile(name or DEFAULT_PROFILE).step_time
    except StepTimeError as error:
        raise UsageError(f"profile: {error}") from error


def _places(kinds: Sequence[Workers]) -> list[Place]:
    found = [
        Place(kind.region, kind.zone, kind.node, kind.gpu_group)
        for kind in kinds
        if kind.role != "prefill"
        for _ in range(kind.count)
    ]
    return found if any(map(any, found)) else []


def recorded_requests(options: SimulateOptions) -> Trace:
    """The requests of the recording at the speed that was asked for. Raises UsageError, DocumentError."""
    check_speed(options.speed)
    trace = simulated(options.read(Path(options.input)), options.model_dir)
    if not trace.timed and options.arrivals != "serial" and not options.is_serial_replay:
        raise UsageError(
            f"{options.input}: not every request has a time: give --rate, or --arrivals serial for one worker"
        )
    return replace(
        trace, requests=[replace(request, arrival_s=request.arrival_s / options.speed) for request in trace.requests]
    )
