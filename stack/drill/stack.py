"""A small whole stack for a drill: simulated engines, router, exporter, Prometheus, Alertmanager, a webhook.

Every part is a process of its own as in production, except the fault proxies and the webhook. Ports are the system's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import yaml
from aiohttp import web

from prefixwatch.engines.process import ManagedProcess, free_ports
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.router.config import PolicyConfig
from prefixwatch.stack.drill.fault_proxy import EventFaults, HttpFaults, event_relay, http_proxy
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.monitoring import (
    alertmanager_command,
    alertmanager_config,
    binary,
    prometheus_command,
    prometheus_config,
    routes,
)

_READY_SECONDS = 60.0
_PATIENT = {"patience_ratio": 0.25}
"""Sessions stay at home through the short queues of a small machine."""
Way = Literal["router", "exporter", "events"]


@dataclass(frozen=True, slots=True)
class DrillSettings:
    """What differs from drill to drill, before anything runs."""

    engines: int = 3
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every engine, names of SimulatedEngineConfig."""
    first_engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the first engine alone."""
    engine_template_prefix: str = ""
    """What the engines' chat template puts in front of a conversation and the router's doesn't."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(name="affinity", options=_PATIENT))
    cache_view: str = "events"
    salted_tenants: Sequence[str] = ("acme", "globex", "initech")
    secrets: Mapping[str, Any] | None = None
    """The content of a secrets file from which the router derives all salts; then no tenant may be salted."""
    router_hears_events: bool = True
    """False: the router is given event endpoints that nobody publishes on."""
    proxied: frozenset[Way] = frozenset()
    """Where a fault proxy stands: between router and engines, between exporter and engines, behind the events."""


@dataclass(slots=True)
class EngineParts:
    """One engine, and how router and exporter reach it: directly, or by proxies that change nothing without a fault."""

    name: str
    process: ManagedProcess
    seen_by_router: str = ""
    seen_by_exporter: str = ""
    events: str = ""
    replay: str | None = None
    router_faults: HttpFaults = field(default_factory=HttpFaults)
    exporter_faults: HttpFaults = field(default_factory=HttpFaults)
    event_faults: EventFaults = field(default_factory=EventFaults)


@dataclass(slots=True)
class Notice:
    """An alert as the webhook got it."""

    alert: str
    labels: Mapping[str, str]
    at_seconds: float


@dataclass(slots=True)
class DrillStack:
    """Everything that runs, and where."""

    engines: list[EngineParts]
    router_url: str
    exporter_url: str
    prometheus_url: str
    notices: list[Notice]
    secrets_file: Path
    """The router's, where it has one."""


