"""`prefixwatch`: every command, its options and its exit code.

Exit codes: 0 ok · 1 an objective or check failed · 2 the input or the environment was wrong · 3 inconclusive.
Commands import what they run when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from stack.cli_dashboards import dashboards_app
from stack.cli_diagnose import diagnose_app
from stack.cli_engines import engines_app
from stack.cli_exporter import exporter_app
from stack.cli_shared import JsonFlag, finish, names, plain_console, print_error
from stack.cli_slo import slo_app

app = typer.Typer(
    name="prefixwatch",
    help=(
        "Observability, SLOs and a benchmark harness for LLM serving fleets that reuse prefix KV caches.\n\n"
        "Start here: `prefixwatch bench shared-prefix --policy round_robin,cache_aware`"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(diagnose_app)
app.add_typer(exporter_app, name="exporter")
app.add_typer(slo_app, name="slo")
app.add_typer(dashboards_app, name="dashboards")
app.add_typer(engines_app, name="engines")


@app.command()
def bench(
    scenario: Annotated[
        str | None, typer.Argument(help="A shipped scenario's name, or a scenario file (YAML).", show_default=False)
    ] = None,
    engine: Annotated[str, typer.Option(help="Engines to start: `simulated` or `vllm` (real, on CPU).")] = "simulated",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Engines to start; default: the scenario's. With --target, how many it has."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Routing policies to compare, by comma; see `prefixwatch policies`.")
    ] = "round_robin,cache_aware",
    target: Annotated[str | None, typer.Option(help="Send to this running endpoint; start nothing.")] = None,
    model_dir: Annotated[
        Path | None, typer.Option(help="Folder with the target's tokenizer; default: its /tokenize is asked.")
    ] = None,
    tokenize_url: Annotated[
        str | None, typer.Option(help="Ask this engine's /tokenize, where the target is a gateway that has none.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask a target for; default: the first it lists.")] = None,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with a target's API key; the key itself is written nowhere.")
    ] = "",
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificates to check a target's with; default: the system's.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each policy, interleaved A B, B A, …")] = 3,
    seed: Annotated[int, typer.Option(help="Fixes arrivals, lengths, prefix popularity and random ties.")] = 1,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Seconds of traffic a run, warm-up included; default: the scenario's.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay this recording: Mooncake, OpenAI requests, Azure or BurstGPT table, OTel spans."),
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="The recording's format; left out, its content tells.")
    ] = None,
    speed: Annotated[float | None, typer.Option(min=0.001, help="Replay this many times as fast as recorded.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests of the recording.")] = None,
    answers: Annotated[
        str | None, typer.Option(help="Earlier answers in a replay's later turns: `recorded` or `generated`.")
    ] = None,
    search_rate: Annotated[
        bool, typer.Option("--search-rate", help="Find the highest rate that still meets the objectives.")
    ] = False,
    sweep_rate: Annotated[str, typer.Option(help="Run each of these rates, requests a second, by comma.")] = "",
    sweep_concurrency: Annotated[
        str, typer.Option(help="Run closed loops of so many users each, by comma; says that they are.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results/latest"),
    live: Annotated[
        bool, typer.Option("--live", help="Serve the live page meanwhile; its exporter takes CPU from the engines.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start engines and a router, send a scenario under each policy, grade, compare and report.

    Example: `prefixwatch bench shared-prefix --engine vllm --workers 2 --policy round_robin,cache_aware`

    Example: `prefixwatch bench --trace conversation_trace.jsonl --speed 0.1 --policy score`

    Example: `prefixwatch bench shared-prefix --search-rate --policy score`

    Writes summary.json, summary.md, requests.parquet, fleet.parquet, report.html, junit.xml and config.yaml to --out.
    """
    from stack.bench import BenchOptions, run_bench
    from stack.load_levels import levels_request
    from stack.scenario_choice import trace_options

    options = BenchOptions(
        scenario=scenario,
        engine=engine,
        workers=workers,
        policies=names(policy),
        target=target,
        model_dir=model_dir,
        tokenize_url=tokenize_url,
        model=model,
        api_key_env=api_key_env,
        ca_file=ca_file,
        repeats=repeats,
        seed=seed,
        duration_seconds=duration,
        out=out,
        live=live,
        trace=trace_options(trace, trace_format, speed, limit, answers),
        levels=levels_request(search_rate=search_rate, sweep_rate=sweep_rate, sweep_concurrency=sweep_concurrency),
    )
    finish(*run_bench(options, plain_console(stderr=as_json)), as_json=as_json)


