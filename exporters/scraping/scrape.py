"""Fetches targets' metrics pages: bounded in time and size, and every failure has a short, stable name."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.http.client_config import ClientConfig
from prefixwatch.exporters.http.connection import Overloaded, Receiving
from prefixwatch.exporters.http.credentials import Credentials
from prefixwatch.exporters.http.page_client import CannotConnect, PageClient, address_of, redirected
from prefixwatch.exporters.http.response import Answer, BadHttp, TooLarge
from prefixwatch.exporters.scraping.exposition import looks_like_metrics

_HEADERS = {
    "Accept": "text/plain;version=0.0.4;q=1, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "prefixwatch-exporter",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_NO_AUTHENTICATION = ClientConfig()
_UNLIMITED_TOTAL = 2**62


class Scrape(NamedTuple):
    """What came of one fetch: a body, or the reason why there is none."""

    seconds: float
    body: bytes | None = None
    reason: str = ""
    """`refused`, `dns`, `unreachable`, `tls_verify`, `tls`, `timeout`, `reset`, `http_<status>`, `redirects`,
    `too_large`, `overloaded`, `bad_encoding`, `bad_http`, `bad_credentials` or `not_metrics`; empty with a body."""
    detail: str = ""
    content_type: str = ""
    """As the target declared it; empty if it didn't."""


class ScrapeFault(Exception):
    """A fetch failed; `reason` is one of `Scrape.reason`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Scraper:
    """Fetches the pages of all targets; connections are kept and used again."""

    def __init__(
        self,
        timeout_seconds: float,
        limit_bytes: int,
        total_limit_bytes: int = _UNLIMITED_TOTAL,
        keep_connection_seconds: float = 15.0,
    ) -> None:
        self.credentials = Credentials()
        self._receiving = Receiving(total_limit_bytes)
        self._pages = PageClient(self._receiving, keep_connection_seconds)
        self.configure(timeout_seconds, limit_bytes, total_limit_bytes, keep_connection_seconds)

    def configure(
        self, timeout_seconds: float, limit_bytes: int, total_limit_bytes: int, keep_connection_seconds: float
    ) -> None:
        """Apply these limits from the next fetch on."""
        self._pages.keep_seconds = keep_connection_seconds
        self._timeout_seconds = timeout_seconds
        self._limit_bytes = limit_bytes
        self._receiving.most_bytes = total_limit_bytes

    async def close(self) -> None:
        await self._pages.close()

    async def fetch(self, url: str, client: ClientConfig = _NO_AUTHENTICATION) -> Scrape:
        """The page's bytes or the reason why not; takes no longer than the timeout, and never raises for a target."""
        started = time.perf_counter()
        try:
            body, content_type = await self._get(url, client, {})
            if body and not looks_like_metrics(body):
                raise ScrapeFault("not_metrics", _what_it_is(body))
        except ScrapeFault as fault:
            return Scrape(time.perf_counter() - started, reason=fault.reason, detail=fault.detail)
        return Scrape(time.perf_counter() - started, body, content_type=content_type)

    async def get(self, url: str, client: ClientConfig, headers: Mapping[str, str] | None = None) -> bytes:
        """A body, by the same limits as a page. Raises ScrapeFault."""
        body, _ = await self._get(url, client, headers or {})
        return body

    async def _get(self, url: str, client: ClientConfig, headers: Mapping[str, str]) -> tuple[bytes, str]:
        """A body and its content type. Raises ScrapeFault."""
        limit = self._limit_bytes
        try:
            answer = await self._follow(url, client, {**_HEADERS, **headers}, limit)
            body = _decoded(answer.body, answer.headers.get("content-encoding", "identity").lower(), limit)
            return body, answer.headers.get("content-type", "")
        except (ExporterError, CannotConnect, TooLarge, Overloaded, BadHttp, ValueError, OSError) as error:
            raise self._fault(error, limit) from error

    async def _follow(self, url: str, client: ClientConfig, headers: Mapping[str, str], limit: int) -> Answer:
        """The page, wherever redirects lead: to another origin they are followed without credentials, which are for
        the configured one only."""
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        configured = address_of(url)
        for _ in range(_MOST_REDIRECTS + 1):
            own = client if address_of(url)[:3] == configured[:3] else _NO_AUTHENTICATION
            tls = own.tls_config
            answer = await self._pages.get(
                url,
                {**headers, **self.credentials.headers(own)},
                limit,
                deadline,
                tls=self.credentials.tls(own),
                server_name=tls.server_name if tls else None,
            )
            if answer.status == 200:
                return answer
            if answer.status not in _REDIRECTS or "location" not in answer.headers:
                raise ScrapeFault(f"http_{answer.status}", answer.reason)
            url = redirected(url, answer.headers["location"])
        raise ScrapeFault("redirects", f"more than {_MOST_REDIRECTS}; point the target at the page itself")

    def _fault(self, error: Exception, limit_bytes: int) -> ScrapeFault:
        """Give errors of the client and the system the names that users and alerts know."""
        match error:
            case TimeoutError():
                reason, detail = "timeout", f"no complete answer within {self._timeout_seconds:g} s"
            case ExporterError():
                reason, detail = "bad_credentials", str(error)
            case CannotConnect():
                reason, detail = _unconnected(error.error)
            case TooLarge():
                reason, detail = "too_large", f"more than {limit_bytes} bytes"
            case Overloaded():
                most = self._receiving.most_bytes
                reason, detail = "overloaded", f"all targets together sent more than {most} bytes"
            case OSError():
                reason, detail = "reset", str(error)
            case _:
                reason, detail = "bad_http", str(error)[:200]
        return ScrapeFault(reason, detail)


def _what_it_is(body: bytes) -> str:
    """What a page is that has no sample, for people."""
    begins = f"no line has the form of a sample; it begins {body[:40]!r}"
    match body.lstrip()[:1]:
        case b"[" | b"{":
            return (
                f"JSON, not metrics: the text may be at another path, TensorRT-LLM's at /prometheus/metrics; {begins}"
            )
        case b"<":
            return f"HTML or XML, not metrics: a login page, or another path; {begins}"
    return begins


def _decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a content encoding that we asked not to get, without ever inflating beyond the limit. Raises TooLarge."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ScrapeFault("bad_encoding", f"Content-Encoding {encoding[:40]} is not supported")
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: takes gzip's and zlib's headers
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise ScrapeFault("bad_encoding", str(error)) from error
    if len(inflated) > limit:
        raise TooLarge
    return inflated


def _explain(error: OSError) -> str:
    """The system's own words; the event loop's are about its calls. A resolver's numbers are not the system's."""
    if error.errno and error.errno > 0 and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _unconnected(error: OSError) -> tuple[str, str]:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "tls_verify", f"{error}; ca_file or server_name of tls_config may be missing"
    if isinstance(error, ssl.SSLError):
        return "tls", str(error)
    if isinstance(error, ConnectionRefusedError):
        return "refused", _explain(error)
    return "dns" if isinstance(error, socket.gaierror) else "unreachable", _explain(error)
