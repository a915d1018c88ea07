"""Pages leave compressed if the client accepts it: a fleet's metrics page is 15 times smaller."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Mapping

import zstandard
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SMALLEST_BYTES = 1_024
_IN_A_THREAD_FROM_BYTES = 65_536
"""A larger body would hold up the scrapes for milliseconds."""

_GZIP_LEVEL = 4
_ZSTD_LEVEL = 3

_CODECS: Mapping[str, Callable[[bytes], bytes]] = {
    "zstd": lambda body: zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(body),
    "gzip": lambda body: gzip.compress(body, _GZIP_LEVEL, mtime=0),
}
"""By content coding, the cheapest first."""


def accepted_coding(accept_encoding: str) -> str:
    """The coding to use by an Accept-Encoding header (RFC 9110, section 12.5.3): the one with the highest weight, of
    several the cheapest; `identity` if none is accepted."""
    weights: dict[str, float] = {}
    for item in accept_encoding.split(","):
        name, _, parameters = item.partition(";")
        weights[name.strip().lower()] = _weight(parameters)
    found = {name: weights.get(name, weights.get("*", 0.0)) for name in _CODECS}
    best = max(found, key=lambda name: found[name])
    return best if found[best] > 0 else "identity"


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


@web.middleware
async def compressed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Compress what a handler returns, if it is text and large enough to gain from it."""
    response = await handler(request)
    body = getattr(response, "body", None)
    if not isinstance(response, web.Response) or not isinstance(body, bytes) or len(body) < _SMALLEST_BYTES:
        return response
    response.headers["Vary"] = "Accept-Encoding"
    coding = accepted_coding(request.headers.get("Accept-Encoding", ""))
    if coding == "identity" or "Content-Encoding" in response.headers or response.content_type.startswith("image/"):
        return response
    codec = _CODECS[coding]
    response.body = await asyncio.to_thread(codec, body) if len(body) >= _IN_A_THREAD_FROM_BYTES else codec(body)
    response.headers["Content-Encoding"] = coding
    return response
