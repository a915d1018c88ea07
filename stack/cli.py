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
slo_app = typer.Typer(
    no_args_is_help=True, help="SLO documents (OpenSLO): check them, write rules and alerts, grade a request log."
)
app.add_typer(slo_app, name="slo")
dashboards_app = typer.Typer(no_args_is_help=True, help="Grafana dashboards: write them, check every query, preview.")
app.add_typer(dashboards_app, name="dashboards")
exporter_app = typer.Typer(invoke_without_command=True)
app.add_typer(exporter_app, name="exporter")
catalogue_app = typer.Typer(no_args_is_help=True, help="What the exporter knows of other systems' metrics.")
exporter_app.add_typer(catalogue_app, name="catalogue")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


@app.command()
def bench(
    scenario: Annotated[
        str | None, typer.Argument(help="A shipped scenario's name, or a scenario file (YAML).", show_default=False)
    ] = None,
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
    from stack.scenario_choice import TraceOptions

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
        trace=None if trace is None else TraceOptions(trace, trace_format, speed, limit, answers),
        levels=levels_request(search_rate=search_rate, sweep_rate=sweep_rate, sweep_concurrency=sweep_concurrency),
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
        levels=levels_request(search_rate=search_rate, sweep_rate=sweep_rate, sweep_concurrency=sweep_concurrency),
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
        Console().print(scenarios_table(described_scenarios()))


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
    found = run_analyze(options, Console(stderr=as_json))
    _finish(found, 0, as_json=as_json)


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


@exporter_app.callback()
def exporter(
    context: typer.Context,
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
    config: Annotated[
        Path | None, typer.Option(help="prefixwatch.yaml instead of --target; its `exporter` section has all settings.")
    ] = None,
    web_config_file: Annotated[
        Path | None, typer.Option(help="TLS and basic auth, in the format that Prometheus' exporters share.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="logfmt or json.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Scrape routers and engines, derive prefix-cache metrics, serve them at /metrics and /api/v1/fleet.

    Example: `prefixwatch exporter --target http://127.0.0.1:8001 --target router=http://127.0.0.1:8000 --once`
    """
    if context.invoked_subcommand:
        return
    from stack.parts import run_exporter

    settings = {
        "listen": listen,
        "interval_seconds": interval,
        "web_config_file": web_config_file,
        "log_format": log_format,
        "log_level": log_level,
    }
    run_exporter(target or [], kv_events or [], settings, once=once, config=config, console=Console())


@exporter_app.command("fingerprint")
def exporter_fingerprint(
    model_dir: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.")],
    system_prompt: Annotated[Path | None, typer.Option(help="File with a system prompt, for chats.")] = None,
    text: Annotated[Path | None, typer.Option(help="File with an opening, for plain completions.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block of the engine.")] = 16,
    salt_env: Annotated[
        str | None, typer.Option(help="Environment variable with the tenant's cache salt, where one is used.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell how the exporter recognises a prompt's opening; put it into `exporter.prefixes` to give it a name.

    Example: `prefixwatch exporter fingerprint --model-dir models/llama --system-prompt support.txt`
    """
    from stack.fingerprint_command import fingerprint

    found = fingerprint(model_dir, system_prompt, text, block_size, salt_env)
    if as_json:
        print(json.dumps(found))
    else:
        print(f"{found['fingerprint']}  ({found['tokens']} tokens, {found['blocks']} full blocks)")


@catalogue_app.command("check")
def catalogue_check(
    file: Annotated[str, typer.Argument(help="A catalogue file (YAML), or the name of a system that is shipped.")],
    against: Annotated[Path, typer.Option(help="A metrics page, saved from the system; may be gzipped.")],
    as_json: JsonFlag = False,
) -> None:
    """Say what a catalogue file maps of a page, what it leaves, and what looks wrong: units, labels, kinds. 1 if so.

    Example: `curl -s http://gateway:9090/metrics > page.txt; prefixwatch exporter catalogue check my.yaml --against
    page.txt`
    """
    from stack.catalogue_command import run_check

    raise typer.Exit(run_check(file, against, Console(), as_json=as_json))


@catalogue_app.command("schema")
def catalogue_schema() -> None:
    """Print the JSON schema of a catalogue file, for editors.

    Example: `prefixwatch exporter catalogue schema > catalogue.schema.json`
    """
    from stack.catalogue_command import schema

    print(schema())


@app.command()
def diagnose(
    alert: Annotated[
        str | None, typer.Argument(help="The alert that fired; its page's questions come first.", show_default=False)
    ] = None,
    prometheus: Annotated[str | None, typer.Option(help="URL of the Prometheus that scrapes the exporter.")] = None,
    exporter: Annotated[
        str | None, typer.Option(help="URL of the exporter itself, where there is no Prometheus.")
    ] = None,
    window: Annotated[str, typer.Option(help="Range that is looked at, e.g. 5m; with --prometheus.")] = "5m",
    seconds: Annotated[float, typer.Option(min=1, help="How long to watch; with --exporter.")] = 10.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown for an incident ticket.")] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="The checklist before a launch instead; 1 if an item failed.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="With --preflight: endpoint that gets about a dozen small chats.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="With --preflight: prefixwatch.yaml of the fleet.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Ask the runbooks' questions in order, and name the likeliest cause: 0 nothing wrong, 1 found, 3 inconclusive.

    Example: `prefixwatch diagnose PrefixHitRateLow --prometheus http://127.0.0.1:9090`

    Example: `prefixwatch diagnose --exporter http://127.0.0.1:9477 --markdown`

    Example: `prefixwatch diagnose --preflight --target http://127.0.0.1:8000 --config prefixwatch.yaml`
    """
    if preflight:
        from stack.preflight_command import PreflightOptions, run_preflight

        facts = PreflightOptions(target, config, prometheus, exporter, window, seconds)
        _finish(*run_preflight(facts, Console(stderr=as_json), markdown=markdown, as_json=as_json), as_json=as_json)
    from stack.diagnose_command import DiagnoseOptions, run_diagnose

    options = DiagnoseOptions(alert, prometheus, exporter, window, seconds)
    console = Console(stderr=as_json or markdown)
    _finish(*run_diagnose(options, console, markdown=markdown, as_json=as_json), as_json=as_json)


@app.command()
def drill(
    fault: Annotated[
        list[str] | None, typer.Argument(help="Faults by name; all of them without any.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Practise: make a fault in a small local stack, and see which alerts come and what the diagnosis says.

    Starts simulated engines, a router, the exporter, Prometheus and Alertmanager; under a minute a fault. 1 when an
    alert or the named cause isn't the right one.

    Example: `prefixwatch drill hot-prefix`
    """
    from stack.drill_command import run_drills

    results, exit_code = run_drills(fault or [], Console(stderr=as_json), as_json=as_json)
    _finish({"drills": results}, exit_code, as_json=as_json)


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


@slo_app.command("check")
def slo_check(
    documents: Annotated[
        list[str] | None, typer.Argument(help="OpenSLO files, or names of shipped ones; default: all shipped.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check SLO documents and say how each objective is understood.

    Example: `prefixwatch slo check my-slos.yaml`
    """
    from stack.slo_command import check, check_table

    found = check(documents or [])
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(check_table(found))
        for note in (note for row in found for note in row["notes"]):
            Console().print(f"note: {note}", highlight=False)


@slo_app.command("build")
def slo_build(
    documents: Annotated[
        list[str] | None, typer.Argument(help="OpenSLO files, or names of shipped ones; default: all shipped.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the rule files.")] = Path("alerts/rules"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; 1 if the folder is out of date.")] = False,
    form: Annotated[
        str, typer.Option("--format", help="`prometheus` rules, `kubernetes` PrometheusRule objects, `sloth` specs.")
    ] = "prometheus",
    thresholds: Annotated[
        Path | None, typer.Option(help="Thresholds that replace those of alerts/thresholds.yaml.")
    ] = None,
    scrape_interval: Annotated[float, typer.Option(help="Seconds between Prometheus' scrapes of the exporter.")] = 15.0,
    job: Annotated[str, typer.Option(help="The exporter's job label in Prometheus.")] = "prefixwatch",
    alertmanager: Annotated[
        Path | None, typer.Option(help="Write an Alertmanager configuration for these alerts to this file, too.")
    ] = None,
    runbooks: Annotated[str, typer.Option(help="Where the runbooks are served: <here>/<AlertName>.md.")] = "runbooks",
    dashboards: Annotated[str, typer.Option(help="Grafana's dashboards: <here>/<uid>.")] = "/d",
    absent_alerts: Annotated[
        bool, typer.Option("--absent-alerts/--no-absent-alerts", help="Alert on SLOs that nothing measures.")
    ] = True,
    hasten: Annotated[
        float, typer.Option(min=1, help="For drills: divide every length of time by this, e.g. 60.")
    ] = 1.0,
) -> None:
    """Write recording rules and alerts: the shipped ones, and those of the SLO documents.

    Example: `prefixwatch slo build my-slos.yaml --out rules`
    """
    from alerts.settings import RuleSettings
    from stack.slo_command import BuildOptions, run_build

    settings = RuleSettings(
        scrape_interval_seconds=scrape_interval,
        job=job,
        runbook_base=runbooks.rstrip("/"),
        dashboard_base=dashboards.rstrip("/"),
        absent_alerts=absent_alerts,
        thresholds=thresholds,
        hasten=hasten,
    )
    raise typer.Exit(run_build(BuildOptions(documents or [], out, check, form, settings, alertmanager), Console()))


@slo_app.command("grade")
def slo_grade(
    requests: Annotated[Path, typer.Argument(help="A run's requests.parquet.")],
    slo: Annotated[list[str], typer.Option(help="OpenSLO file, or the name of a shipped one; may be repeated.")],
    as_json: JsonFlag = False,
) -> None:
    """Grade a load test's request log by SLO documents; 1 if an objective was missed, 3 if one can't be judged.

    Example: `prefixwatch slo grade results/latest/requests.parquet --slo ttft --slo goodput`
    """
    from stack.slo_command import grade, grade_table

    found, exit_code = grade(requests, slo)
    if not as_json:
        Console().print(grade_table(found))
    _finish(found, exit_code, as_json=as_json)


@dashboards_app.command("build")
def dashboards_build(
    out: Annotated[Path, typer.Option(help="Folder for json/, v2/ and provisioning/.")] = Path("dashboards"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; 1 if the folder is out of date.")] = False,
    runbooks: Annotated[str, typer.Option(help="Where the runbooks are served: <here>/<AlertName>.md.")] = "runbooks",
) -> None:
    """Write the dashboards: classic JSON, v2 manifests, provisioning files and a ConfigMap.

    Example: `prefixwatch dashboards build --out grafana --runbooks https://wiki.example.com/runbooks`
    """
    from stack.dashboards_command import run_build

    raise typer.Exit(run_build(out, Console(), check_only=check, runbooks=runbooks.rstrip("/")))


@dashboards_app.command("check")
def dashboards_check(
    prometheus: Annotated[str, typer.Option(help="A Prometheus that scrapes the exporter and has the rules.")],
    minutes: Annotated[float, typer.Option(min=0.1, help="The time shown: so many minutes up to now.")] = 15.0,
    scrape_interval: Annotated[float, typer.Option(min=0.1, help="The dashboards' variable, in seconds.")] = 15.0,
    job: Annotated[str, typer.Option(help="The exporter's job label in Prometheus.")] = "prefixwatch",
    as_json: JsonFlag = False,
) -> None:
    """Run every query of every panel, variable and annotation; 1 if one has no data and no listed reason.

    Example: `prefixwatch dashboards check --prometheus http://localhost:9090`
    """
    from dashboards.asked import Shown
    from stack.dashboards_command import print_check, run_check

    found, exit_code = run_check(prometheus, Shown(minutes * 60, scrape_interval), job)
    if not as_json:
        print_check(found, Console())
    _finish(found, exit_code, as_json=as_json)


@dashboards_app.command("preview")
def dashboards_preview(
    prometheus: Annotated[str, typer.Option(help="A Prometheus that scrapes the exporter and has the rules.")],
    out: Annotated[Path, typer.Option(help="Folder for the pages.")] = Path("results/dashboards"),
    dashboard: Annotated[list[str] | None, typer.Option(help="Only this one, e.g. overview; may be repeated.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="The time shown: so many minutes up to now.")] = 15.0,
    scrape_interval: Annotated[float, typer.Option(min=0.1, help="The dashboards' variable, in seconds.")] = 15.0,
) -> None:
    """Draw the dashboards as plain pages from a Prometheus' answers, where there is no Grafana.

    Example: `prefixwatch dashboards preview --prometheus http://localhost:9090 --dashboard overview`
    """
    from dashboards.asked import Shown
    from stack.dashboards_command import run_preview

    print(run_preview(prometheus, Shown(minutes * 60, scrape_interval), out, dashboard or []))


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
