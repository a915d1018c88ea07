"""The options of `prefixwatch bench`, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixwatch.documents.units import MOST_WORKERS
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.stack.bench.levels import DEFAULT_REPEATS, LevelOptions, check_repeats
from prefixwatch.stack.bench.scenario_choice import (
    DEFAULT_POLICIES,
    POLICY_HELP,
    TraceOptions,
    chosen_policies,
    trace_options,
)
from prefixwatch.stack.cli.command import JsonFlag, load_option, output_option, target_option
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import check_address
from prefixwatch.stack.local.targets import Endpoint
from prefixwatch.stack.simulation.caches import chosen_caches
from prefixwatch.stack.simulation.constants import CALIBRATE_HELP, policies_with_constants
from prefixwatch.stack.simulation.tune import TUNE_HELP, Tune, parse_tune


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(LevelOptions):
    """The options of `prefixwatch bench`; None stands for the scenario's own value."""

    scenario: Annotated[
        str | None, typer.Argument(help="A shipped scenario's name, or a scenario file (YAML).", show_default=False)
    ] = None
    engine: Annotated[str, target_option(help="Engines to start: `simulated` or `vllm` (real, on CPU).")] = "simulated"
    workers: Annotated[
        int | None,
        target_option(
            min=1, max=MOST_WORKERS, help="Engines to start; default: the scenario's. With --target, how many it has."
        ),
    ] = None
    policy: Annotated[str | None, target_option(help=f"{POLICY_HELP} Default: {DEFAULT_POLICIES}.")] = None
    target: Annotated[str | None, target_option(help="Send to this running endpoint; start nothing.")] = None
    exporter: Annotated[
        str | None,
        target_option(
            help="With --target: a prefixwatch exporter that scrapes its engines. Their figures go into fleet.parquet "
            "and the report; a run that shares them with others is invalid.",
            show_default=False,
        ),
    ] = None
    prometheus: Annotated[
        str | None,
        target_option(
            help="The same from a Prometheus that scrapes that exporter, or the engines themselves.",
            show_default=False,
        ),
    ] = None
    prometheus_match: Annotated[
        str,
        target_option(
            help="Label matchers of the engines' series in that Prometheus, where it has others, too: "
            '\'job="vllm",cluster="staging"\'.',
            show_default=False,
        ),
    ] = ""
    model_dir: Annotated[
        Path | None, target_option(help="Folder with the target's tokenizer; default: its /tokenize endpoint is used.")
    ] = None
    tokenize_url: Annotated[
        str | None, target_option(help="Use this engine's /tokenize, if the target is a gateway without one.")
    ] = None
    approximate_prompts: Annotated[
        bool,
        target_option(
            "--approximate-prompts",
            help="Prompts of about the right length, for a target whose tokenizer isn't at hand. Expected reuse, "
            "isolation and warm caches are not judged.",
        ),
    ] = False
    model: Annotated[str | None, target_option(help="Model to request; default: the target's first.")] = None
    api_key_env: Annotated[
        str, target_option(help="Environment variable with the target's API key; the key itself is never written.")
    ] = ""
    ca_file: Annotated[
        Path | None, target_option(help="CA certificates to check the target with; default: the system's.")
    ] = None
    repeats: Annotated[int, load_option(min=1, help="Runs of each policy, interleaved A B, B A, …")] = DEFAULT_REPEATS
    seed: Annotated[int, load_option(min=0, help="Seed of arrivals, lengths, prefix popularity and random ties.")] = 1
    duration: Annotated[
        float | None, load_option(min=1, help="Seconds of traffic per run, warm-up included; default: the scenario's.")
    ] = None
    trace: Annotated[
        Path | None,
        load_option(help="Replay this recording; see `prefixwatch analyze` and docs/load-testing.md for the formats."),
    ] = None
    speed: Annotated[float | None, load_option(min=0.001, help="Replay this many times as fast as recorded.")] = None
    answers: Annotated[
        str | None, load_option(help="Earlier answers in a replay's later turns: `recorded` or `generated`.")
    ] = None
    tune: Annotated[str, load_option(help=f"{TUNE_HELP} One more repeat is made for that.", show_default=False)] = ""
    calibrate: Annotated[
        bool,
        load_option(
            "--calibrate",
            help=f"{CALIBRATE_HELP} With --target they go into config.yaml, for the policy of its router.",
        ),
    ] = False
    cache: Annotated[
        str,
        target_option(
            help="`sticky` only: engines of a bench keep KV as they are set up to; `prefixwatch simulate --cache` has "
            "the others.",
            show_default=False,
        ),
    ] = ""
    processes: Annotated[
        int,
        load_option(min=1, max=256, help="Processes that send together: rows are merged, as if one had sent."),
    ] = 1
    locust_master: Annotated[
        str,
        load_option(
            help="HOST[:PORT] of this machine, where Locust workers of other machines connect and send, --processes "
            "of them, instead of processes here.",
            show_default=False,
        ),
    ] = ""
    out: Annotated[Path, output_option(help="Folder for the results.")] = Path("results/latest")
    grafana: Annotated[
        str | None,
        output_option(help="Mark each run on this Grafana: annotations with the tag prefixwatch.", show_default=False),
    ] = None
    grafana_token_env: Annotated[
        str, output_option(help="Environment variable with a Grafana service account's token.", show_default=False)
    ] = ""
    metrics_listen: Annotated[
        str | None,
        output_option(help="HOST:PORT with the run's own figures, for Prometheus to scrape.", show_default=False),
    ] = None
    otlp: Annotated[
        str | None,
        output_option(help="Push the run's own figures to this OTLP/HTTP collector once a second.", show_default=False),
    ] = None
    live: Annotated[
        bool, output_option("--live", help="Serve the live page during the bench; its exporter takes CPU time.")
    ] = False
    as_json: JsonFlag = False

    @property
    def recording(self) -> TraceOptions | None:
        return trace_options(self.trace, self.speed, self.answers, self)


