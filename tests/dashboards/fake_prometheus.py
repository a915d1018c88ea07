"""A Prometheus that gives every query the same answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

NOW = 1_800_000_000.0
EMPTY = {"resultType": "vector", "result": []}


def _vector(value: str) -> dict[str, Any]:
    return {"resultType": "vector", "result": [{"metric": {}, "value": [NOW, value]}]}


def _matrix(value: str) -> dict[str, Any]:
    return {"resultType": "matrix", "result": [{"metric": {}, "values": [[NOW, value]]}]}


@asynccontextmanager
async def answering(value: str | None, refused: str = "") -> AsyncIterator[tuple[str, list[str]]]:
    """A Prometheus with this one answer for every query (None: empty), its address and what it was asked."""
    asked: list[str] = []

    async def instant(request: web.Request) -> web.Response:
        return _answer(str((await request.post())["query"]), _vector)

    async def over_time(request: web.Request) -> web.Response:
        return _answer(str((await request.post())["query"]), _matrix)

    def _answer(query: str, form: Any) -> web.Response:
        asked.append(query)
        if refused and refused in query:
            return web.json_response({"status": "error", "error": "many-to-many"}, status=422)
        return web.json_response({"status": "success", "data": form(value) if value is not None else EMPTY})

    async def labels(_: web.Request) -> web.Response:
        return web.json_response({"status": "success", "data": [value] if value else []})

    async def targets(_: web.Request) -> web.Response:
        active = [{"labels": {"job": "prefixwatch"}, "scrapeInterval": "1m"}]
        return web.json_response({"status": "success", "data": {"activeTargets": active}})

    app = web.Application()
    app.router.add_post("/api/v1/query", instant)
    app.router.add_post("/api/v1/query_range", over_time)
    app.router.add_get("/api/v1/label/{label}/values", labels)
    app.router.add_get("/api/v1/targets", targets)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()
