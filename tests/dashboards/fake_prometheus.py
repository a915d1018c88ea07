"""A Prometheus that gives every query the same answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any

from aiohttp import web

NOW = 1_800_000_000.0
EMPTY = {"resultType": "vector", "result": []}


def _vector(value: str) -> dict[str, Any]:
    return {"resultType": "vector", "result": [{"metric": {}, "value": [NOW, value]}]}


def _matrix(value: str) -> dict[str, Any]:
    return {"resultType": "matrix", "result": [{"metric": {}, "values": [[NOW, value]]}]}


@asynccontextmanager
async def answering(
    value: str | None,
    refused: str = "",
    *,
    until: float = inf,
    renamed: str = "",
    since: Mapping[str, float] | None = None,
) -> AsyncIterator[tuple[str, list[str]]]:
    """A Prometheus with this one answer for every query (None: empty), its address and what it was asked.

    After `until` it has no samples but counters that stand still; of the series `renamed` it never had any. Over time,
    what begins with a text of `since` has been 1 since then, Unix seconds.
    """
    asked: list[str] = []

    async def instant(request: web.Request) -> web.Response:
        form = await request.post()
        return _answer(str(form["query"]), _vector, float(str(form.get("time", NOW))))

    async def over_time(request: web.Request) -> web.Response:
        form = await request.post()
        query, end = str(form["query"]), float(str(form["end"]))
        for text, first in (since or {}).items():
            if query.startswith(text):
                points = [[at, "1"] for at in (first, end) if at <= end]
                data = {"resultType": "matrix", "result": [{"metric": {}, "values": points}] if points else []}
                return web.json_response({"status": "success", "data": data})
        if query.startswith("sum(rate(prefixwatch_requests_total[") and until < end:
            points = [[until, "1"], [end, "0"]]
            data = {"resultType": "matrix", "result": [{"metric": {}, "values": points}]}
            return web.json_response({"status": "success", "data": data})
        return _answer(query, _matrix, float(str(form["start"])))

    def _answer(query: str, form: Any, begin: float) -> web.Response:
        asked.append(query)
        if refused and refused in query:
            return web.json_response({"status": "error", "error": "many-to-many"}, status=422)
        empty = value is None or begin > until or (renamed and renamed in query)
        return web.json_response({"status": "success", "data": EMPTY if empty else form(value)})

    async def labels(request: web.Request) -> web.Response:
        known = value if float(request.query["start"]) <= until else None
        return web.json_response({"status": "success", "data": [known] if known else []})

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
