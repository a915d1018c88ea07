"""The whole local stack until Ctrl-C: engines, router, exporter; Prometheus and Alertmanager where they are found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import yaml
from rich.console import Console
from rich.table import Table

from prefixwatch.documents.addresses import host_port
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import ManagedProcess, ProcessFailed, free_ports, stop_all
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.exporters.config import split_listen
from prefixwatch.router.config import WorkerConfig
from prefixwatch.stack.cli.command import command, new_app, output_option, plain_console, target_option
from prefixwatch.stack.config import ENVIRONMENT_PREFIX, PrefixwatchConfig, load_config
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.demo import (
    GPU_USD_PER_HOUR,
    demo_traffic,
    next_lines,
    traffic_lines,
    with_places_and_price,
    with_probes,
)
from prefixwatch.stack.local.fleet import as_workers, start_engines, start_router, write_with_secrets
from prefixwatch.stack.local.monitoring import (
    SHIPPED_RULES,
    alertmanager_command,
    alertmanager_config,
    binary,
    prometheus_command,
    prometheus_config,
)
from prefixwatch.stack.local.out_folder import NOT_WRITTEN, make_out_folder

app = new_app()
_READY_SECONDS = 30.0
_WATCH_SECONDS = 0.5


def run_up(
    config: PrefixwatchConfig, folder: Path, console: Console, *, demo: bool = False, traffic_per_second: float = 0.0
) -> None:
    """Run until SIGINT or SIGTERM. Raises InputError if a part can't start, or the router or the exporter ends.

    `demo`: with all that `stack.local.demo` adds; its traffic at this rate.
    """
    make_out_folder(folder, "--folder")
    try:
        asyncio.run(_up(with_free_ports(config), folder, console, demo=demo, traffic_per_second=traffic_per_second))
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        raise UsageError(
            f"--folder {folder}: can't be written to ({error.strerror}): make room, or choose another folder"
        ) from error


def with_free_ports(config: PrefixwatchConfig) -> PrefixwatchConfig:
    """The same with a free port of the system's where 0 asks for one: the parts must know each other's."""
    host, port = split_listen(config.exporter.listen)
    free = iter(free_ports(2))
    router, exporter = (given or next(free) for given in (config.router.port, port))
    return config.model_copy(
        update={
            "router": config.router.model_copy(update={"port": router}),
            "exporter": config.exporter.model_copy(update={"listen": host_port(host, exporter)}),
        }
    )


async def _up(
    config: PrefixwatchConfig, folder: Path, console: Console, *, demo: bool, traffic_per_second: float
) -> None:
    if demo:
        config = with_places_and_price(config)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    engines: list[EngineHandle] = []
    parts: list[ManagedProcess] = []
    monitoring: list[ManagedProcess] = []
    try:
        workers = config.fleet.targets
        if not workers:
            with console.status(f"starting {config.fleet.size} {config.fleet.engine} engines …"):
                engines = await _engines(config, folder)
            workers = as_workers(engines, config.fleet.kinds)
        block_size = engines[0].block_size if engines else config.tokenizer.block_size
        if demo:
            config = with_probes(config, workers)
        model_dir = config.tokenizer.model_dir or (default_model_dir() if engines else None)
        router_config = config.router_config(workers, model_dir, block_size)
        parts.append(await start_router(router_config, folder))
        router_url = f"http://{router_config.host}:{router_config.port}"
        parts.append(await start_exporter(config, workers, router_url, folder))
        urls = [("router", f"{router_url}/v1"), ("live page", f"http://{config.exporter.listen}/")]
        try:
            urls += await _start_monitoring(config, folder, monitoring)
        except ProcessFailed as error:
            console.print(f"Going on without it: {error}", style="yellow", highlight=False, soft_wrap=True)
        console.print(_table([*urls, *((worker.name, worker.url) for worker in workers)]))
        sending = (
            f"{traffic_per_second:g} chats a second are sent"
            if traffic_per_second
            else "It sends no traffic of its own"
        )
        traffic = traffic_lines(router_url, model_dir, engines[0].model if engines else None)
        _print_lines(f"{sending}. To send some, in another terminal:", traffic, console)
        if demo:
            prometheus = dict(urls).get("Prometheus")
            lines = next_lines(f"http://{config.exporter.listen}", prometheus.rstrip("/") if prometheus else None)
            price = f"{GPU_USD_PER_HOUR:.2f} USD (pricing.gpu_usd_per_hour)"
            _print_lines(f"To see what is measured; a GPU hour is assumed to cost {price}:", lines, console)
        console.print("Ctrl-C stops everything.")
        async with demo_traffic(router_url, traffic_per_second):
            await _watch(parts, [*monitoring, *(engine.process for engine in engines)], stopped, console)
    finally:
        everything = [*parts, *monitoring, *(engine.process for engine in engines)]
        await asyncio.to_thread(stop_all, everything)


def _print_lines(heading: str, lines: Sequence[str], console: Console) -> None:
    for line in (heading, *(f"  {line}" for line in lines)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


async def _engines(config: PrefixwatchConfig, folder: Path) -> list[EngineHandle]:
    section = config.fleet
    options = {"capacity_blocks": section.capacity_blocks, "profile": section.profile}
    model_dir = config.tokenizer.model_dir
    return await start_engines(section.engine, section.size, folder, model_dir, options, section.kinds)


async def start_exporter(
    config: PrefixwatchConfig, workers: Sequence[WorkerConfig], router_url: str, folder: Path
) -> ManagedProcess:
    """The exporter with this configuration, for these engines and the router before them."""
    config.exporter_config(workers, router_url)
    targets = (config.router_target(router_url), *config.exporter.targets)
    own = config.model_copy(
        update={
            "fleet": config.fleet.model_copy(update={"targets": list(workers)}),
            "exporter": config.exporter.model_copy(update={"targets": targets}),
        }
    )
    config_file = folder / "exporter.json"
    write_with_secrets(config_file, own.model_dump(exclude_unset=True))
    command = [sys.executable, "-P", "-m", "prefixwatch", "exporter", "--config", str(config_file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    process = ManagedProcess("exporter", command, folder / "exporter.log", environment)
    await _ready_or_stopped(process, f"http://{config.exporter.listen}/-/healthy")
    return process


async def _start_monitoring(
    config: PrefixwatchConfig, folder: Path, parts: list[ManagedProcess]
) -> list[tuple[str, str]]:
    """Prometheus with the shipped rules, and an Alertmanager that notifies nobody: alerts are on its page. Both only
    if their binaries are found; returns their addresses."""
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
    parts: Sequence[ManagedProcess], others: Sequence[ManagedProcess], stopped: asyncio.Event, console: Console
) -> None:
    """Until stopped: the end of a part ends the stack; that of one of the `others` is reported once."""
    dead: set[str] = set()
    while not stopped.is_set():
        for part in parts:
            part.check()
        for other in others:
            if not other.alive and other.name not in dead:
                dead.add(other.name)
                console.print(str(other.failure(other.describe())), style="yellow", highlight=False, soft_wrap=True)
                console.print(f"The stack runs on without {other.name}.", highlight=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _WATCH_SECONDS)


def _table(urls: Sequence[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None)
    for name, url in urls:
        table.add_row(name, url)
    return table


@command(app, "up")
def up(
    config: Annotated[Path | None, target_option(help="prefixwatch.yaml; default: 4 simulated engines.")] = None,
    host: Annotated[str | None, target_option(help="Address that router and exporter listen on.")] = None,
    port: Annotated[
        int | None, target_option(min=0, max=65_535, help="Port of the router; 0 picks a free one; default: 8000.")
    ] = None,
    traffic: Annotated[
        float, target_option(min=0.0, max=100.0, help="Chats a second to send to the demo's engines, without --config.")
    ] = 0.0,
    folder: Annotated[Path, output_option(help="Folder for logs and Prometheus' data.")] = Path("results/up"),
) -> None:
    """Run the whole stack until Ctrl-C: engines, router, exporter; Prometheus and Alertmanager if installed.

    Without --config the engines are in two zones and probed, a GPU hour has an assumed price, and what to try next is
    printed. Example: `prefixwatch up --traffic 2`
    """
    if traffic and config is not None:
        raise UsageError(
            "--traffic: goes to the demo's engines only: leave out --config, or send with prefixwatch bench"
        )
    own = load_config(config).listening_on(host, port)
    run_up(own, folder, plain_console(), demo=config is None, traffic_per_second=traffic)
