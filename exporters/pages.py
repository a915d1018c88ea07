"""The HTTP face of an exporter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Middleware

from exporters.caches.prefixes_api import prefixes_handler
from exporters.exporter import Exporter
from exporters.fleet_api import fleet_document
from exporters.http.web_config import WebSecurity
from exporters.live.pages import LivePage
from exporters.metrics_text import FleetPage
from exporters.page_text import PageText

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reload = Callable[[], Awaitable[str]]

_DERIVED_AT_A_TIME = 50
_HEADERS = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store"}


def web_app(exporter: Exporter, reload: Reload, security: WebSecurity | None = None) -> web.Application:
    """All pages. `reload` answers with what was wrong, empty when it was taken."""

    async def metrics(request: web.Request) -> web.Response:
        await _derive(exporter)
        accept = request.headers.get("Accept", "")
        page = FleetPage(exporter.targets, exporter.sources, gone=exporter.departed.holders())
        text = PageText(accept)
        for families in page.parts():
            text.add(families)
            await asyncio.sleep(0)  # a thousand targets' page takes half a second to write: scrapes go on meanwhile
        return web.Response(body=_one_by_one(text.pieces()), headers={"Content-Type": text.content_type})

    async def fleet(_: web.Request) -> web.Response:
        await _derive(exporter)
        return web.json_response(fleet_document(exporter.targets, time.monotonic(), exporter.sources))

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def ready(_: web.Request) -> web.Response:
        if exporter.ready:
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready: some targets have not been scraped yet\n")

    async def reloaded(_: web.Request) -> web.Response:
        problem = await reload()
        if problem:
            return web.Response(status=500, text=f"refused, the old configuration stays in use: {problem}\n")
        return web.Response(text="reloaded\n")

    live = LivePage(exporter, partial(_derive, exporter))
    app = web.Application(middlewares=[_guard(security)])
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get("/api/v1/fleet", fleet),
            web.get("/api/v1/prefixes", prefixes_handler(exporter.prefixes)),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", ready),
            web.post("/-/reload", reloaded),
            web.put("/-/reload", reloaded),
            *live.routes(),
        ]
    )
    app.cleanup_ctx.append(live.sampling)
    if exporter.spans is not None:
        app.add_routes(exporter.spans.routes())
    return app


async def _derive(exporter: Exporter) -> None:
    """Work out every target's numbers, letting scrapes through in between."""
    for position, target in enumerate(list(exporter.targets)):
        if target.numbers and position % _DERIVED_AT_A_TIME == 0:
            await asyncio.sleep(0)


async def _one_by_one(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def _guard(security: WebSecurity | None) -> Middleware:
    """Basic authentication before, and security headers after every page."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        configured = security.headers if security else {}
        headers = _HEADERS | configured
        if security and security.needs_login and not await security.allows(request.headers.get("Authorization")):
            challenge = {"WWW-Authenticate": 'Basic realm="prefixwatch"'}
            return web.Response(status=401, text="Unauthorized\n", headers=headers | challenge)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(headers)
            raise
        if not response.prepared:
            for name, value in _HEADERS.items():  # a page may have its own, such as how long it may be kept
                response.headers.setdefault(name, value)
            response.headers.update(configured)
        return response

    return guard
