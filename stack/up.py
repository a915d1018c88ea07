"""The whole local stack until Ctrl-C: engines, router, exporter; Prometheus and Alertmanager where they are found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from engines import fleet
from engines.fleet import EngineHandle
from engines.process import ManagedProcess, free_ports
from engines.tiny_model import default_model_dir
from exporters.config import TargetConfig
from router.config import WorkerConfig
from stack.config import ENVIRONMENT_PREFIX, PrefixwatchConfig
from stack.fleet import as_workers, start_engines, start_router
from stack.monitoring import (
    SHIPPED_RULES,
    alertmanager_command,
    alertmanager_config,
    binary,
    prometheus_command,
    prometheus_config,
)

_READY_SECONDS = 30.0
_WATCH_SECONDS = 0.5


def run_up(config: PrefixwatchConfig, folder: Path, console: Console) -> None:
    """Run until SIGINT or SIGTERM. Raises one of INPUT_ERRORS when a part can't start, or the router ends."""
    asyncio.run(_up(with_free_ports(config), folder, console))


def with_free_ports(config: PrefixwatchConfig) -> PrefixwatchConfig:
    """The same with a free port of the system's where 0 asks for one: the parts must know each other's."""
    host, _, port = config.exporter.listen.rpartition(":")
    free = iter(free_ports(2))
    router, exporter = (given or next(free) for given in (config.router.port, int(port)))
    return config.model_copy(
        update={
            "router": config.router.model_copy(update={"port": router}),
            "exporter": config.exporter.model_copy(update={"listen": f"{host}:{exporter}"}),
        }
    )


async def _up(config: PrefixwatchConfig, folder: Path, console: Console) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    engines: list[EngineHandle] = []
    parts: list[ManagedProcess] = []
    try:
        workers = config.fleet.targets
        if not workers:
            with console.status(f"starting {config.fleet.workers} {config.fleet.engine} engines …"):
                engines = await _engines(config, folder)
            workers = as_workers(engines)
        block_size = engines[0].block_size if engines else config.tokenizer.block_size
        model_dir = config.tokenizer.model_dir or (default_model_dir() if engines else None)
        router_config = config.router_config(workers, model_dir, block_size)
        parts.append(await start_router(router_config, folder))
        router_url = f"http://{router_config.host}:{router_config.port}"
        parts.append(await start_exporter(config, workers, router_url, folder))
        urls = [("router", f"{router_url}/v1"), ("live page", f"http://{config.exporter.listen}/")]
        urls += await _start_monitoring(config, folder, parts)
        console.print(_table([*urls, *((worker.name, worker.url) for worker in workers)]))
        console.print("Ctrl-C stops everything.")
        await _watch(parts, [engine.process for engine in engines], stopped, console)
    finally:
        await asyncio.gather(*(asyncio.to_thread(part.stop) for part in reversed(parts)))
        await fleet.stop(engines)


async def _engines(config: PrefixwatchConfig, folder: Path) -> list[EngineHandle]:
    section = config.fleet
    options = {"capacity_blocks": section.capacity_blocks, "profile": section.profile}
    return await start_engines(section.engine, section.workers, folder, config.tokenizer.model_dir, options)


async def start_exporter(
    config: PrefixwatchConfig, workers: Sequence[WorkerConfig], router_url: str, folder: Path
) -> ManagedProcess:
    """The exporter with this configuration, for these engines and the router before them."""
    config.exporter_config(workers, router_url)
    targets = (TargetConfig(name="router", url=router_url), *config.exporter.targets)
    own = config.model_copy(
        update={
            "fleet": config.fleet.model_copy(update={"targets": list(workers)}),
            "exporter": config.exporter.model_copy(update={"targets": targets}),
        }
    )
    config_file = folder / "exporter.json"
    config_file.touch(mode=0o600)  # it may hold secrets
    config_file.write_text(json.dumps(own.model_dump(exclude_unset=True), default=_plain, indent=1), encoding="utf-8")
    command = [sys.executable, "-m", "stack.cli", "exporter", "--config", str(config_file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    process = ManagedProcess("exporter", command, folder / "exporter.log", environment)
    await _ready_or_stopped(process, f"http://{config.exporter.listen}/-/healthy")
    return process


def _plain(value: object) -> str:
    """What JSON has no form for: secrets and paths."""
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


async def _start_monitoring(
    config: PrefixwatchConfig, folder: Path, parts: list[ManagedProcess]
) -> list[tuple[str, str]]:
    """Prometheus with the shipped rules, and an Alertmanager that tells nobody: alerts are on its page. Both where
    their binaries are found; answers with their addresses."""
    prometheus, manager = binary("prometheus"), binary("alertmanager")
    if prometheus is None:
        return []
    at, manager_at = (f"127.0.0.1:{port}" for port in free_ports(2))
    interval = f"{config.exporter.interval_seconds:g}s"
    alerting = manager_at if manager else None
    settings = prometheus_config(config.exporter.listen, interval, rules=SHIPPED_RULES, alertmanager=alerting)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    urls = [("Prometheus", f"http://{at}/")]
    parts.append(ManagedProcess("prometheus", prometheus_command(prometheus, folder, at), folder / "prometheus.log"))
    await parts[-1].wait_ready(f"http://{at}/-/ready", _READY_SECONDS)
    if manager:
        silent = alertmanager_config(lambda name: {"name": name})
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(silent, sort_keys=False), encoding="utf-8")
        command = alertmanager_command(manager, folder, manager_at)
        parts.append(ManagedProcess("alertmanager", command, folder / "alertmanager.log"))
        await parts[-1].wait_ready(f"http://{manager_at}/-/ready", _READY_SECONDS)
        urls.append(("Alertmanager", f"http://{manager_at}/"))
    return urls


async def _ready_or_stopped(process: ManagedProcess, url: str) -> None:
    try:
        await process.wait_ready(url, _READY_SECONDS)
    except BaseException:
        process.stop()
        raise


async def _watch(
    parts: Sequence[ManagedProcess], engines: Sequence[ManagedProcess], stopped: asyncio.Event, console: Console
) -> None:
    """Until stopped: a dead engine is told once and the rest goes on, a dead part ends the stack."""
    dead: set[str] = set()
    while not stopped.is_set():
        for part in parts:
            part.check()
        for engine in engines:
            if not engine.alive and engine.name not in dead:
                dead.add(engine.name)
                console.print(str(engine.failure(engine.describe())), style="yellow", highlight=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _WATCH_SECONDS)


def _table(urls: Sequence[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None)
    for name, url in urls:
        table.add_row(name, url)
    return table
