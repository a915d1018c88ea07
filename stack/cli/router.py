"""`prefixwatch router`: the router alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from prefixwatch.router.serving import app as router_app
from prefixwatch.stack.cli.command import command, new_app, plain_console, target_option
from prefixwatch.stack.cli.service import serve
from prefixwatch.stack.config import load_config
from prefixwatch.stack.errors import UsageError

app = new_app()


@command(app, "router")
def router(config: Annotated[Path, target_option(help="prefixwatch.yaml; `fleet.targets` lists the engines.")]) -> None:
    """Run the router alone, in front of the engines in `fleet.targets`.

    Example: `prefixwatch router --config prefixwatch.yaml`
    """
    loaded = load_config(config)
    if not loaded.fleet.targets:
        raise UsageError(f"{config}: fleet.targets: lists no engine: add at least one with name and url")
    tokenizer, console = loaded.tokenizer, plain_console()
    settings = loaded.router_config(loaded.fleet.targets, tokenizer.model_dir, tokenizer.block_size)
    serve(router_app.serve(settings, ready=lambda address: console.print(f"router ready on {address}")))
