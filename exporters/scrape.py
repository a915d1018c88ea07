"""Fetches targets' metrics pages: bounded in time and size, and every failure has a short, stable name."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from exporters.exposition import looks_like_metrics

_HEADERS = {
    "Accept": "text/plain;version=0.0.4;q=1, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "prefixwatch-exporter",
}


@dataclass(frozen=True, slots=True)
class Scrape:
    """What came of one fetch: a body, or the reason why there is none."""

    seconds: float
    body: bytes | None = None
    reason: str = ""
    """`refused`, `dns`, `unreachable`, `tls`, `timeout`, `reset`, `http_<status>`, `too_large`, `bad_encoding`,
    `bad_http` or `not_metrics`; empty when there is a body."""
    detail: str = ""


class ScrapeFault(Exception):
    """A fetch failed; `reason` is one of `Scrape.reason`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Scraper:
    """One HTTP client for all targets; connections are kept and used again."""

    def __init__(self, timeout_seconds: float, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._timeout_seconds = timeout_seconds
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            headers=_HEADERS,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def fetch(self, url: str) -> Scrape:
        """The page's bytes or the reason why not; takes no longer than the timeout, and never raises for a target."""
        started = time.perf_counter()
        try:
            with _named_faults(self._timeout_seconds):
                body = await self._get(url)
            if body and not looks_like_metrics(body):
                raise ScrapeFault("not_metrics", f"no line has the form of a sample; it begins {body[:40]!r}")
        except ScrapeFault as fault:
            return Scrape(time.perf_counter() - started, reason=fault.reason, detail=fault.detail)
        return Scrape(time.perf_counter() - started, body)

    async def _get(self, url: str) -> bytes:
        async with self._session.get(url) as response:
            if response.status != 200:
                raise ScrapeFault(f"http_{response.status}", response.reason or "")
            limit = self._limit_bytes
            if response.content_length is not None and response.content_length > limit:
                raise _too_large(limit)
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
            encoding = response.headers.get("Content-Encoding", "identity").lower()
        return _decoded(b"".join(chunks), encoding, limit)


def _decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a content encoding that we asked not to get, without ever inflating beyond the limit."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ScrapeFault("bad_encoding", f"Content-Encoding {encoding} is not supported")
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: takes gzip's and zlib's headers
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise ScrapeFault("bad_encoding", str(error)) from error
    if len(inflated) > limit:
        raise _too_large(limit)
    return inflated


def _too_large(limit: int) -> ScrapeFault:
    return ScrapeFault("too_large", f"more than {limit} bytes")


@contextmanager
def _named_faults(timeout_seconds: float) -> Iterator[None]:
    """Give the client library's and the system's errors the names that users and alerts know."""
    try:
        yield
    except TimeoutError as error:
        raise ScrapeFault("timeout", f"no complete answer within {timeout_seconds:g} s") from error
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
        raise ScrapeFault("tls", str(error)) from error
    except aiohttp.ClientConnectorError as error:
        raise ScrapeFault(_connect_reason(error.os_error), error.os_error.strerror or str(error.os_error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError) as error:
        raise ScrapeFault("reset", str(error)) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise ScrapeFault("bad_http", str(error)[:200]) from error
    except OSError as error:
        raise ScrapeFault("unreachable", error.strerror or str(error)) from error


def _connect_reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return "dns" if isinstance(error, socket.gaierror) else "unreachable"
