"""Pages of the exporter are compressed for whoever accepts it, and are the same pages."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping

import aiohttp
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import config_from_flags
from prefixwatch.exporters.http.compression import accepted_coding
from tests.exporters.conftest import ServePages

DECODE: Mapping[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": gzip.decompress,
    "zstd": lambda body: zstandard.ZstdDecompressor().decompress(body),
}


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", "identity"),
        ("identity", "identity"),
        ("gzip", "gzip"),
        ("GZip;q=0.5", "gzip"),
        ("gzip, zstd", "zstd"),
        ("zstd;q=0.2, gzip;q=0.8", "gzip"),
        ("gzip;q=0", "identity"),
        ("gzip;q=0, *", "zstd"),
        ("*;q=0", "identity"),
        ("deflate, br", "identity"),
        ("gzip;q=many", "identity"),
    ],
)
def test_the_coding_is_the_one_that_the_client_weighs_most(header: str, coding: str) -> None:
    assert accepted_coding(header) == coding


@given(st.text(st.sampled_from("gzipstd*;,q=01. x")) | st.text())
def test_any_header_gives_a_coding(header: str) -> None:
    assert accepted_coding(header) in ("identity", "gzip", "zstd")


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/fleet", "/"])
async def test_a_page_is_the_same_in_every_coding(path: str, serve_pages: ServePages) -> None:
    engine = await serve_pages({"/metrics": b'vllm:num_requests_running{model_name="m"} 1\n'})
    config = config_from_flags([f"e={engine}"], interval_seconds=60.0, listen="127.0.0.1:0")
    async with running(config) as exporter, aiohttp.ClientSession(auto_decompress=False) as session:
        await exporter.scrape_all()
        beginnings = set()
        for coding in DECODE:
            async with session.get(exporter.url + path, headers={"Accept-Encoding": coding}) as response:
                body = await response.read()
                assert response.headers.get("Content-Encoding", "identity") == coding
                assert response.headers["Vary"] == "Accept-Encoding"
                assert int(response.headers["Content-Length"]) == len(body)
                beginnings.add(DECODE[coding](body)[:100])
    assert len(beginnings) == 1


async def test_the_exporter_says_what_it_is_and_what_its_page_costs(serve_pages: ServePages) -> None:
    engine = await serve_pages({"/metrics": b'vllm:num_requests_running{model_name="m"} 1\n'})
    config = config_from_flags([f"e={engine}"], interval_seconds=60.0, listen="127.0.0.1:0")
    async with running(config) as exporter, aiohttp.ClientSession() as session:
        sizes = []
        for _ in range(2):
            async with session.get(f"{exporter.url}/metrics") as response:
                text = await response.text()
                sizes.append(len(text.encode()))
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples["prefixwatch_pages_total"] == "1.0"
    assert float(samples["prefixwatch_page_bytes"]) == sizes[0]
    assert float(samples["prefixwatch_page_cpu_seconds_total"]) > 0
    assert any(name.startswith("prefixwatch_build_info{") for name in samples)
