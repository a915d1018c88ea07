"""`prefixwatch engines …`: real engines installed and listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stack.cli_shared import JsonFlag

engines_app = typer.Typer(
    no_args_is_help=True, help="Real engines, each in an isolated environment with pinned versions."
)


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
