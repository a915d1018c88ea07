"""The exporter as a service: scrapes every target on its own schedule and serves what is known.

A page that is asked for shows the last scrapes; asking never scrapes, so a slow target slows nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from html import escape

from aiohttp import web

from exporters.catalogue import Catalogue, shipped_catalogue
from exporters.config import ExporterConfig, split_listen
from exporters.errors import ExporterError
from exporters.fleet_api import fleet_document
from exporters.kv_events import KvEventWatcher
from exporters.metrics_text import render
from exporters.scrape import Scrape, Scraper
from exporters.source import Source
from exporters.target import Target


class Exporter:
    """All targets and the tasks that keep them up to date."""

    def __init__(self, config: ExporterConfig, catalogue: Catalogue | None = None) -> None:
        self.config = config
        self.targets = [Target(target, config, catalogue or shipped_catalogue()) for target in config.targets]
        self.sources: list[Source] = []
        """What is known beside the scraped pages, in order of trust."""
        self.url = ""
        """Where it listens; empty before it does."""
        self._scraper: Scraper | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._watchers: list[KvEventWatcher] = []

    @property
    def ready(self) -> bool:
        """Every target was scraped at least once, well or not."""
        return all(target.health.scrapes for target in self.targets)

    async def open(self) -> None:
        self._scraper = Scraper(self.config.timeout_seconds, self.config.limits.body_bytes)

    async def close(self) -> None:
        """Stop scraping and let go of all connections."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for watcher in self._watchers:
            await watcher.stop()
        if self._scraper:
            await self._scraper.close()

    async def fetch(self, target: Target) -> Scrape:
        """Fetch one target's page now, and do nothing with it."""
        assert self._scraper is not None
        return await self._scraper.fetch(target.config.url)

    async def scrape(self, target: Target) -> None:
        """Scrape one target now."""
        target.ingest(await self.fetch(target), time.monotonic())
        if target.config.kv_events and target.kv_events is None and target.numbers:
            self._watch_kv_events(target, target.config.kv_events, target.numbers.block_size_tokens)

    async def scrape_all(self) -> None:
        """Scrape every target once, all at the same time."""
        await asyncio.gather(*(self.scrape(target) for target in self.targets))

    def keep_scraping(self) -> None:
        """Scrape every target at the configured interval from now on, spread over it; one at a time per target."""
        for position, target in enumerate(self.targets):
            delay = self.config.interval_seconds * position / len(self.targets)
            self._loops.append(asyncio.create_task(self._loop(target, delay), name=f"scrape {target.name}"))

    async def _loop(self, target: Target, first_in_seconds: float) -> None:
        due = time.monotonic() + first_in_seconds
        await self.scrape(target)
        while True:
            now = time.monotonic()
            while due <= now:  # ticks that passed while a slow scrape was running are left out
                due += self.config.interval_seconds
            await asyncio.sleep(due - now)
            await self.scrape(target)

    def _watch_kv_events(self, target: Target, endpoint: str, block_size_tokens: float | None) -> None:
        """Blocks are counted in the engine's own size, so its first scrape is waited for."""
        size = int(block_size_tokens) if block_size_tokens else None
        watcher = KvEventWatcher(target.name, endpoint, target.config.kv_replay, size)
        watcher.start()
        target.kv_events = watcher
        self._watchers.append(watcher)


def web_app(exporter: Exporter) -> web.Application:
    """The HTTP face of an exporter."""

    async def metrics(request: web.Request) -> web.Response:
        body, content_type = render(exporter.targets, request.headers.get("Accept", ""), exporter.sources)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def fleet(_: web.Request) -> web.Response:
        return web.json_response(fleet_document(exporter.targets, time.monotonic(), exporter.sources))

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def ready(_: web.Request) -> web.Response:
        if exporter.ready:
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready: some targets have not been scraped yet\n")

    async def index(_: web.Request) -> web.Response:
        return web.Response(text=_index_page(exporter), content_type="text/html")

    app = web.Application()
    app.add_routes(
        [
            web.get("/", index),
            web.get("/metrics", metrics),
            web.get("/api/v1/fleet", fleet),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", ready),
        ]
    )
    return app


def _index_page(exporter: Exporter) -> str:
    rows = "".join(
        f"<tr><td>{escape(target.name)}</td><td>{escape(target.system.title if target.system else 'unknown')}</td>"
        f"<td>{escape('up' if target.up else f'{target.reason}: {target.detail}')}</td></tr>"
        for target in exporter.targets
    )
    return (
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>prefixwatch exporter</title></head><body>"
        "<h1>prefixwatch exporter</h1><ul><li><a href='/metrics'>metrics</a></li>"
        "<li><a href='/api/v1/fleet'>fleet (JSON)</a></li><li><a href='/-/ready'>ready</a></li></ul>"
        f"<table><tr><th>target</th><th>system</th><th>state</th></tr>{rows}</table></body></html>"
    )


@asynccontextmanager
async def running(config: ExporterConfig) -> AsyncIterator[Exporter]:
    """An exporter that scrapes and serves until the block ends; its address is `exporter.url`.

    Raises ExporterError when the address can't be listened on.
    """
    exporter = Exporter(config)
    runner = web.AppRunner(web_app(exporter), access_log=None)
    try:
        await exporter.open()
        await runner.setup()
        host, port = split_listen(config.listen)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = error.strerror or str(error)
            raise ExporterError(f"can't listen on {config.listen}: {why}; choose another --listen HOST:PORT") from error
        bound_host, bound_port = runner.addresses[0][:2]
        exporter.url = (
            f"http://[{bound_host}]:{bound_port}" if ":" in bound_host else f"http://{bound_host}:{bound_port}"
        )
        exporter.keep_scraping()
        yield exporter
    finally:
        await exporter.close()
        await runner.cleanup()


async def serve(config: ExporterConfig, ready: Callable[[str], None] | None = None) -> None:
    """Scrape and serve until cancelled; `ready` is told the address once it is listened on.

    Raises ExporterError when it can't be.
    """
    async with running(config) as exporter:
        if ready:
            ready(exporter.url)
        await asyncio.Event().wait()


async def once(config: ExporterConfig) -> tuple[str, list[str]]:
    """Scrape every target once: the metrics text, and a line for each target that failed."""
    exporter = Exporter(config)
    try:
        await exporter.open()
        await exporter.scrape_all()
        text = render(exporter.targets)[0].decode()
    finally:
        await exporter.close()
    failed = [
        f"target {target.name} ({target.config.url}): {target.reason}: {target.detail}"
        for target in exporter.targets
        if not target.up
    ]
    return text, failed
