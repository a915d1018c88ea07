"""The page, its assets and its history over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.live.history import EVERY_SECONDS, History, by_name, take_sample
from prefixwatch.exporters.live.view import NamedRow, live_view
from prefixwatch.exporters.live.wording import UNKNOWN, count
from prefixwatch.slo.build import load_request_objectives, load_slos, shipped_names

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FOLDER = Path(__file__).parent
_SHOWN_FOR_SECONDS = 1.0
"""However many look, the page is written once in this time."""
_MAP = "/api/v1/prefixes?depth=8&limit=1000"
"""Boxes of two pixels and more are fewer than that on any screen."""
_FOR_EVER = "private, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Body:
    """An answer with its ETag."""

    content: bytes
    etag: str

    @classmethod
    def of(cls, content: bytes, news: bytes | None = None) -> Body:
        """`news` is what the ETag is made of, where the body also holds what has not changed."""
        etag = hashlib.blake2b(content if news is None else news, digest_size=12).hexdigest()
        return cls(content, f'"{etag}"')

    def answer(self, request: web.Request, content_type: str, **headers: str) -> web.Response:
        headers = {"ETag": self.etag, "Vary": "Accept-Encoding"} | {n.replace("_", "-"): v for n, v in headers.items()}
        if self.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.content, headers=headers, content_type=content_type, charset="utf-8")


class LivePage:
    """The live page of one exporter; `derive` works out all targets' numbers, letting others run in between."""

    def __init__(self, exporter: Exporter, derive: Callable[[], Awaitable[None]]) -> None:
        self._derive = derive
        self.history = History()
        self._exporter = exporter
        names = exporter.config.objectives
        given = shipped_names() if names is None else names
        self._objectives = load_request_objectives(given)
        judged = {objective.name for objective in self._objectives}
        self._elsewhere = [(slo.name, slo.rule) for slo in load_slos(given) if slo.name not in judged]
        self._template = Environment(
            loader=FileSystemLoader(_FOLDER),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        ).get_template("page.html.j2")
        self._shown: tuple[float, Body] | None = None
        self._turn = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page),
            web.get("/live/history", self._history),
            web.get("/live/assets/{build}/{name}", self._asset),
        ]

    async def sampling(self, _: web.Application) -> AsyncIterator[None]:
        """Takes a sample now and then for as long as the application runs: one of its `cleanup_ctx`."""
        task = asyncio.create_task(self._keep_sampling(), name="live page history")
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def sample(self) -> None:
        """Remember this moment."""
        now = time.monotonic()
        exporter = self._exporter
        families = by_name(exporter.ledger.metrics(now))
        self.history.add(take_sample(exporter.targets, derive_fleet(exporter.targets), families, time.time(), now))

    async def _keep_sampling(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(EVERY_SECONDS)

    async def _page(self, request: web.Request) -> web.Response:
        async with self._turn:
            if self._shown is None or time.monotonic() - self._shown[0] > _SHOWN_FOR_SECONDS:
                self._shown = (time.monotonic(), await self._written())
            body = self._shown[1]
        return body.answer(request, "text/html", Content_Security_Policy=POLICY, Referrer_Policy="no-referrer")

    async def _written(self) -> Body:
        await self._derive()
        exporter, now = self._exporter, time.monotonic()
        view = live_view(
            exporter.targets,
            derive_fleet(exporter.targets),
            by_name(exporter.ledger.metrics(now)),
            {source.name: source.document(now) for source in exporter.sources},
            objectives=self._objectives,
            elsewhere=self._elsewhere,
            block=exporter.status(),
            point=self.history.newest,
            named=self._named(),
            now_seconds=now,
        )
        return await asyncio.to_thread(self._write, view)

    def _write(self, view: Any) -> Body:
        def page(as_of: str) -> bytes:
            return self._template.render(
                view=view,
                as_of=as_of,
                assets=_asset_urls(),
                build=_build(),
                map_address=_MAP,
                every=int(EVERY_SECONDS),
            ).encode()

        clock = time.strftime("%H:%M:%S")
        whole = page(clock)
        return Body.of(whole, whole.replace(f"Shown as of {clock}".encode(), b"", 1))

    def _named(self) -> list[NamedRow]:
        source = self._exporter.prefixes
        view = source.view
        node_of = {name: node for node, name in view.configured.items()} if view else {}
        rows = []
        for name in source.names.names:
            node = node_of.get(name)
            if view is None or node is None:
                rows.append(NamedRow(name, "", UNKNOWN if view is None else "not cached", UNKNOWN))
            else:
                workers = sum(1 for _ in view.tree.workers_of(node))
                cached = count(int(view.tree.copied_tokens_below[node]))
                rows.append(NamedRow(name, source.names.id_of(view.tree, node), cached, count(workers)))
        return rows

    async def _history(self, request: web.Request) -> web.Response:
        return Body.of(msgspec.json.encode(self.history.columns())).answer(request, "application/json")

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in _asset_files():
            raise web.HTTPNotFound(text=f"no asset is called {name[:40]}\n")
        body = await asyncio.to_thread(_asset_body, name)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        same = request.match_info["build"] == _build()
        return body.answer(request, kind, Cache_Control=_FOR_EVER if same else "no-store")


@cache
def _asset_files() -> dict[str, Path]:
    return {path.name: path for path in sorted((_FOLDER / "assets").iterdir())}


@cache
def _asset_body(name: str) -> Body:
    return Body.of(_asset_files()[name].read_bytes())


def asset_url(name: str) -> str:
    """The address of one of the page's files."""
    return _asset_urls()[name]


@cache
def _asset_urls() -> dict[str, str]:
    """A build's files have addresses of their own, so a browser may keep them forever."""
    return {name: f"/live/assets/{_build()}/{name}" for name in _asset_files()}


@cache
def _build() -> str:
    """Another one after an upgrade: an open page reloads itself."""
    made_of = hashlib.blake2b(digest_size=6)
    for path in (_FOLDER / "page.html.j2", *_asset_files().values()):
        made_of.update(path.read_bytes())
    return made_of.hexdigest()
