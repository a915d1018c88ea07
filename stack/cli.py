"""`prefixwatch`: every command, its options and its exit code.

Exit codes: 0 ok · 1 an objective or check failed · 2 the input or the environment was wrong · 3 inconclusive.
Commands import what they run when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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
engines_app = typer.Typer(
    no_args_is_help=True, help="Real engines, each in an isolated environment with pinned versions."
)
app.add_typer(engines_app, name="engines")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


@app.command()
def bench(
    scenario: Annotated[str, typer.Argument(help="A shipped scenario's name, or a scenario file (YAML).")],
    engine: Annotated[str, typer.Option(help="Engines to start: `simulated` or `vllm` (real, on CPU).")] = "simulated",
    workers: Annotated[int | None, typer.Option(min=1, help="Engines to start; default: the scenario's.")] = None,
    policy: Annotated[
        str, typer.Option(help="Routing policies to compare, by comma; see `prefixwatch policies`.")
    ] = "round_robin,cache_aware",
    target: Annotated[str | None, typer.Option(help="Send to this running endpoint; start nothing.")] = None,
    model_dir: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer; needed with --target.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each policy, interleaved A B, B A, …")] = 3,
    seed: Annotated[int, typer.Option(help="Fixes arrivals, lengths, prefix popularity and random ties.")] = 1,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Seconds of measured traffic a run; default: the scenario's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results/latest"),
    as_json: JsonFlag = False,
) -> None:
    """Start engines and a router, send a scenario under each policy, grade, compare and report.

    Example: `prefixwatch bench shared-prefix --engine vllm --workers 2 --policy round_robin,cache_aware`

    Writes summary.json, summary.md, requests.parquet, fleet.parquet, report.html, junit.xml and config.yaml to --out.
    """
    from stack.bench import BenchOptions, run_bench

    options = BenchOptions(
        scenario=scenario,
        engine=engine,
        workers=workers,
        policies=_names(policy),
        target=target,
        model_dir=model_dir,
        repeats=repeats,
        seed=seed,
        duration_seconds=duration,
        out=out,
    )
    _finish(*run_bench(options, Console(stderr=as_json)), as_json=as_json)


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
    speed: Annotated[float, typer.Option(help="Replay this many times as fast as recorded.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
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
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of a scenario, each with its own seed.")] = 3,
    seed: Annotated[int, typer.Option(help="Fixes the traffic and random ties.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Run the same policies and engine model in virtual time: an hour on 64 engines in 20 s, exactly repeatable.

    Example: `prefixwatch simulate shared-prefix --policy round_robin,cache_aware,score --workers 16`

    Example: `prefixwatch simulate --trace conversation_trace.jsonl --workers 1 --capacity-blocks 10000`

    Example: `prefixwatch simulate shared-prefix --prefill-workers 4 --prefill-policy mooncake --policy flexlb_decode`
    """
    from stack.simulate_command import SimulateOptions, run_simulate

    options = SimulateOptions(
        source=source,
        trace=trace,
        workers=workers,
        capacity_blocks=capacity_blocks,
        policies=_names(policy),
        arrivals=arrivals,
        speed=speed,
        limit=limit,
        view=view,
        profile=profile,
        repeats=repeats,
        seed=seed,
        prefill_workers=prefill_workers,
        prefill_policy=prefill_policy,
    )
    _finish(*run_simulate(options, Console(stderr=as_json)), as_json=as_json)


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
    as_json: JsonFlag = False,
) -> None:
    """Say which figures of two runs differ, by how much, with what confidence; 1 when the second is worse.

    Example: `prefixwatch compare results/baseline results/latest --tolerance 3`
    """
    from stack.compare_command import as_json as compared_json
    from stack.compare_command import comparison_markdown, print_comparison, run_compare

    result, exit_code = run_compare(run_a, run_b, _names(policy), slo or [], tolerance)
    if markdown is not None:
        with markdown.open("a", encoding="utf-8") as file:
            file.write(comparison_markdown(result))
    if as_json:
        print(json.dumps(compared_json(result), indent=2))
    else:
        print_comparison(result, Console())
    raise typer.Exit(exit_code)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, as `bench --out` left it.")],
    slo: Annotated[list[str] | None, typer.Option(help="SLO document to grade it on instead of the run's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the new files; default: the run's.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade a finished run again from its request log, for instance on other SLOs, and write its report anew.

    Example: `prefixwatch report results/latest --slo ttft --slo goodput`
    """
    from stack.report_command import run_report

    _finish(*run_report(run, slo or [], out, Console(stderr=as_json)), as_json=as_json)


@app.command()
def up(
    config: Annotated[Path | None, typer.Option(help="prefixwatch.yaml; without it, 4 simulated engines.")] = None,
    host: Annotated[str | None, typer.Option(help="Address that router and exporter listen on.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder for logs and Prometheus' data.")] = Path("results/up"),
) -> None:
    """Run the whole stack until Ctrl-C: engines, router, exporter, Prometheus if it is installed.

    Example: `prefixwatch up`, then send chats to the printed router address.
    """
    from stack.config import load_config
    from stack.up import run_up

    run_up(load_config(config).listening_on(host), folder, Console())


@app.command()
def router(config: Annotated[Path, typer.Option(help="prefixwatch.yaml; `fleet.targets` lists the engines.")]) -> None:
    """Run the router alone, in front of the engines in `fleet.targets`.

    Example: `prefixwatch router --config prefixwatch.yaml`
    """
    from stack.parts import run_router

    run_router(config, Console())


@app.command()
def exporter(
    target: Annotated[
        list[str] | None, typer.Option(help="`[NAME=]URL` of a metrics page; may be given again and again.")
    ] = None,
    kv_events: Annotated[
        list[str] | None, typer.Option(help="`[NAME=]ENDPOINT` of a target's ZMQ KV events, e.g. tcp://host:5557.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to serve on.")] = None,
    interval: Annotated[float | None, typer.Option(help="Seconds between scrapes.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Scrape, print the metrics and end; 2 if a target failed.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="Configuration file instead of --target.")] = None,
) -> None:
    """Scrape routers and engines, derive prefix-cache metrics, serve them at /metrics and /api/v1/fleet.

    Example: `prefixwatch exporter --target http://127.0.0.1:8001 --target router=http://127.0.0.1:8000 --once`
    """
    from stack.parts import run_exporter

    run_exporter(target or [], kv_events or [], listen, interval, once=once, config=config, console=Console())


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
        Console().print(policies_table(found))


@engines_app.command("install")
def engines_install(
    engine: Annotated[str, typer.Argument(help="The engine to install: `vllm`.")],
    torch_index_url: Annotated[
        str | None,
        typer.Option(
            help="Index of PyTorch's CPU wheels, where pip doesn't find torch's CPU build by itself: the address that "
            "PyTorch's installation page gives for pip and CPU."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to; default: the user's data folder.")] = None,
) -> None:
    """Install a real engine into an environment of its own; a broken installation is repaired.

    Example: `prefixwatch engines install vllm`
    """
    from stack.engines_command import install

    install(engine, folder, torch_index_url, Console())


@engines_app.command("list")
def engines_list(as_json: JsonFlag = False) -> None:
    """List the engines that `bench --engine` can start, and whether they are installed.

    Example: `prefixwatch engines list`
    """
    from stack.engines_command import installed, installed_table

    found = installed()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(installed_table(found))


@engines_app.command("model")
def engines_model(folder: Annotated[Path, typer.Argument(help="Folder to write the model to.")]) -> None:
    """Make the tiny random-weight model with its own tokenizer, without any download.

    Example: `prefixwatch engines model ./tiny`
    """
    from engines.tiny_model import make_tiny_model

    print(make_tiny_model(folder, weights=True))


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _finish(summary: dict[str, Any], exit_code: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, indent=2))
    raise typer.Exit(exit_code)


def main() -> None:
    """Entry point: wrong input or environment becomes one message and exit code 2."""
    from stack.errors import INPUT_ERRORS

    try:
        app()
    except INPUT_ERRORS as error:
        for line in str(error).splitlines():
            Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {line}", highlight=False, markup=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