def tune_of(options: BenchOptions) -> Tune | None:
    """What is tuned, if anything. Raises UsageError."""
    if not options.tune:
        return None
    if options.target or options.levels is not None:
        raise UsageError("--tune goes neither with --target, which has its own router, nor with a sweep or search")
    return parse_tune(options.tune, options.policy)


def specs_of(options: BenchOptions, tune: Tune | None) -> dict[str, str]:
    """The policies to run, by label, as `make_policy` reads them; of a target those that get its constants. Raises
    UsageError."""
    if tune is not None:
        return tune.policies
    if options.target is None:
        return chosen_policies(DEFAULT_POLICIES if options.policy is None else options.policy)
    if options.engine != "simulated":
        raise UsageError("--engine: a target has engines of its own: leave out --engine, or --target")
    if options.policy is None:
        return policies_with_constants() if options.calibrate else {}
    if not options.calibrate:
        raise UsageError(
            "--policy: a target routes by a policy of its own: leave it out, or add --calibrate for the policy's "
            "constants"
        )
    return chosen_policies(options.policy)


def check_cache(options: BenchOptions, scenario: Scenario) -> None:
    """Raise UsageError where KV would have to move between engines: those of a bench keep it as they are set up to."""
    remedy = (
        "engines of a bench keep KV as they are set up to: compare architectures with `prefixwatch simulate --cache`, "
        "or start real engines with a KV connector on one store and bench them with --target "
        "(docs/caches-that-move.md, On real engines)"
    )
    if moving := [name for name, cache in chosen_caches(options.cache).items() if cache.architecture != "sticky"]:
        raise UsageError(f"--cache {', '.join(moving)}: {remedy}")
    if scenario.cache is not None and scenario.cache.architecture != "sticky":
        raise UsageError(f"scenario {scenario.name}: cache.architecture {scenario.cache.architecture}: {remedy}")


def check_outputs(options: BenchOptions) -> None:
    """Raise UsageError for an address that can't be used, and for what several levels of load have no place for."""
    check_repeats(options.levels, options.repeats)
    if options.levels is not None and (options.exporter or options.prometheus):
        raise UsageError(
            "--exporter and --prometheus go with one level of load, whose report shows the engines: leave them out of "
            "a sweep or search"
        )
    check_address("--grafana", options.grafana)
    check_address("--otlp", options.otlp)
    if options.grafana_token_env and not options.grafana:
        raise UsageError("--grafana-token-env: only with --grafana")


def check_calibrate(options: BenchOptions, scenario: Scenario) -> None:
    """Raise UsageError where later runs aren't like the measured one."""
    if options.calibrate and (options.tune or options.levels is not None or scenario.events):
        raise UsageError("--calibrate goes with neither --tune, a sweep, a search nor events: leave one out")


def endpoint_of(options: BenchOptions) -> Endpoint | None:
    """The target, if the bench has one. Raises UsageError for options that need one."""
    if options.target is not None:
        check_address("--exporter", options.exporter)
        check_address("--prometheus", options.prometheus)
        if options.exporter and options.prometheus:
            raise UsageError("--exporter and --prometheus give the same figures: leave one out")
        if options.prometheus_match and not options.prometheus:
            raise UsageError("--prometheus-match: only with --prometheus")
        return Endpoint(options.target, options.api_key_env, options.ca_file)
    given = {
        "--exporter": options.exporter,
        "--prometheus": options.prometheus,
        "--prometheus-match": options.prometheus_match,
        "--model": options.model,
        "--api-key-env": options.api_key_env,
        "--ca-file": options.ca_file,
    }
    if alone := [name for name, value in given.items() if value]:
        raise UsageError(f"{' and '.join(alone)}: only with --target; engines that a bench starts need none")
    return None


def model_dir_of(options: BenchOptions) -> Path | None:
    """None for a target whose /tokenize is asked. Raises UsageError, TokenizerError."""
    if options.tokenize_url and (options.model_dir is not None or not options.target):
        raise UsageError("--tokenize-url goes with --target, and without --model-dir: take one out")
    if options.approximate_prompts and (options.model_dir or options.tokenize_url or not options.target):
        raise UsageError("--approximate-prompts goes with --target, without --model-dir and --tokenize-url")
    if options.model_dir is None and options.target:
        return None
    folder = options.model_dir or default_model_dir()
    Tokenizer(folder)  # fails here, rather than in every process that needs it
    return folder
