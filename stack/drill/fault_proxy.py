"""Faults made from outside a healthy engine: a reverse proxy in front of its HTTP, a relay behind its KV events.

They stand for what is seen between router and engine in the field: a sidecar that keeps finished streams open, an
engine that turns requests away, an upgrade that renames a metric, a lossy event bus.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

_HOP_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "content-encoding"})
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class HttpFaults:
    """What the proxy does to the traffic; all off is a plain proxy. May be changed while it runs."""

    refuse_with_status: int | None = None
    """Completions are answered so, and the engine never sees them."""
    hold_finished_streams: bool = False
    """A finished answer's stream is kept open: the router can't know that the engine is through."""
    metrics_status: int | None = None
    """The metrics page answers so, while inference works."""
    rename_metrics: Mapping[str, str] = field(default_factory=dict)
    """Old name → new name on the metrics page."""


@contextlib.asynccontextmanager
async def http_proxy(upstream: str, faults: HttpFaults) -> AsyncIterator[str]:
    """A proxy in front of `upstream`; the block gets its address."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
    ended = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/v1/") and request.method == "POST" and faults.refuse_with_status is not None:
            error = {"error": {"message": "the engine's queue is full", "type": "overloaded", "code": 429}}
            return web.json_response(error, status=faults.refuse_with_status)
        if request.path == "/metrics" and faults.metrics_status is not None:
            return web.Response(status=faults.metrics_status, text="can't read the metrics' folder\n")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        async with session.request(
            request.method, upstream + request.path_qs, data=await request.read(), headers=headers
        ) as answer:
            if request.path == "/metrics":
                return _renamed(await answer.text(), faults.rename_metrics)
            return await _relayed(request, answer, faults, ended)

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        ended.set()
        await runner.cleanup()
        await session.close()


def _renamed(text: str, names: Mapping[str, str]) -> web.Response:
    for old, new in names.items():
        text = text.replace(old, new)
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _relayed(
    request: web.Request, answer: aiohttp.ClientResponse, faults: HttpFaults, ended: asyncio.Event
) -> web.StreamResponse:
    headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):  # either side may leave
        async for chunk in answer.content.iter_any():
            if faults.hold_finished_streams and _DONE in chunk:
                await response.write(chunk[: chunk.index(_DONE)])
                await ended.wait()
                break
            await response.write(chunk)
        await response.write_eof()
    return response


@dataclass(slots=True)
class EventFaults:
    """What the relay does to KV-event batches; may be changed while it runs."""

    drop_every: int = 0
    """One batch in this many is lost; 0 loses none."""


@contextlib.asynccontextmanager
async def event_relay(publisher: str, endpoint: str, faults: EventFaults) -> AsyncIterator[None]:
    """Passes batches on from `publisher` to whoever subscribes at `endpoint`; there is no replay behind it."""
    context = zmq.asyncio.Context()
    inlet: Any = context.socket(zmq.SUB)
    outlet: Any = context.socket(zmq.PUB)
    inlet.setsockopt(zmq.SUBSCRIBE, b"")
    inlet.connect(publisher)
    outlet.bind(endpoint)
    relay = asyncio.create_task(_relay_events(inlet, outlet, faults))
    try:
        yield
    finally:
        relay.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await relay
        context.destroy(linger=0)


async def _relay_events(inlet: Any, outlet: Any, faults: EventFaults) -> None:
    number = 0
    while True:
        frames = await inlet.recv_multipart()
        number += 1
        if not faults.drop_every or number % faults.drop_every:
            await outlet.send_multipart(frames)
