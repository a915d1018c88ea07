"""The exporter as a service, over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from prefixwatch.exporters.app import once, running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.exporter import Exporter

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServePages = Callable[[dict[str, bytes | Handler]], Awaitable[str]]
Capture = Callable[[str], bytes]

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
async def exporter(serve_pages: ServePages, capture: Capture) -> AsyncIterator[Exporter]:
    """Scrapes one real vLLM page and one target that is not there."""
    url = await serve_pages({"/metrics": capture("vllm_0.32.0")})
    targets = (TargetConfig(name="engine-0", url=url), TargetConfig(name="gone", url="http://127.0.0.1:1"))
    config = ExporterConfig(targets=targets, listen="127.0.0.1:0", interval_seconds=60)
    async with running(config) as one:
        await one.scrape_all()
        await one.scrape_all()
        yield one


async def get(exporter: Exporter, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(exporter.url + path, headers={"Accept": accept}) as response,
    ):
        return response.status, response.headers["Content-Type"], await response.text()


async def test_metrics_are_text_by_default(exporter: Exporter) -> None:
    status, content_type, text = await get(exporter, "/metrics")
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    assert 'prefixwatch_prefix_query_tokens_total{model="tiny",target="engine-0"} 118473.0' in text
    assert "# EOF" not in text


async def test_metrics_are_openmetrics_for_who_accepts_it(exporter: Exporter) -> None:
    _, content_type, text = await get(exporter, "/metrics", OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    parsed = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # the library's, without types
    families = {family.name: family for family in parsed}
    assert families["prefixwatch_prefix_hit_tokens"].type == "counter"


async def test_the_newest_requests_are_served_as_rows_of_a_trace(exporter: Exporter) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{exporter.url}/api/v1/trace") as response:
            assert {"rows", "first", "last", "added", "life", "without_length"} == set(await response.json())
        async with session.get(f"{exporter.url}/api/v1/trace?after=x") as response:
            assert response.status == 400


async def test_the_fleet_document_says_what_is_known_and_why_the_rest_is_not(exporter: Exporter) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{exporter.url}/api/v1/fleet") as response:
        document: dict[str, Any] = await response.json()
    engine, gone = document["targets"]
    assert (engine["system"], engine["version"], engine["up"]) == ("vllm", "0.32+", True)
    assert engine["signals"]["prefix_query_tokens"]["series"] == [
        {"labels": {"engine": "0", "model": "tiny"}, "value": 118473.0}
    ]
    assert engine["derived"]["kv_capacity_blocks"] == 300.0
    assert "--kv-events" in engine["absent"]["evicted_blocks"]
    assert "hit_ratio" in engine["absent"]
    assert (gone["up"], gone["reason"], gone["system"], gone["derived"]) == (False, "refused", None, {})
    assert document["fleet"]["absent"]["ttft_by_cache"] == "no router among the targets"


async def test_health_readiness_and_the_index(exporter: Exporter) -> None:
    assert (await get(exporter, "/-/healthy"))[0] == 200
    assert (await get(exporter, "/-/ready"))[0] == 200
    _, content_type, page = await get(exporter, "/")
    assert content_type.startswith("text/html")
    assert 'href="/metrics"' in page


async def test_not_ready_before_every_target_was_scraped(serve_pages: ServePages) -> None:
    async def stalls(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    url = await serve_pages({"/metrics": stalls})
    config = ExporterConfig(targets=(TargetConfig(name="slow", url=url),), listen="127.0.0.1:0", timeout_seconds=5)
    async with running(config) as one:
        assert (await get(one, "/-/ready"))[0] == 503


async def test_a_port_in_use_is_an_error_that_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config = ExporterConfig(targets=(TargetConfig(name="a", url="http://127.0.0.1:1"),), listen=listen)
        with pytest.raises(ExporterError, match=f"can't listen on {listen}.*--listen"):
            async with running(config):
                pass


async def test_once_shows_no_ratio_and_names_the_targets_that_failed(serve_pages: ServePages, capture: Capture) -> None:
    """volcano-sh/kthena#1042 (SL22): one scrape makes no window."""
    url = await serve_pages({"/metrics": capture("vllm_0.32.0")})
    targets = (TargetConfig(name="a", url=url), TargetConfig(name="gone", url="http://127.0.0.1:1"))
    text, failed = await once(ExporterConfig(targets=targets))
    assert 'prefixwatch_scrapes_total{model="' in text
    assert "prefixwatch_window_seconds" not in text
    assert "prefixwatch_prefix_hit_ratio" not in text
    assert [line.split(":")[0] for line in failed] == ["target gone (http"]
