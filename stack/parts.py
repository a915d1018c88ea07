"""One part of the stack alone, in this process: what containers run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import engines.simulated
import exporters.app
import exporters.config
import router.app
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
    listen: str | None,
    interval_seconds: float | None,
    *,
    once: bool,
    config: Path | None,
    console: Console,
) -> None:
    """The exporter, until SIGINT or SIGTERM, or for one scrape. Raises ExporterError; SystemExit(2) if one failed."""
    if config is not None and targets:
        raise UsageError("give either --config or --target, not both")
    if config is None and not targets:
        raise UsageError("no target: give --target [NAME=]URL, or --config FILE")
    if config is not None:
        loaded = load_config(config)
        settings = loaded.exporter_config(loaded.fleet.targets)
    else:
        settings = exporters.config.config_from_flags(
            targets, kv_events, listen=listen, interval_seconds=interval_seconds
        )
    if not once:
        _run(exporters.app.serve(settings, ready=lambda address: console.print(f"exporter ready on {address}")))
        return
    text, failed = asyncio.run(exporters.app.once(settings))
    sys.stdout.write(text)
    for line in failed:
        Console(stderr=True).print(f"[red]error:[/red] {line}", highlight=False, soft_wrap=True)
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
