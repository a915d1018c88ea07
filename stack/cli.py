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

    Writes summary.json, requests.parquet, fleet.parquet, report.html, junit.xml and config.yaml to --out.
    """
    from stack.bench import BenchOptions, run_bench

    options = BenchOptions(
        scenario=scenario,
        engine=engine,
        workers=workers,
        policies=[name.strip() for name in policy.split(",") if name.strip()],
        target=target,
        model_dir=model_dir,
        repeats=repeats,
        seed=seed,
        duration_seconds=duration,
        out=out,
    )
    console = Console(stderr=as_json)
    summary, exit_code = run_bench(options, console)
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
