"""`prefixwatch exporter`: the exporter itself, the catalogue of other systems, and fingerprints of prompts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixwatch.exporters import app as exporter_app
from prefixwatch.exporters import logs
from prefixwatch.exporters.config import ExporterConfig, config_from_flags, with_flags
from prefixwatch.exporters.http.web_config import WebSecurity
from prefixwatch.stack.cli.command import (
    JsonFlag,
    command,
    new_app,
    output_option,
    plain_console,
    print_error,
    target_option,
)
from prefixwatch.stack.cli.service import serve
from prefixwatch.stack.config import load_config
from prefixwatch.stack.errors import UsageError

app = new_app(invoke_without_command=True)
catalogue_app = new_app(no_args_is_help=True, help="What the exporter knows of other systems' metrics.")
app.add_typer(catalogue_app, name="catalogue")


@app.callback()
def exporter(
    context: typer.Context,
    target: Annotated[list[str] | None, target_option(help="`[NAME=]URL` of a metrics page; may be repeated.")] = None,
    kv_events: Annotated[
        list[str] | None, target_option(help="`[NAME=]ENDPOINT` of a target's ZMQ KV events, e.g. tcp://host:5557.")
    ] = None,
    config: Annotated[
        Path | None, target_option(help="prefixwatch.yaml instead of --target; see docs/configuration.md.")
    ] = None,
    interval: Annotated[float | None, target_option(help="Seconds between scrapes of a target; default: 5.")] = None,
    once: Annotated[
        bool, output_option("--once", help="Scrape once, print the metrics and exit; 2 if a target failed.")
    ] = False,
    shard: Annotated[
        str | None, target_option(help="INDEX/COUNT: scrape only this share of the targets, e.g. 0/3.")
    ] = None,
    state: Annotated[
        Path | None, output_option(help="File that keeps what was read and counted over a restart.")
    ] = None,
    listen: Annotated[str | None, output_option(help="HOST:PORT to serve on; default: 127.0.0.1:9477.")] = None,
    web_config_file: Annotated[
        Path | None, output_option(help="TLS and basic auth, in the format of Prometheus' exporters.")
    ] = None,
    log_format: Annotated[str | None, output_option(help="logfmt or json; default: logfmt.")] = None,
    log_level: Annotated[str | None, output_option(help="debug, info, warning or error; default: info.")] = None,
) -> None:
    """Scrape routers and engines, derive prefix-cache metrics, serve them at /metrics and /api/v1/fleet.

    Example: `prefixwatch exporter --target http://127.0.0.1:8001 --target router=http://127.0.0.1:8000 --once`
    """
    if context.invoked_subcommand:
        return
    if config is not None and (target or kv_events):
        raise UsageError("give either --config or --target, not both: with --config, targets are in the file")
    if config is None and not target:
        raise UsageError("no target: give --target [NAME=]URL, or --config FILE")
    settings = {
        "listen": listen,
        "shard": shard,
        "state_file": state,
        "interval_seconds": interval,
        "web_config_file": web_config_file,
        "log_format": log_format,
        "log_level": log_level,
    }
    given = {name: value for name, value in settings.items() if value is not None}

    def load() -> ExporterConfig:
        if config is None:
            return config_from_flags(target or [], kv_events or [], **given)
        loaded = load_config(config)
        return loaded.model_copy(update={"exporter": with_flags(loaded.exporter, given)}).exporter_config(
            loaded.fleet.targets
        )

    start = load()
    logs.log_to(sys.stderr, start.log_format, start.log_level)
    if once:
        _once(start)
        return
    security = WebSecurity(start.web_config_file) if start.web_config_file else None
    console = plain_console()
    serve(exporter_app.serve(start, lambda url: console.print(f"exporter ready on {url}"), load, security))


def _once(config: ExporterConfig) -> None:
    text, failed = asyncio.run(exporter_app.once(config))
    sys.stdout.write(text)
    for line in failed:
        print_error(line)
    if failed:
        raise SystemExit(2)


@command(app, "fingerprint")
def exporter_fingerprint(
    model_dir: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.")],
    system_prompt: Annotated[Path | None, typer.Option(help="File with a system prompt, for chats.")] = None,
    text: Annotated[Path | None, typer.Option(help="File with an opening, for plain completions.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block of the engine.")] = 16,
    salt_env: Annotated[
        str | None, typer.Option(help="Environment variable with the tenant's cache salt, if one is used.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the fingerprint of a prompt's opening; put it into `exporter.prefixes` to give the prefix a name.

    Example: `prefixwatch exporter fingerprint --model-dir models/llama --system-prompt support.txt`
    """
    found = fingerprint(model_dir, system_prompt, text, block_size, salt_env)
    if as_json:
        print(json.dumps(found))
    else:
        print(f"{found['fingerprint']}  ({found['tokens']} tokens, {found['blocks']} full blocks)")


def fingerprint(
    model_dir: Path,
    system_prompt: Path | None,
    text: Path | None,
    block_size: int,
    salt_env: str | None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The fingerprint of one of the two files. Raises UsageError and TokenizerError."""
    from prefixwatch.kvcache.fingerprint import system_prompt_fingerprint, text_fingerprint
    from prefixwatch.kvcache.prompts.tokenizer import Tokenizer

    file = system_prompt or text
    if file is None or (system_prompt and text):
        raise UsageError("give one of --system-prompt FILE and --text FILE")
    salt = environment.get(salt_env) if salt_env else None
    if salt_env and not salt:
        raise UsageError(f"--salt-env {salt_env}: there is no such environment variable, or it is empty")
    try:
        opening = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} can't be read: {error}") from error
    of = system_prompt_fingerprint if system_prompt else text_fingerprint
    return asdict(of(Tokenizer(model_dir), opening, block_size, salt))


@command(catalogue_app, "check")
def catalogue_check(
    file: Annotated[str, typer.Argument(help="A catalogue file (YAML), or the name of a shipped system.")],
    against: Annotated[Path, typer.Option(help="A metrics page saved from the system; may be gzipped.")],
    as_json: JsonFlag = False,
) -> None:
    """Show what a catalogue file maps of a page, what it leaves, and what looks wrong: units, labels, kinds. 1 if so.

    Example: `prefixwatch exporter catalogue check my.yaml --against page.txt`, where the page was saved by
    `curl -s http://gateway:9090/metrics > page.txt`
    """
    from prefixwatch.stack.cli.catalogue import run_check

    raise typer.Exit(run_check(file, against, plain_console(), as_json=as_json))


@command(catalogue_app, "schema")
def catalogue_schema() -> None:
    """Print the JSON schema of a catalogue file, for editors.

    Example: `prefixwatch exporter catalogue schema > catalogue.schema.json`
    """
    from prefixwatch.exporters.catalogue.model import System

    print(json.dumps(System.model_json_schema(by_alias=True), indent=2))
