"""The options of `prefixwatch simulate`, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixwatch.documents.units import MOST_BLOCKS, MOST_WORKERS
from prefixwatch.engines.model.kinds import EngineKind
from prefixwatch.engines.model.profiles import profile
from prefixwatch.engines.model.step_time import StepTimeError
from prefixwatch.loadgen.scenario.model import shipped_scenarios
from prefixwatch.router.policies import policy_class
from prefixwatch.simulator.router import SNAPSHOTS, snapshot_seconds
from prefixwatch.stack.bench.levels import DEFAULT_REPEATS, LevelOptions, check_repeats
from prefixwatch.stack.bench.recording_options import is_scenario, refuse_for_scenario
from prefixwatch.stack.bench.scenario_choice import DEFAULT_POLICIES, POLICY_HELP, chosen_policies
from prefixwatch.stack.cli.command import JsonFlag, load_option, output_option, target_option
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.simulation.caches import CACHE_HELP, chosen_caches
from prefixwatch.stack.simulation.constants import CALIBRATE_HELP
from prefixwatch.stack.simulation.tune import TUNE_HELP

KIND_HELP = "Whose scheduler the engines have."
_ARRIVALS = ("auto", "serial", "trace")
_VIEWS = ("history", "events", "snapshots")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(LevelOptions):
    """The options of `prefixwatch simulate`; None stands for the scenario's own value."""

    source: Annotated[
        str | None,
        typer.Argument(help="A scenario (name or YAML file) or a recording of any kind.", show_default=False),
    ] = None
    workers: Annotated[
        int | None, target_option(min=1, max=MOST_WORKERS, help="Engines; default: the scenario's, 1 for a recording.")
    ] = None
    capacity_blocks: Annotated[
        int | None,
        target_option(
            min=1, max=MOST_BLOCKS, help="KV blocks per engine; default: the scenario's, unbounded for a recording."
        ),
    ] = None
    policy: Annotated[str | None, target_option(help=f"{POLICY_HELP} Default: {DEFAULT_POLICIES}.")] = None
    view: Annotated[
        str,
        target_option(
            help="How policies see the caches: the router's own `history`, engines' `events`, or `snapshots` of "
            "engines' caches, up to 3 s old; `snapshots:5`: taken every 5 s."
        ),
    ] = "history"
    profile: Annotated[
        str | None, target_option(help="Step times of the engines: a shipped profile or a file (*.yaml).")
    ] = None
    engine_kind: Annotated[
        EngineKind | None, target_option(help=f"{KIND_HELP} Default: the scenario's, vllm.", show_default=False)
    ] = None
    prefill_workers: Annotated[
        int | None,
        target_option(
            min=1,
            max=MOST_WORKERS,
            help="Split the fleet: number of additional prefill-only engines. `--workers` and `--policy` then apply to "
            "the decode engines.",
            show_default=False,
        ),
    ] = None
    prefill_policy: Annotated[
        str | None,
        target_option(help="Routing policy of the prefill engines of a split fleet; default: round_robin."),
    ] = None
    prefill_from_tokens: Annotated[
        int | None,
        target_option(
            min=1,
            help="Of a split fleet: uncached prompt tokens from which a prompt goes to a prefill engine; default: 0.",
            show_default=False,
        ),
    ] = None
    prefill_profile: Annotated[
        str | None,
        target_option(
            help="Of a split fleet: step times of the prefill engines; default: as the others.", show_default=False
        ),
    ] = None
    prefill_link: Annotated[
        float | None,
        target_option(
            help="Of a split fleet: KV tokens a second on the one link from the prefill engines, where transfers take "
            "turns; default: each transfer has a link of its own.",
            show_default=False,
        ),
    ] = None
    cache: Annotated[str, target_option(help=CACHE_HELP, show_default=False)] = ""
    model_dir: Annotated[
        Path | None,
        target_option(help="Of a recording with texts: folder with the tokenizer; default: the built-in tiny model's."),
    ] = None
    trace: Annotated[
        Path | None, load_option(help="A recording of any kind (docs/recordings.md); the same as naming it.")
    ] = None
    arrivals: Annotated[
        str,
        load_option(
            help="`trace`: at their recorded times. `serial`: one request after another, an exact study of the "
            "cache; labelled, and not with a sweep or search. `auto`: serial for one worker and a recording."
        ),
    ] = "auto"
    speed: Annotated[
        float, load_option(help="Of a recording: replay this many times as fast as recorded.", show_default=False)
    ] = 1.0
    repeats: Annotated[int, load_option(min=1, help="Repeats of a scenario, each with its own seed.")] = DEFAULT_REPEATS
    seed: Annotated[int, load_option(min=0, help="Seed of the traffic and of random ties.")] = 1
    out: Annotated[
        Path | None,
        output_option(
            help="Folder for summary.json, requests.parquet, fleet.parquet, report.html and config.yaml, as `bench` "
            "writes them; `report` and `compare` read it.",
            show_default=False,
        ),
    ] = None
    tune: Annotated[str, load_option(help=TUNE_HELP, show_default=False)] = ""
    calibrate: Annotated[bool, load_option("--calibrate", help=CALIBRATE_HELP)] = False
    ray: Annotated[
        str | None,
        load_option(
            help="With --tune: address of a Ray cluster that makes the runs (`ray://HOST:10001`; `local`: one on this "
            "machine), instead of this machine's cores. Needs the extra `ray`.",
            show_default=False,
        ),
    ] = None
    as_json: JsonFlag = False

    @property
    def policies(self) -> list[str]:
        return list(self.specs)

    @property
    def specs(self) -> dict[str, str]:
        """The chosen policies by their labels, as `make_policy` reads them."""
        return chosen_policies(DEFAULT_POLICIES if self.policy is None else self.policy)

    @property
    def prefill_spec(self) -> str:
        """The policy of a split fleet's prefill engines, as `make_policy` reads it. Raises UsageError."""
        found = chosen_policies(self.prefill_policy or "round_robin", option="--prefill-policy")
        if len(found) > 1:
            raise UsageError("--prefill-policy names several policies, and prefill engines have one: give one")
        return next(iter(found.values()))

    @property
    def input(self) -> str:
        """The scenario or the recording."""
        return str(self.trace or self.source)

    @property
    def is_recording(self) -> bool:
        """Raises UsageError for an input that is neither a scenario nor a file."""
        return self.trace is not None or not is_scenario(self.input, shipped_scenarios())

    @property
    def is_serial_replay(self) -> bool:
        """A recording that one worker serves, request after request, since nothing else was asked for."""
        alone = (self.workers or 1) == 1 and self.prefill_workers is None and not self.cache
        return self.arrivals == "auto" and alone and self.is_recording


