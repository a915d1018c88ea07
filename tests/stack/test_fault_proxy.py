"""The fault proxies change nothing until they are told to, and then only what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from prefixwatch.stack.drill.fault_proxy import EventFaults, HttpFaults, event_relay, http_proxy

METRICS = "vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 2\n"
STREAM = [b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"]


@asynccontextmanager
async def an_engine() -> AsyncIterator[str]:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in STREAM:
            await response.write(part)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", stream), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def faults_and_url() -> AsyncIterator[tuple[HttpFaults, str]]:
    faults = HttpFaults()
    async with an_engine() as engine, http_proxy(engine, faults) as url:
        yield faults, url


async def _chat(url: str, seconds: float = 5.0) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/chat/completions", json={}) as response,
    ):
        return response.status, await response.read()


async def _metrics(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        return response.status, await response.text()


async def test_by_itself_it_passes_everything_on(faults_and_url: tuple[HttpFaults, str]) -> None:
    _, url = faults_and_url
    assert await _chat(url) == (200, b"".join(STREAM))
    assert await _metrics(url) == (200, METRICS)


async def test_it_refuses_completions_alone(faults_and_url: tuple[HttpFaults, str]) -> None:
    faults, url = faults_and_url
    faults.refuse_with_status = 429
    assert (await _chat(url))[0] == 429
    assert await _metrics(url) == (200, METRICS)


async def test_it_keeps_a_finished_stream_open(faults_and_url: tuple[HttpFaults, str]) -> None:
    faults, url = faults_and_url
    faults.hold_finished_streams = True
    with pytest.raises(TimeoutError):
        await _chat(url, seconds=0.3)


async def test_it_renames_a_metric_and_nothing_else(faults_and_url: tuple[HttpFaults, str]) -> None:
    faults, url = faults_and_url
    faults.rename_metrics = {"vllm:kv_cache_usage_perc": "vllm:kv_usage"}
    assert await _metrics(url) == (200, "vllm:kv_usage 0.5\nvllm:num_requests_running 2\n")


async def test_it_breaks_the_metrics_page_alone(faults_and_url: tuple[HttpFaults, str]) -> None:
    faults, url = faults_and_url
    faults.metrics_status = 500
    assert (await _metrics(url))[0] == 500
    assert (await _chat(url))[0] == 200


async def test_the_relay_loses_every_nth_batch(tmp_path: Path) -> None:
    published, relayed = f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/r"
    context = zmq.asyncio.Context()
    publisher, subscriber = context.socket(zmq.XPUB), context.socket(zmq.SUB)
    publisher.bind(published)
    faults = EventFaults(drop_every=3)
    try:
        async with event_relay(published, relayed, faults):
            await publisher.recv()  # the relay has subscribed
            subscriber.connect(relayed)
            subscriber.subscribe(b"")
            got: list[bytes] = []
            while not got:  # until the subscription has arrived behind the relay
                await publisher.send_multipart([b"warm"])
                if await subscriber.poll(50):
                    got = await subscriber.recv_multipart()
            faults.drop_every = 0
            while await subscriber.poll(100):
                await subscriber.recv_multipart()
            faults.drop_every = 2
            for number in range(4):
                await publisher.send_multipart([str(number).encode()])
            first, second = await subscriber.recv_multipart(), await subscriber.recv_multipart()
            assert int(second[0]) - int(first[0]) == 2
            assert not await subscriber.poll(100)
    finally:
        context.destroy(linger=0)
