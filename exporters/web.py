"""The HTTP face of an exporter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Middleware

from prefixwatch.exporters import runbook_pages
from prefixwatch.exporters.caches.prefixes_api import prefixes_handler
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.fleet.api import fleet_document
from prefixwatch.exporters.http.compression import compressed
from prefixwatch.exporters.http.web_config import TooManyLogins, WebSecurity
from prefixwatch.exporters.live.page import LivePage
from prefixwatch.exporters.metrics_page.cost import PageCost
from prefixwatch.exporters.metrics_page.families import NAMESPACE
from prefixwatch.exporters.metrics_page.fleet_families import FleetPage, identities
from prefixwatch.exporters.metrics_page.text import LabelTexts, PageText
from prefixwatch.exporters.scaling.source import scaling_handler

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reload = Callable[[], Awaitable[str]]

_DERIVED_AT_A_TIME = 50
OF_THE_WHOLE_FLEET = frozenset(
    NAMESPACE + name
    for name in (
        "fleet_prefix_hit_ratio", "hotspot_overloaded_ratio", "hotspot_max_over_mean", "hotspot_busiest_over_least",
        "hotspot_top_share_ratio", "locality_ratio", "ttft_miss_minus_hit_seconds",
    )
)  # fmt: skip
"""Families that a shard doesn't export: of a part of the fleet they would pass for the whole."""
_HEADERS = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store"}


def web_app(exporter: Exporter, reload: Reload, security: WebSecurity | None = None) -> web.Application:
    """All pages. `reload` answers with what was wrong, empty when it was taken."""

    cost, label_texts = PageCost(), LabelTexts()

    async def metrics(request: web.Request) -> web.Response:
        await _derive(exporter, cost)
        sources = [*exporter.sources, cost]
        parts = FleetPage(exporter.targets, sources, gone=exporter.fleet.retired.holders()).parts()
        hidden = OF_THE_WHOLE_FLEET if exporter.config.shard else frozenset[str]()
        text = PageText(request.headers.get("Accept", ""), identities(exporter.targets), label_texts)
        more = True
        while more:
            with cost.working():
                families = next(parts, None)
                more = families is not None
                text.add(family for family in families or () if family.name not in hidden)
            await asyncio.sleep(0)  # a thousand targets' page takes a while to write: scrapes go on meanwhile
        with cost.working():
            body = b"".join(text.pieces())
        cost.written(len(body))
        return web.Response(body=body, headers={"Content-Type": text.content_type})

    async def fleet(_: web.Request) -> web.Response:
        await _derive(exporter)
        return web.json_response(fleet_document(exporter.targets, time.monotonic(), exporter.sources))

    async def figures(_: web.Request) -> web.Response:
        await _derive(exporter)
        return web.json_response(exporter.status())

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def ready(_: web.Request) -> web.Response:
        if exporter.ready:
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready: some targets have not been scraped yet\n")

    async def reloaded(request: web.Request) -> web.Response:
        if _from_another_site(request):
            raise web.HTTPForbidden(text="a page of another site can't reload the configuration\n")
        problem = await reload()
        if problem:
            return web.Response(status=500, text=f"refused, the old configuration stays in use: {problem}\n")
        return web.Response(text="reloaded\n")

    live = LivePage(exporter, partial(_derive, exporter))
    app = web.Application(middlewares=[compressed, _guard(security)])
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get("/api/v1/fleet", fleet),
            web.get("/api/v1/status", figures),
            web.get("/api/v1/trace", exporter.ledger.live_trace.serve),
            web.get("/api/v1/prefixes", prefixes_handler(exporter.prefixes)),
            web.get("/api/v1/scaling", scaling_handler(exporter.scaling, time.monotonic, partial(_derive, exporter))),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", ready),
            web.post("/-/reload", reloaded),
            web.put("/-/reload", reloaded),
            *live.routes(),
            *runbook_pages.routes(),
        ]
    )
    app.cleanup_ctx.append(live.sampling)
    if exporter.spans is not None:
        app.add_routes(exporter.spans.routes())
    return app


async def _derive(exporter: Exporter, cost: PageCost | None = None) -> None:
    """Work out every target's numbers, letting scrapes through in between."""
    targets = list(exporter.targets)
    for first in range(0, len(targets), _DERIVED_AT_A_TIME):
        with cost.working() if cost else nullcontext():
            for target in targets[first : first + _DERIVED_AT_A_TIME]:
                _ = target.numbers
        await asyncio.sleep(0)


def _login(request: web.Request) -> str | None:
    return request.headers.get("Authorization")


def _from_another_site(request: web.Request) -> bool:
    """Whether a browser sends this for a page of another site. Tools like curl send neither header."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return True
    return request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")


def _guard(security: WebSecurity | None) -> Middleware:
    """Basic authentication before, and security headers after every page."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        configured = security.headers if security else {}
        headers = _HEADERS | configured
        try:
            allowed = not security or not security.needs_login or await security.allows(_login(request))
        except TooManyLogins:
            return web.Response(status=503, text="too many logins\n", headers=headers | {"Retry-After": "5"})
        if not allowed:
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
