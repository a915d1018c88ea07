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

from prefixwatch.openai_api.answer import MAX_BODY_BYTES, Answer
from prefixwatch.router.bounded import TooLong, read_at_most
from prefixwatch.router.config import TimeoutsConfig
from prefixwatch.router.serving.health import Fault, connect_fault

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
    answer: Answer
    """Has read `first`, and has ended unless the answer is streamed."""


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
    session: aiohttp.ClientSession,
    url: URL,
    headers: Mapping[str, str],
    body: bytes,
    *,
    timeout_seconds: float,
    opaque: bool = False,
    other_usage: bool = False,
) -> AsyncIterator[Opening]:
    """Send a request and wait for the beginning of its answer; leaving early closes the connection.

    Raises UpstreamFault, or TimeoutError when connected but silent for `timeout_seconds`.
    """
    response: aiohttp.ClientResponse | None = None
    try:
        try:
            async with asyncio.timeout(timeout_seconds):
                data = io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body
                response = await session.post(url, data=data, headers=headers, allow_redirects=False)
                content_type, encoding = (response.headers.get(n, "") for n in ("Content-Type", "Content-Encoding"))
                packed = encoding.strip().lower() not in ("", "identity")  # in spite of what was asked for: unread
                answer = Answer(
                    response.status, content_type, opaque=opaque or packed, other_usage=other_usage and not packed
                )
                content = response.content
                first = await content.readany()
                answer.feed(first)
                if not answer.streamed:
                    rest = await read_at_most(content, MAX_BODY_BYTES)
                    answer.feed(rest)
                    first += rest
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamFault(Fault.SLOW, "connecting timed out") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamFault(connect_fault(error), f"can't connect: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UpstreamFault(Fault.RESET, f"the connection broke: {error}") from error
        except TooLong as error:
            raise UpstreamFault(Fault.RESET, f"an answer of {error}") from error
        if answer.streamed and not first:
            raise UpstreamFault(Fault.RESET, "the stream ended before it began")
        if not answer.streamed:
            answer.end()
        yield Opening(response, first, answer)
    finally:
        if response is not None:
            if not response.content.is_eof():
                response.close()
            response.release()


def forward_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A client's headers as the engine gets them. It must not compress its answer, or the answer couldn't be read."""
    kept = _without(headers, _NOT_SENT_ON)
    kept["Accept-Encoding"] = "identity"
    return kept


def backward_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """An engine's headers as the client gets them."""
    return _without(headers, _NOT_SENT_BACK)


def _without(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    """The headers except these and those that `Connection` names: they are for one hop only (RFC 9110, 7.6.1)."""
    options = ",".join(headers.getall("Connection", ())).lower().split(",")
    dropped = names | {option.strip() for option in options}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
