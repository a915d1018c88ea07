"""Fetches targets' metrics pages: bounded in time and size, and every failure has a short, stable name."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from yarl import URL

from exporters.errors import ExporterError
from exporters.http.client import Credentials
from exporters.http.client_config import ClientConfig
from exporters.scraping.exposition import looks_like_metrics

_HEADERS = {
    "Accept": "text/plain;version=0.0.4;q=1, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "prefixwatch-exporter",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_NO_AUTHENTICATION = ClientConfig()
_UNLIMITED_TOTAL = 2**62


@dataclass(frozen=True, slots=True)
class Scrape:
    """What came of one fetch: a body, or the reason why there is none."""

    seconds: float
    body: bytes | None = None
    reason: str = ""
    """`refused`, `dns`, `unreachable`, `tls`, `timeout`, `reset`, `http_<status>`, `redirects`, `too_large`,
    `overloaded`, `bad_encoding`, `bad_http`, `bad_credentials` or `not_metrics`; empty when there is a body."""
    detail: str = ""


class ScrapeFault(Exception):
    """A fetch failed; `reason` is one of `Scrape.reason`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Scraper:
    """One HTTP client for all targets; connections are kept and used again."""

    def __init__(
        self,
        timeout_seconds: float,
        limit_bytes: int,
        total_limit_bytes: int = _UNLIMITED_TOTAL,
        keep_connection_seconds: float = 15.0,
    ) -> None:
        self.credentials = Credentials()
        self.configure(timeout_seconds, limit_bytes, total_limit_bytes)
        self._receiving_bytes = 0
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_connection_seconds),
            headers=_HEADERS,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def configure(self, timeout_seconds: float, limit_bytes: int, total_limit_bytes: int = _UNLIMITED_TOTAL) -> None:
        """New limits, from the next fetch on."""
        self._timeout_seconds = timeout_seconds
        self._limit_bytes = limit_bytes
        self._total_limit_bytes = total_limit_bytes

    async def close(self) -> None:
        await self._session.close()

    async def fetch(self, url: str, client: ClientConfig = _NO_AUTHENTICATION) -> Scrape:
        """The page's bytes or the reason why not; takes no longer than the timeout, and never raises for a target."""
        started = time.perf_counter()
        try:
            body = await self.get(url, client)
            if body and not looks_like_metrics(body):
                raise ScrapeFault("not_metrics", f"no line has the form of a sample; it begins {body[:40]!r}")
        except ScrapeFault as fault:
            return Scrape(time.perf_counter() - started, reason=fault.reason, detail=fault.detail)
        return Scrape(time.perf_counter() - started, body)

    async def get(self, url: str, client: ClientConfig, headers: Mapping[str, str] | None = None) -> bytes:
        """A body, by the same limits as a page. Raises ScrapeFault."""
        with _named_faults(self._timeout_seconds):
            return await self._follow(URL(url, encoded=True), client, headers or {})

    async def _follow(self, url: URL, client: ClientConfig, headers: Mapping[str, str]) -> bytes:
        """Redirects to another origin are followed without credentials, which are for the configured one only."""
        deadline = time.monotonic() + self._timeout_seconds
        origin = url.origin()
        for _ in range(_MOST_REDIRECTS + 1):
            own = client if url.origin() == origin else _NO_AUTHENTICATION
            location = await self._get(url, own, headers, deadline)
            if isinstance(location, bytes):
                return location
            url = url.join(URL(location))
            if url.scheme not in ("http", "https"):
                raise ScrapeFault("bad_http", f"a redirect to {url.scheme}: is not followed")
        raise ScrapeFault("redirects", f"more than {_MOST_REDIRECTS}; point the target at the page itself")

    async def _get(self, url: URL, client: ClientConfig, headers: Mapping[str, str], deadline: float) -> bytes | str:
        """The body, or where a redirect leads."""
        tls = client.tls_config
        async with self._session.get(
            url,
            headers={**headers, **self.credentials.headers(client)},
            ssl=self.credentials.tls(client),
            server_hostname=tls.server_name if tls else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=max(0.001, deadline - time.monotonic())),
        ) as response:
            if response.status in _REDIRECTS and "Location" in response.headers:
                return response.headers["Location"]
            if response.status != 200:
                raise ScrapeFault(f"http_{response.status}", response.reason or "")
            limit = self._limit_bytes
            if response.content_length is not None and response.content_length > limit:
                raise _too_large(limit)
            body = await self._receive(response.content, limit)
            encoding = response.headers.get("Content-Encoding", "identity").lower()
        return _decoded(body, encoding, limit)

    async def _receive(self, content: aiohttp.StreamReader, limit: int) -> bytes:
        body = bytearray()
        try:
            async for chunk in content.iter_any():
                body += chunk
                self._receiving_bytes += len(chunk)
                if len(body) > limit:
                    raise _too_large(limit)
                if self._receiving_bytes > self._total_limit_bytes:
                    raise ScrapeFault(
                        "overloaded", f"all targets together sent more than {self._total_limit_bytes} bytes"
                    )
        finally:
            self._receiving_bytes -= len(body)
        return bytes(body)


def _decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a content encoding that we asked not to get, without ever inflating beyond the limit."""
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
    except ExporterError as error:
        raise ScrapeFault("bad_credentials", str(error)) from error
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
        raise ScrapeFault("tls", f"{error}; ca_file or server_name of tls_config may be missing") from error
    except aiohttp.ClientConnectorError as error:
        raise ScrapeFault(_connect_reason(error.os_error), _explain(error.os_error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError) as error:
        raise ScrapeFault("reset", str(error)) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise ScrapeFault("bad_http", str(error)[:200]) from error
    except OSError as error:
        raise ScrapeFault("unreachable", _explain(error)) from error


def _explain(error: OSError) -> str:
    """The system's own words; the event loop's are about its calls. A resolver's numbers are not the system's."""
    if error.errno and error.errno > 0 and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _connect_reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return "dns" if isinstance(error, socket.gaierror) else "unreachable"
