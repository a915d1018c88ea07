"""Which panels have data where only engines' pages are scraped, by a Prometheus alone or by the exporter."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from aiohttp import web

from prefixwatch.alerts.build import build, engine_series, rendered
from prefixwatch.alerts.engines.records import OBJECTIVES
from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.dashboards.queries.check import Outcome, check
from prefixwatch.dashboards.queries.inventory import ANNOTATION, VARIABLE, Shown
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.stack.local.monitoring import prometheus_command

Reader = Literal["prometheus", "exporter"]
Panel = tuple[str, str]
"""Dashboard and title."""
SPEED = 60
_PATIENCE_SECONDS = 90.0
_SETTLED_ROUNDS = 3
_COUNTED = re.compile(r"^(?P<series>\S+?(?:_total|_bucket|_sum|_count)(?:\{.*\})?) (?P<value>[0-9.e+]+)$", re.MULTILINE)
_IN_FLIGHT = re.compile(r"^(?P<series>vllm:num_requests_(?:running|waiting)\{.*\}) \S+$", re.MULTILINE)


def grown(text: str, scrapes: int) -> str:
    """A captured page with two requests running and waiting, whose counters grow from scrape to scrape."""
    factor = 1 + scrapes
    text = _COUNTED.sub(lambda match: f"{match['series']} {float(match['value']) * factor!r}", text)
    return _IN_FLIGHT.sub(lambda match: f"{match['series']} 2.0", text)


@contextlib.asynccontextmanager
async def engine_pages(texts: Mapping[str, str]) -> AsyncIterator[dict[str, str]]:
    """Addresses (host:port) by name, one server each."""
    runners, found = [], {}
    for name, text in texts.items():
        scrapes = 0

        async def page(_: web.Request, text: str = text) -> web.Response:
            nonlocal scrapes
            scrapes += 1
            return web.Response(text=grown(text, scrapes))

        app = web.Application()
        app.router.add_get("/metrics", page)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found[name] = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        for runner in runners:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def _prometheus(scraped: Sequence[str], source: str, folder: Path) -> AsyncIterator[Prometheus]:
    folder.mkdir(parents=True)
    (folder / "rules").mkdir()
    for name, text in rendered(build(OBJECTIVES, RuleSettings(source=source, speedup=SPEED))).items():
        (folder / "rules" / name).write_text(text, encoding="utf-8")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [f"{folder}/rules/*.yaml"],
        "scrape_configs": [{"job_name": "prefixwatch", "static_configs": [{"targets": list(scraped)}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    process = ManagedProcess("prometheus", prometheus_command("prometheus", folder, address), folder / "log")
    try:
        await process.wait_ready(f"http://{address}/-/ready", _PATIENCE_SECONDS)
        async with new_session() as session:
            yield Prometheus(f"http://{address}", session)
    finally:
        process.kill()


async def outcomes(reader: Reader, engines: Mapping[str, str], folder: Path) -> list[Outcome]:
    """Of every query, once no further panel gets data."""
    measured = engine_series() if reader == "prometheus" else None
    async with contextlib.AsyncExitStack() as stack:
        scraped = list(engines.values())
        if reader == "exporter":
            targets = tuple(TargetConfig(name=name, url=f"http://{at}/metrics") for name, at in engines.items())
            config = ExporterConfig(listen="127.0.0.1:0", interval_seconds=1.0, timeout_seconds=0.9, targets=targets)
            scraped = [(await stack.enter_async_context(running(config))).url.removeprefix("http://")]
        source = "engines" if reader == "prometheus" else "exporter"
        prometheus = await stack.enter_async_context(_prometheus(scraped, source, folder / reader))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        most, unchanged = -1, 0
        while True:
            await asyncio.sleep(5.0)
            found = await check(prometheus, Shown(60.0, 1.0), measured=measured)
            drawn = len(with_data(found))
            unchanged = unchanged + 1 if drawn == most else 0
            most = max(most, drawn)
            if unchanged >= _SETTLED_ROUNDS or time.monotonic() > deadline:
                return found


def with_data(found: Collection[Outcome]) -> set[Panel]:
    """Panels of which some query has a value."""
    return {(one.asked.dashboard, one.asked.panel) for one in _of_panels(found) if one.status == "data"}


def panels(found: Collection[Outcome]) -> set[Panel]:
    return {(one.asked.dashboard, one.asked.panel) for one in _of_panels(found)}


def _of_panels(found: Collection[Outcome]) -> list[Outcome]:
    return [one for one in found if one.asked.panel not in {ANNOTATION, VARIABLE} and not one.asked.explains]
