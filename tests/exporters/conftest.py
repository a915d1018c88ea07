"""Texts, stores and live metrics pages for the exporter's tests."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.exposition import ExpositionReader
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target
from tests.exporters.probing import Endpoint, MakeProbes, Probes, Serve

Feed = Callable[..., SignalStore]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServePages = Callable[[dict[str, bytes | Handler]], Awaitable[str]]
MakeTarget = Callable[..., Target]


@pytest.fixture
def capture() -> Callable[[str], bytes]:
    """A real process's metrics page."""

    def read(name: str) -> bytes:
        plain = Path(__file__).parent / "captures" / f"metrics_{name}.txt"
        return plain.read_bytes() if plain.exists() else gzip.decompress(Path(f"{plain}.gz").read_bytes())

    return read


@pytest.fixture
def feed() -> Feed:
    """A signal store that has read these texts, five seconds apart."""

    def fed(*texts: str | bytes, system: str = "vllm", label_limit: int = 100) -> SignalStore:
        entry = shipped_catalogue().get(system)
        reader, store = ExpositionReader(entry.wanted_names()), SignalStore(entry, 60.0, label_limit)
        for step, text in enumerate(texts):
            body = text if isinstance(text, bytes) else text.encode()
            store.apply(reader.read(body), 5.0 * step)
        return store

    return fed


@pytest.fixture
def make_target() -> MakeTarget:
    """A target that was scraped with these outcomes, five seconds apart: a text, or a failure's reason."""

    def made(name: str, *outcomes: str, system: str | None = None, kv_events: tuple[str, ...] = ()) -> Target:
        config = TargetConfig(name=name, url="http://localhost/metrics", system=system, kv_events=kv_events)
        target = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
        for step, outcome in enumerate(outcomes):
            failed = "\n" not in outcome
            scrape = Scrape(0.01, reason=outcome) if failed else Scrape(0.01, outcome.encode())
            target.ingest(scrape, 5.0 * step)
        return target

    return made


@pytest.fixture
async def serve_pages() -> AsyncIterator[ServePages]:
    """Serves these pages on a free port and answers with the server's address."""
    runners: list[web.AppRunner] = []

    async def serve(pages: dict[str, bytes | Handler]) -> str:
        app = web.Application()
        for path, page in pages.items():
            app.router.add_get(path, _page(page) if isinstance(page, bytes) else page)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield serve
    for runner in runners:
        await runner.cleanup()


def _page(body: bytes) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="text/plain")

    return handler


@pytest.fixture
async def probes(request: pytest.FixtureRequest) -> AsyncIterator[MakeProbes]:
    """Every test's prompts are its own: an engine that several tests share must not know them."""
    made: list[Probes] = []

    def make(url: str, **config: Any) -> Probes:
        made.append(Probes(url, seed=request.node.nodeid, **config))
        return made[-1]

    yield make
    for each in made:
        await each.prober.stop()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts an endpoint that answers completions as it likes."""
    runners: list[web.AppRunner] = []

    async def start(answer: Endpoint) -> str:
        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "m"}]})

        app = web.Application()
        app.add_routes([web.post("/v1/completions", answer), web.get("/v1/models", models)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()
