"""The exporter as a service: scrapes every target on its own schedule and serves what is known.

A page that is asked for shows the last scrapes; asking never scrapes, so a slow target slows nobody.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from prefixwatch.documents.addresses import host_port
from prefixwatch.documents.errors import InputError
from prefixwatch.exporters.config import ExporterConfig, split_listen
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.http.web_config import WebSecurity
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.web import web_app

_log = logging.getLogger("prefixwatch.exporter")

_GARBAGE_THRESHOLD = 20_000
_CERTIFICATES_EVERY_SECONDS = 30.0


class Reloader:
    """Applies a new configuration if it is valid, and keeps the old one if it isn't."""

    def __init__(
        self, exporter: Exporter, load: Callable[[], ExporterConfig] | None, security: WebSecurity | None
    ) -> None:
        self._exporter = exporter
        self._load = load
        self._security = security
        self._turn = asyncio.Lock()

    async def reload(self) -> str:
        """Read the files again. Returns what was wrong, empty when the new configuration is in use; never raises."""
        async with self._turn:
            problem = await self._try()
        self._exporter.service.reload_problem = problem
        if problem:
            _log.error("reload refused, the old configuration stays in use", extra={"problem": problem})
        else:
            _log.info("configuration reloaded", extra={"targets": len(self._exporter.targets)})
        return problem

    async def keep_certificates_fresh(self) -> None:
        """Reload when the web configuration or one of its certificates changes: renewals happen without a signal."""
        while self._security:
            await asyncio.sleep(_CERTIFICATES_EVERY_SECONDS)
            if await asyncio.to_thread(self._security.changed):
                await self.reload()

    async def _try(self) -> str:
        try:
            config = await asyncio.to_thread(self._load) if self._load else self._exporter.config
            prepared = await asyncio.to_thread(self._security.prepare) if self._security else None
            await self._exporter.reconfigure(config)
            if self._security and prepared:
                self._security.use(prepared)
        except (InputError, OSError) as error:
            return str(error)
        except Exception as error:  # a bug met by one file must not end the process's ability to reload
            _log.exception("reload ended by a fault of the exporter")
            return f"{type(error).__name__}: {error}; the exporter's log has more"
        return ""


@asynccontextmanager
async def running(
    config: ExporterConfig,
    load: Callable[[], ExporterConfig] | None = None,
    security: WebSecurity | None = None,
) -> AsyncIterator[Exporter]:
    """An exporter that scrapes and serves until the block ends; its address is `exporter.url`.

    `load` gives the configuration again for a reload. Raises ExporterError when the address can't be listened on.
    """
    async with _running(config, load, security) as (exporter, _):
        yield exporter


@asynccontextmanager
async def _running(
    config: ExporterConfig, load: Callable[[], ExporterConfig] | None, security: WebSecurity | None
) -> AsyncIterator[tuple[Exporter, Reloader]]:
    exporter = Exporter(config)
    reloader = Reloader(exporter, load, security)
    runner = web.AppRunner(web_app(exporter, reloader.reload, security), access_log=None)
    renewals = asyncio.create_task(reloader.keep_certificates_fresh(), name="certificates")
    try:
        await exporter.open()
        await runner.setup()
        exporter.url = await _listen(runner, config.listen, security)
        exporter.keep_scraping()
        yield exporter, reloader
    finally:
        renewals.cancel()
        await asyncio.gather(renewals, return_exceptions=True)
        await exporter.close()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, listen: str, security: WebSecurity | None) -> str:
    """The address as a URL, with the port that was given by the system if none was asked for."""
    tls = security.tls if security else None
    host, port = split_listen(listen)
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise ExporterError(f"can't listen on {listen}: {why}; choose another --listen HOST:PORT") from error
    return f"{'https' if tls else 'http'}://{host_port(*runner.addresses[0][:2])}"


async def serve(
    config: ExporterConfig,
    ready: Callable[[str], None] | None = None,
    load: Callable[[], ExporterConfig] | None = None,
    security: WebSecurity | None = None,
) -> None:
    """Scrape and serve until cancelled; `ready` gets the address once it is listened on. SIGHUP reloads.

    Raises ExporterError when it can't be.
    """
    reloads: set[asyncio.Task[str]] = set()
    async with _running(config, load, security) as (exporter, reloader):

        def reload() -> None:
            task = asyncio.create_task(reloader.reload(), name="reload")
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        with _garbage_collected_seldom():
            if ready:
                ready(exporter.url)
            await asyncio.Event().wait()


@contextmanager
def _garbage_collected_seldom() -> Iterator[None]:
    """Scrapes make many objects that go by themselves; looking for cycles among them as often as is usual took a sixth
    of the time at a thousand targets."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def once(config: ExporterConfig) -> tuple[str, list[str]]:
    """Scrape every target once: the metrics text, and a line for each target that failed."""
    exporter = Exporter(config)
    try:
        await exporter.open()
        await exporter.scrape_all()
        text = render(exporter.targets, "", exporter.sources, exporter.fleet.retired.holders())[0].decode()
    finally:
        await exporter.close()
    failed = [
        f"target {target.name} ({shown_url(target.config.url)}): {target.reason}: {target.detail}"
        for target in exporter.targets
        if not target.up
    ]
    return text, failed + exporter.service.document(0.0)["problems"]