def check(options: SimulateOptions) -> None:
    """Raise UsageError for options that don't go together."""
    if (options.source is None) == (options.trace is None):
        raise UsageError(
            "give a scenario or a recording: prefixwatch simulate SCENARIO (`prefixwatch scenarios` lists them), or "
            "--trace FILE"
        )
    if options.arrivals not in _ARRIVALS:
        raise UsageError(f"--arrivals {options.arrivals}: choose one of {', '.join(_ARRIVALS)}")
    if options.view not in _VIEWS:
        try:
            snapshot_seconds(options.view)
        except ValueError as error:
            raise UsageError(f"--view {error}; others: {', '.join(_VIEWS)}") from error
    _ = options.specs
    check_repeats(options.levels, options.repeats)
    if not options.is_recording:
        besides = {"--speed": options.speed != 1.0, "--model-dir": options.model_dir is not None}
        refuse_for_scenario(options.input, options, *(name for name, given in besides.items() if given))
    elif options.repeats not in (1, DEFAULT_REPEATS):
        raise UsageError("--repeats: a recording is simulated once, the same each time: leave the option out")
    if options.levels is not None and options.arrivals == "serial":
        raise UsageError("--arrivals serial sends one request after another, at no rate: sweep or search without it")
    if options.levels is not None and options.is_recording:
        raise UsageError("a recording has the rate it was recorded at: sweep or search with a scenario")
    _check_caches(options)
    _check_tune(options)
    if options.prefill_workers is not None:
        _check_split(options)
    for name, chosen in (("--profile", options.profile), ("--prefill-profile", options.prefill_profile)):
        if chosen is not None:
            try:
                profile(chosen)
            except StepTimeError as error:
                raise UsageError(f"{name}: {error}") from error


def _check_tune(options: SimulateOptions) -> None:
    if options.tune and (options.levels is not None or options.prefill_workers is not None):
        raise UsageError("--tune goes neither with a sweep or search nor with --prefill-workers: leave one out")
    if options.calibrate and (options.tune or options.prefill_workers is not None):
        raise UsageError("--calibrate goes neither with --tune nor with --prefill-workers: leave one out")
    if options.ray is not None and not options.tune:
        raise UsageError("--ray spreads the runs of --tune over a cluster: give --tune, or leave it out")


def _check_caches(options: SimulateOptions) -> None:
    caches = chosen_caches(options.cache)
    moves = any(cache.architecture != "sticky" for cache in caches.values())
    if moves and (options.arrivals == "serial" or options.prefill_workers is not None):
        raise UsageError(
            "--cache: pulls take time beside other requests, between equal workers: leave out --arrivals serial and "
            "--prefill-workers"
        )
    if len(caches) > 1 and (options.levels is not None or options.tune):
        raise UsageError("--cache names several: a sweep, a search and --tune take one")


def _check_split(options: SimulateOptions) -> None:
    if options.prefill_link is not None and not options.prefill_link > 0:
        raise UsageError(f"--prefill-link {options.prefill_link:g}: give KV tokens a second, more than 0")
    if options.arrivals == "serial" or options.view.startswith(SNAPSHOTS):
        raise UsageError(
            "--prefill-workers goes neither with --arrivals serial nor with --view snapshots: leave these out"
        )
    for policy in (options.prefill_spec, *options.specs.values()):
        if policy_class(policy).needs.truth:
            raise UsageError(
                f"policy {policy} doesn't go with --prefill-workers: it needs the engines' true state, which a split "
                "fleet doesn't show"
            )