@app.command()
def simulate(
    source: Annotated[
        str | None, typer.Argument(help="A scenario (name or YAML file) or a trace (JSON lines).", show_default=False)
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace in Mooncake's format; the same as naming it.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Engines; default: the scenario's, 1 for a trace.")] = None,
    capacity_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="KV blocks an engine holds; default: the scenario's, unbounded for a trace."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Routing policies, by comma.")] = "round_robin,cache_aware",
    arrivals: Annotated[
        str,
        typer.Option(
            help="`trace`: at their recorded times. `serial`: one request after another, an exact study of the "
            "cache. `auto`: serial for one worker, else trace."
        ),
    ] = "auto",
    speed: Annotated[
        float | None, typer.Option(help="A trace: replay this many times as fast as recorded.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="A trace: only the first requests.")] = None,
    view: Annotated[
        str,
        typer.Option(
            help="What policies know of the caches: the router's own `history`, engines' `events`, or `snapshots` of "
            "engines' caches, up to 3 s old."
        ),
    ] = "history",
    profile: Annotated[str | None, typer.Option(help="Step-time profile of the engines.")] = None,
    prefill_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Split the fleet: so many engines more that only compute prompts. `--workers` and `--policy` are then "
            "for those that generate.",
            show_default=False,
        ),
    ] = None,
    prefill_policy: Annotated[
        str, typer.Option(help="Routing policy of the prefill engines of a split fleet.")
    ] = "round_robin",
    search_rate: Annotated[
        bool, typer.Option("--search-rate", help="Find the highest rate that still meets the objectives.")
    ] = False,
    sweep_rate: Annotated[str, typer.Option(help="Run each of these rates, requests a second, by comma.")] = "",
    sweep_concurrency: Annotated[str, typer.Option(help="Run closed loops of so many users each, by comma.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of a scenario, each with its own seed.")] = 3,
    seed: Annotated[int, typer.Option(help="Fixes the traffic and random ties.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Run the same policies and engine model in virtual time: an hour on 64 engines in 20 s, exactly repeatable.

    Example: `prefixwatch simulate shared-prefix --policy round_robin,cache_aware,score --workers 16`

    Example: `prefixwatch simulate --trace conversation_trace.jsonl --workers 1 --capacity-blocks 10000`

    Example: `prefixwatch simulate shared-prefix --prefill-workers 4 --prefill-policy mooncake --policy flexlb_decode`
    """
    from stack.load_levels import levels_request
    from stack.simulate_command import SimulateOptions, run_simulate

    options = SimulateOptions(
        source=source,
        trace=trace,
        workers=workers,
        capacity_blocks=capacity_blocks,
        policies=names(policy),
        arrivals=arrivals,
        speed=1.0 if speed is None else speed,
        limit=limit,
        view=view,
        profile=profile,
        repeats=repeats,
        seed=seed,
        prefill_workers=prefill_workers,
        prefill_policy=prefill_policy,
        levels=levels_request(search_rate=search_rate, sweep_rate=sweep_rate, sweep_concurrency=sweep_concurrency),
    )
    finish(*run_simulate(options, plain_console(stderr=as_json)), as_json=as_json)


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="Folder of the baseline run, as `bench --out` left it.")],
    run_b: Annotated[Path, typer.Argument(help="Folder of the run to compare with it.")],
    policy: Annotated[str, typer.Option(help="Policies to compare, by comma; default: all that both runs have.")] = "",
    slo: Annotated[
        list[str] | None, typer.Option(help="SLO document that says what goodput is; default: the runs' own.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Let a significant loss pass that is below so many percent.")
    ] = 0.0,
    markdown: Annotated[
        Path | None, typer.Option(help="Append the result to this file as Markdown, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the result to this file, as a page like report.html.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say which figures of two runs differ, by how much, with what confidence; 1 when the second is worse.

    Example: `prefixwatch compare results/baseline results/latest --tolerance 3`
    """
    from stack.compare_command import as_json as compared_json
    from stack.compare_command import comparison_markdown, comparison_page, print_comparison, run_compare
    from stack.out_folder import append_text, write_text

    result, exit_code = run_compare(run_a, run_b, names(policy), slo or [], tolerance)
    if markdown is not None:
        append_text(markdown, comparison_markdown(result), "--markdown")
    if html is not None:
        write_text(html, comparison_page(result), "--html")
    if as_json:
        print(json.dumps(compared_json(result), indent=2))
    else:
        print_comparison(result, plain_console())
    raise typer.Exit(exit_code)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, as `bench --out` left it.")],
    slo: Annotated[list[str] | None, typer.Option(help="SLO document to grade it on instead of the run's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the new files; default: the run's.")] = None,
    also: Annotated[
        str | None,
        typer.Option("--as", help="A further format: `vllm-bench`, a JSON file a policy, by its definitions."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade a finished run again from its request log, for instance on other SLOs, and write its report anew.

    Example: `prefixwatch report results/latest --slo ttft --slo goodput`
    """
    from stack.report_command import run_report

    finish(*run_report(run, slo or [], out, plain_console(stderr=as_json), also=also), as_json=as_json)


@app.command()
def scenarios(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a scenario file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the shipped scenarios and what each shows; every key of a scenario file is in docs/scenarios.md.

    Example: `prefixwatch scenarios --schema > scenario.schema.json`
    """
    from loadgen.scenario_reference import schema as scenario_schema
    from stack.listings import described_scenarios, scenarios_table

    if schema:
        print(json.dumps(scenario_schema(), indent=2))
    elif as_json:
        print(json.dumps(described_scenarios(), indent=2))
    else:
        plain_console().print(scenarios_table(described_scenarios()))


@app.command()
def analyze(
    traffic: Annotated[
        str, typer.Argument(help="A scenario, or a recording: Mooncake trace, OpenAI requests (JSONL), OTel spans.")
    ],
    recording_format: Annotated[
        str | None, typer.Option("--format", help="The recording's format; left out, its content tells.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
    model_dir: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer; default: the built-in tiny model's.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block; a trace has its own.")] = 16,
    seed: Annotated[int, typer.Option(help="Fixes a scenario's traffic.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Say what of some traffic a prefix cache could reuse, what breaks it, and how much cache it takes.

    Example: `prefixwatch analyze requests.jsonl --model-dir ./Qwen3-8B`

    Example: `prefixwatch analyze dynamic-first`
    """
    from stack.analyze_command import AnalyzeOptions, run_analyze

    options = AnalyzeOptions(traffic, recording_format, limit, model_dir, block_size, seed)
    found = run_analyze(options, plain_console(stderr=as_json))
    finish(found, 0, as_json=as_json)


@app.command()
def up(
    config: Annotated[Path | None, typer.Option(help="prefixwatch.yaml; without it, 4 simulated engines.")] = None,
    host: Annotated[str | None, typer.Option(help="Address that router and exporter listen on.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder for logs and Prometheus' data.")] = Path("results/up"),
) -> None:
    """Run the whole stack until Ctrl-C: engines, router, exporter; Prometheus and Alertmanager if installed.

    Example: `prefixwatch up`, then send chats to the printed router address.
    """
    from stack.config import load_config
    from stack.up import run_up

    run_up(load_config(config).listening_on(host), folder, plain_console())


@app.command()
def router(config: Annotated[Path, typer.Option(help="prefixwatch.yaml; `fleet.targets` lists the engines.")]) -> None:
    """Run the router alone, in front of the engines in `fleet.targets`.

    Example: `prefixwatch router --config prefixwatch.yaml`
    """
    from stack.parts import run_router

    run_router(config, plain_console())


@app.command()
def engine(
    config: Annotated[
        Path, typer.Option(help="YAML with the simulated engine's settings (engines/simulated_config.py).")
    ],
) -> None:
    """Run one simulated engine alone.

    Example: `prefixwatch engine --config engine.yaml`
    """
    from stack.parts import run_engine

    run_engine(config)


@app.command()
def policies(as_json: JsonFlag = False) -> None:
    """List the routing policies: where each comes from, what it needs to know, its defaults.

    Example: `prefixwatch policies --json`
    """
    from router.policies import describe
    from stack.listings import policies_table

    found = describe()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        plain_console().print(policies_table(found))


def main() -> None:
    """Entry point: wrong input or environment becomes one message and exit code 2."""
    from stack.errors import INPUT_ERRORS

    try:
        app()
    except INPUT_ERRORS as error:
        print_error(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
