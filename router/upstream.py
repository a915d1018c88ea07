"""Talking to one engine: the connection pool, and what goes wrong before an answer begins."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from router.config import TimeoutsConfig
from router.health import Fault, connect_fault

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
_NOT_SENT_ON = _HOP_BY_HOP | {
    *("host", "content-length", "content-encoding", "accept-encoding", "expect", "x-prefixwatch-explain"),
}
_NOT_SENT_BACK = _HOP_BY_HOP | {"content-length"}

_KEEP_ALIVE_SECONDS = 4.0  # uvicorn drops idle connections after 5 s; be first, so none is reused as it dies
_LARGE_BODY_BYTES = 2**20


class UpstreamFault(Exception):
    """The engine failed before any of its answer was passed on, so the request may go elsewhere."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(slots=True)
class Opening:
    """The beginning of an answer: the whole body, or the first bytes of an event stream."""

    response: aiohttp.ClientResponse
    first: bytes
    streamed: bool


def upstream_session(timeouts: TimeoutsConfig) -> aiohttp.ClientSession:
    """Connections without a limit: an engine's own queue is where requests wait, and where waiting is seen."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


@asynccontextmanager
async def opened(
    session: aiohttp.ClientSession, url: URL, headers: Mapping[str, str], body: bytes, first_byte_seconds: float
) -> AsyncIterator[Opening]:
    """Send a request and wait for the beginning of its answer; leaving early closes the connection.

    Raises UpstreamFault, or TimeoutError when connected but silent for `first_byte_seconds`.
    """
    response: aiohttp.ClientResponse | None = None
    try:
        try:
            async with asyncio.timeout(first_byte_seconds):
                data = io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body
                response = await session.post(url, data=data, headers=headers, allow_redirects=False)
                streamed = response.headers.get("Content-Type", "").startswith("text/event-stream")
                first = await (response.content.readany() if streamed else response.read())
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamFault(Fault.SLOW, "connecting timed out") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamFault(connect_fault(error), f"can't connect: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UpstreamFault(Fault.RESET, f"the connection broke: {error}") from error
        if streamed and not first:
            raise UpstreamFault(Fault.RESET, "the stream ended before it began")
        yield Opening(response, first, streamed)
    finally:
        if response is not None:
            if not response.content.is_eof():
                response.close()
            response.release()


def forward_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A client's headers as the engine gets them; uncompressed answers only, so that they can be watched."""
    kept = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_SENT_ON)
    kept["Accept-Encoding"] = "identity"
    return kept


def backward_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """An engine's headers as the client gets them."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_SENT_BACK)
