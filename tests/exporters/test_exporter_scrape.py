"""Fetching over real sockets: every fault has its name, costs a bounded time, and touches no other target."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from prefixwatch.exporters.app import once
from prefixwatch.exporters.config import ExporterConfig, Limits, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.scraping.scrape import Scraper

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServePages = Callable[[dict[str, bytes | Handler]], Awaitable[str]]
Capture = Callable[[str], bytes]

LIMIT_BYTES = 100_000
TIMEOUT_SECONDS = 0.3
"""For targets that hang."""
PATIENT_SECONDS = 20.0
"""For all others, whom a busy machine may make slow."""


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    one = Scraper(PATIENT_SECONDS, LIMIT_BYTES)
    yield one
    await one.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def stalls(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def fails(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="load 1\n")


async def trickles(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"#")
        await asyncio.sleep(0.02)


async def is_huge(request: web.Request) -> web.StreamResponse:
    """Never says how much is coming."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(10 * LIMIT_BYTES // 10_000):
        await response.write(b"load 1\n" * 1429)
    return response


async def resets(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"load 1\n")
    assert request.transport is not None
    request.transport.abort()
    return response


async def is_a_bomb(_: web.Request) -> web.StreamResponse:
    return web.Response(body=gzip.compress(b"load 1\n" * 1_000_000), headers={"Content-Encoding": "gzip"})


async def says_gzip(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"load 1\n", headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (fails, "http_500"),
        (is_huge, "too_large"),
        (b"load 1\n" * LIMIT_BYTES, "too_large"),
        (resets, "reset"),
        (is_a_bomb, "too_large"),
        (says_gzip, "bad_encoding"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "not_metrics"),
        (b"[]", "not_metrics"),
    ],
)
async def test_a_fault_has_its_name(
    scraper: Scraper, serve_pages: ServePages, page: bytes | Handler, reason: str
) -> None:
    scrape = await scraper.fetch(await serve_pages({"/metrics": page}) + "/metrics")
    assert (scrape.reason, scrape.body) == (reason, None)


@pytest.mark.parametrize("page", [stalls, trickles])
async def test_a_page_without_end_ends_at_the_timeout(scraper: Scraper, serve_pages: ServePages, page: Handler) -> None:
    scraper.configure(TIMEOUT_SECONDS, LIMIT_BYTES, 10 * LIMIT_BYTES, 15.0)
    scrape = await scraper.fetch(await serve_pages({"/metrics": page}) + "/metrics")
    assert (scrape.reason, scrape.body) == ("timeout", None)
    assert TIMEOUT_SECONDS <= scrape.seconds < PATIENT_SECONDS


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "JSON, not metrics: the text may be at another path, TensorRT-LLM's at /prometheus/metrics"),
        (b'{"error": 1}', "JSON, not metrics"),
        (b"<!DOCTYPE html><html></html>", "HTML or XML, not metrics: a login page, or another path"),
        (b"hello", "no line has the form of a sample; it begins b'hello'"),
    ],
)
async def test_what_is_no_metrics_page_is_called_what_it_is(
    scraper: Scraper, serve_pages: ServePages, body: bytes, said: str
) -> None:
    """vllm-project/aibrix#2004 (EM23): a JSON list on /metrics is no data, and the remedy is said."""
    scrape = await scraper.fetch(await serve_pages({"/metrics": body}) + "/metrics")
    assert (scrape.reason, scrape.body) == ("not_metrics", None)
    assert scrape.detail.startswith(said)


async def test_nobody_listening_is_refused(scraper: Scraper) -> None:
    assert (await scraper.fetch(f"http://127.0.0.1:{free_port()}/metrics")).reason == "refused"


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress])
async def test_a_compressed_page_is_read(
    scraper: Scraper, serve_pages: ServePages, encode: Callable[[bytes], bytes]
) -> None:
    async def compressed(_: web.Request) -> web.StreamResponse:
        name = "gzip" if encode is gzip.compress else "deflate"
        return web.Response(body=encode(b"load 1\n"), headers={"Content-Encoding": name})

    assert (await scraper.fetch(await serve_pages({"/": compressed}))).body == b"load 1\n"


async def test_faulty_targets_leave_the_others_right(serve_pages: ServePages, capture: Capture) -> None:
    """sgl-project/sglang#28163 (EM18): a wedged target costs its own timeout and nothing else."""
    pages: dict[str, bytes | Handler] = {
        "/a": capture("vllm_0.32.0"),
        "/b": capture("vllm_0.32.0_default_flags"),
        "/stalls": stalls,
        "/fails": fails,
        "/html": b"<html></html>",
        "/other": b"something_else 1\n",
    }
    url = await serve_pages(pages)
    targets = tuple(TargetConfig(name=path[1:], url=url + path) for path in pages)
    refused = TargetConfig(name="refused", url=f"http://127.0.0.1:{free_port()}")
    text, failed = await once(
        ExporterConfig(targets=(*targets, refused), timeout_seconds=2.0, limits=Limits(body_bytes=LIMIT_BYTES))
    )
    assert 'prefixwatch_prefix_hit_tokens_total{model="tiny",target="a",tier="gpu"} 59616.0' in text
    assert 'prefixwatch_prefix_hit_tokens_total{model="tiny",target="b",tier="gpu"} 2944.0' in text
    assert 'prefixwatch_target_up{model="tiny",system="vllm",target="a",version="0.32+"} 1.0' in text
    for name, reason in [
        ("stalls", "timeout"),
        ("fails", "http_500"),
        ("html", "not_metrics"),
        ("other", "unknown_system"),
        ("refused", "refused"),
    ]:
        assert f'prefixwatch_scrape_failures_total{{reason="{reason}",target="{name}"}} 1.0' in text
    assert len(failed) == 5


async def test_a_stalled_target_has_one_scrape_in_flight_and_the_others_keep_their_pace(
    serve_pages: ServePages,
) -> None:
    """sgl-project/sglang#28163 (EM18)."""
    at_once, most, fast = 0, 0, 0
    enough = asyncio.Event()

    async def stalls_until_the_client_leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await reader.read()
        at_once -= 1
        writer.close()

    async def counted(_: web.Request) -> web.StreamResponse:
        nonlocal fast
        fast += 1
        if fast == 10:
            enough.set()
        return web.Response(text="vllm:num_requests_running 1\n")

    slow = await asyncio.start_server(stalls_until_the_client_leaves, "127.0.0.1", 0)
    slow_url = f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    fast_url = await serve_pages({"/metrics": counted})
    exporter = Exporter(
        ExporterConfig(
            targets=(TargetConfig(name="slow", url=slow_url), TargetConfig(name="fast", url=fast_url)),
            interval_seconds=0.02,
            timeout_seconds=0.1,
        )
    )
    await exporter.open()
    exporter.keep_scraping()
    try:
        await asyncio.wait_for(enough.wait(), 20)
    finally:
        await exporter.close()
        slow.close()
    assert most == 1
    assert exporter.targets[0].health.scrapes < exporter.targets[1].health.scrapes