@contextlib.asynccontextmanager
async def drill_stack(
    settings: DrillSettings, rules: Path, alertmanager: Path, folder: Path
) -> AsyncIterator[DrillStack]:
    """The stack with the rule files of a folder and an Alertmanager configuration, all of whose receivers become the
    webhook. Raises UsageError when a binary is missing, ProcessFailed when a part doesn't start.
    """
    binaries = {name: _binary(name) for name in ("prometheus", "alertmanager")}
    folder.mkdir(parents=True, exist_ok=True)
    notices: list[Notice] = []
    async with contextlib.AsyncExitStack() as cleanup:
        parts = _Parts(folder, cleanup)
        webhook = await cleanup.enter_async_context(_webhook(notices))
        engines = await _start_engines(settings, parts)
        router, exporter, prometheus, manager = (f"127.0.0.1:{port}" for port in free_ports(4))
        secrets_file = parts.write("secrets.yaml", settings.secrets)
        parts.write("router.yaml", _router_config(settings, engines, router, secrets_file))
        parts.write("exporter.yaml", _exporter_config(engines, f"http://{router}", exporter))
        parts.write("alertmanager.yml", _to_webhook(alertmanager, webhook))
        parts.write("prometheus.yml", prometheus_config(exporter, "1s", rules=rules, alertmanager=manager))
        await asyncio.gather(
            parts.run("router", _own("router", folder), f"http://{router}/health"),
            parts.run("exporter", _own("exporter", folder), f"http://{exporter}/-/healthy"),
        )
        await parts.run(
            "prometheus",
            prometheus_command(binaries["prometheus"], folder, prometheus),
            f"http://{prometheus}/-/ready",
        )
        await _scraped(f"http://{prometheus}")
        await parts.run(
            "alertmanager",
            alertmanager_command(binaries["alertmanager"], folder, manager),
            f"http://{manager}/-/ready",
        )
        yield DrillStack(
            engines, f"http://{router}", f"http://{exporter}", f"http://{prometheus}", notices, secrets_file
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Starts processes and stops them with the stack; their files are in one folder."""

    folder: Path
    cleanup: contextlib.AsyncExitStack

    def write(self, name: str, content: Any) -> Path:
        file = self.folder / name
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return file

    async def run(self, name: str, command: Sequence[str], ready_url: str) -> ManagedProcess:
        process = ManagedProcess(name, command, self.folder / f"{name}.log")
        self.cleanup.callback(process.kill)
        await process.wait_ready(ready_url, _READY_SECONDS)
        return process


async def _start_engines(settings: DrillSettings, parts: _Parts) -> list[EngineParts]:
    ports = free_ports(settings.engines)
    return await asyncio.gather(*(_start_engine(settings, number, port, parts) for number, port in enumerate(ports)))


async def _start_engine(settings: DrillSettings, number: int, port: int, parts: _Parts) -> EngineParts:
    name, folder, cleanup = f"engine-{number}", parts.folder, parts.cleanup
    socket = f"ipc://{folder / str(number)}"  # short: macOS allows 104 bytes
    own = settings.first_engine if number == 0 else {}
    config = SimulatedEngineConfig(
        model_dir=_engine_model(settings.engine_template_prefix, folder / f"{name}-model"),
        port=port,
        kv_events_endpoint=f"{socket}.kv",
        replay_endpoint=f"{socket}.re",
        **{**settings.engine, **own},
    )
    file = parts.write(f"{name}.yaml", config.model_dump(mode="json"))
    url = f"http://127.0.0.1:{port}"
    process = await parts.run(
        name,
        [sys.executable, "-P", "-m", "prefixwatch.engines.simulated.server", "--config", str(file)],
        f"{url}/health",
    )
    published = str(config.kv_events_endpoint)
    engine = EngineParts(name, process, url, url, published, config.replay_endpoint)
    if "events" in settings.proxied:
        engine.events, engine.replay = f"{socket}.out", None
        await cleanup.enter_async_context(event_relay(published, engine.events, engine.event_faults))
    if "router" in settings.proxied:
        engine.seen_by_router = await cleanup.enter_async_context(http_proxy(url, engine.router_faults))
    if "exporter" in settings.proxied:
        engine.seen_by_exporter = await cleanup.enter_async_context(http_proxy(url, engine.exporter_faults))
    return engine


async def _scraped(prometheus: str) -> None:
    """Prometheus begins to scrape some seconds after its start: long on a fast clock, so alerts come after that."""
    deadline = time.monotonic() + _READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            async with session.get(f"{prometheus}/api/v1/query", params={"query": "up == 1"}) as response:
                if (await response.json())["data"]["result"]:
                    return
            await asyncio.sleep(0.2)
    raise UsageError(f"{prometheus} didn't scrape the exporter within {_READY_SECONDS:g} s")


def _engine_model(template_prefix: str, folder: Path) -> Path:
    """The built-in model, or a copy of it with another chat template."""
    if not template_prefix:
        return default_model_dir()
    shutil.copytree(default_model_dir(), folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["chat_template"] = template_prefix + config["chat_template"]
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def _binary(name: str) -> str:
    found = binary(name)
    if found is None:
        raise UsageError(f"no {name} on PATH: scripts/install-test-tools installs it on Debian")
    return found


def _own(part: str, folder: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "prefixwatch", part, "--config", str(folder / f"{part}.yaml")]


def _router_config(
    settings: DrillSettings, engines: Sequence[EngineParts], address: str, secrets_file: Path
) -> dict[str, Any]:
    host, port = address.split(":")
    identity = {"secrets_file": str(secrets_file), "trusted_proxies": ["127.0.0.1"]}
    nobody = "" if settings.router_hears_events else ".nobody"
    workers = [
        {
            "name": e.name,
            "url": e.seen_by_router,
            "kv_events": e.events + nobody,
            "kv_replay": e.replay and e.replay + nobody,
        }
        for e in engines
    ]
    return {
        "fleet": {"targets": workers},
        "tenants": [{"name": name, "salt": f"salt of {name}"} for name in settings.salted_tenants],
        "tokenizer": {"model_dir": str(default_model_dir())},
        "router": {
            "host": host,
            "port": int(port),
            "policy": settings.policy.model_dump(),
            "cache_view": {"source": settings.cache_view},
            "identity": identity if settings.secrets is not None else {},
        },
    }


def _exporter_config(engines: Sequence[EngineParts], router_url: str, address: str) -> dict[str, Any]:
    workers = [
        {"name": e.name, "url": e.seen_by_exporter, "kv_events": e.events, "kv_replay": e.replay} for e in engines
    ]
    return {
        "fleet": {"targets": workers},
        "exporter": {
            "listen": address,
            "interval_seconds": 1.0,
            "timeout_seconds": 0.9,
            "window_seconds": 10.0,
            "targets": [{"name": "router", "url": router_url}],
        },
    }


def _to_webhook(alertmanager: Path, webhook: str) -> dict[str, Any]:
    """The shipped configuration with its routes and inhibitions, but every receiver the webhook, and no waiting."""

    def receiver(name: str) -> dict[str, Any]:
        return {"name": name, "webhook_configs": [{"url": webhook, "send_resolved": False}]}

    config: dict[str, Any] = alertmanager_config(receiver, alertmanager)
    for route in routes(config["route"]):
        route |= {"group_wait": "1s", "group_interval": "1s"}
    return config


@contextlib.asynccontextmanager
async def _webhook(notices: list[Notice]) -> AsyncIterator[str]:
    async def take(request: web.Request) -> web.Response:
        for alert in (await request.json())["alerts"]:
            labels = alert["labels"]
            if labels["severity"] != "none":
                notices.append(Notice(labels["alertname"], labels, time.monotonic()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/", take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()
