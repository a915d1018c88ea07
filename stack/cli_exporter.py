"""`prefixwatch exporter …`: the exporter itself, and what it knows of other systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stack.cli_shared import JsonFlag

exporter_app = typer.Typer(invoke_without_command=True)
catalogue_app = typer.Typer(no_args_is_help=True, help="What the exporter knows of other systems' metrics.")
exporter_app.add_typer(catalogue_app, name="catalogue")


@exporter_app.callback()
def exporter(
    context: typer.Context,
    target: Annotated[
        list[str] | None, typer.Option(help="`[NAME=]URL` of a metrics page; may be given again and again.")
    ] = None,
    kv_events: Annotated[
        list[str] | None, typer.Option(help="`[NAME=]ENDPOINT` of a target's ZMQ KV events, e.g. tcp://host:5557.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to serve on; 127.0.0.1:9477 if not given.")] = None,
    interval: Annotated[float | None, typer.Option(help="Seconds between scrapes of a target; 5 if not given.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Scrape, print the metrics and end; 2 if a target failed.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="prefixwatch.yaml instead of --target; its `exporter` section has all settings.")
    ] = None,
    web_config_file: Annotated[
        Path | None, typer.Option(help="TLS and basic auth, in the format that Prometheus' exporters share.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="logfmt or json; logfmt if not given.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error; info if not given.")] = None,
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

    Example: `prefixwatch exporter catalogue check my.yaml --against page.txt`, where the page was saved by
    `curl -s http://gateway:9090/metrics > page.txt`
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
