"""One part of the stack alone, in this process: what containers run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import engines.simulated
import exporters.app
import exporters.config
import exporters.logs
import router.app
from exporters.config import ExporterConfig, config_from_flags
from exporters.http.web_config import WebSecurity
from stack.cli_shared import print_error
from stack.config import load_config
from stack.errors import UsageError


def run_router(file: Path, console: Console) -> None:
    """The router in front of `fleet.targets`, until SIGINT or SIGTERM. Raises DocumentError or RouterError."""
    config = load_config(file)
    if not config.fleet.targets:
        raise UsageError(f"{file}: fleet.targets: lists no engine: add at least one with name and url")
    tokenizer = config.tokenizer
    settings = config.router_config(config.fleet.targets, tokenizer.model_dir, tokenizer.block_size)
    _run(router.app.serve(settings, ready=lambda address: console.print(f"router ready on {address}")))


def run_exporter(
    targets: Sequence[str],
    kv_events: Sequence[str],
    settings: Mapping[str, Any],
    *,
    once: bool,
    config: Path | None,
    console: Console,
) -> None:
    """The exporter, until SIGINT or SIGTERM, or for one scrape. `settings` by flags win over the file's.

    Raises DocumentError, ExporterError or UsageError; SystemExit(2) if a target failed with `once`.
    """
    if config is not None and (targets or kv_events):
        raise UsageError("give either --config or --target, not both: with --config, targets stand in the file")
    if config is None and not targets:
        raise UsageError("no target: give --target [NAME=]URL, or --config FILE")
    given = {name: value for name, value in settings.items() if value is not None}

    def load() -> ExporterConfig:
        if config is None:
            return config_from_flags(targets, kv_events, **given)
        loaded = load_config(config)
        return loaded.model_copy(
            update={"exporter": exporters.config.with_flags(loaded.exporter, given)}
        ).exporter_config(loaded.fleet.targets)

    start = load()
    exporters.logs.log_to(sys.stderr, start.log_format, start.log_level)
    if not once:
        security = WebSecurity(start.web_config_file) if start.web_config_file else None
        _run(exporters.app.serve(start, lambda url: console.print(f"exporter ready on {url}"), load, security))
        return
    text, failed = asyncio.run(exporters.app.once(start))
    sys.stdout.write(text)
    for line in failed:
        print_error(line)
    if failed:
        raise SystemExit(2)


def run_engine(file: Path) -> None:
    """One simulated engine, until SIGINT or SIGTERM; ends the process with the engine's exit code."""
    raise SystemExit(engines.simulated.main(["--config", str(file)]))


def _run(service: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=router.app.new_event_loop) as runner:
        runner.run(_until_signalled(service))


async def _until_signalled(service: Coroutine[Any, Any, None]) -> None:
    serving = asyncio.create_task(service)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
