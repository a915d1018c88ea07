"""Gets pages over HTTP/1.1; connections are kept and used again.

A general client (aiohttp) takes more than twice the CPU for a page: `benchmarks/http_client.py`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import NamedTuple

import aiohappyeyeballs
from yarl import URL

from prefixwatch.exporters.http.connection import Connection, Receiving
from prefixwatch.exporters.http.response import Answer

_NEXT_ADDRESS_AFTER_SECONDS = 0.25
"""Of RFC 8305: how long one of a host's addresses is tried before the next is tried as well."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Not allowed in headers; tabs may be in one, line ends between them."""
_NOT_IN_ADDRESS = re.compile(r"[\x00-\x20\x7f]")
_REMEMBERED = 4_096


class CannotConnect(Exception):
    """No connection; `error` is why: an ssl.SSLError, a socket.gaierror or another OSError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Address(NamedTuple):
    """Whom to connect to, and what to ask for."""

    scheme: str
    host: str
    port: int
    opening: str
    """A GET's request line and the headers that come from the address, without a line end after them."""
    has_login: bool
    """Whether there is an Authorization header among those."""


class _Origin(NamedTuple):
    """The peer of a connection. Requests to equal ones can share it."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    server_name: str | None


class PageClient:
    """Keeps one connection or more to each of its targets. `receiving` is shared by all answers."""

    def __init__(self, receiving: Receiving, keep_connection_seconds: float) -> None:
        self._receiving = receiving
        self.keep_seconds = keep_connection_seconds
        self._idle: defaultdict[_Origin, list[Connection]] = defaultdict(list)
        self._sweep: asyncio.TimerHandle | None = None

    async def get(
        self,
        url: str,
        headers: Mapping[str, str],
        limit_bytes: int,
        deadline_seconds: float,
        *,
        tls: ssl.SSLContext | bool = True,
        server_name: str | None = None,
    ) -> Answer:
        """The answer, whatever its status, before `deadline_seconds` on the event loop's clock.

        Of an https URL `tls` says whom to trust, True the system's authorities, and `server_name` whom to expect when
        it isn't the host. Raises TimeoutError; CannotConnect; BadHttp, TooLarge or Overloaded; OSError when the peer
        closes too early; ValueError for an address or a header that can't be sent.
        """
        address = address_of(url)
        request = _request(address, headers)
        origin = _origin(address, tls, server_name)
        while (kept := self._kept(origin)) is not None:
            try:
                answer = await kept.ask(request, limit_bytes, deadline_seconds)
            except ConnectionError:
                if kept.heard:
                    raise
                continue
            self._keep(origin, kept)
            return answer
        async with asyncio.timeout_at(deadline_seconds):
            connection = await self._connect(origin)
        answer = await connection.ask(request, limit_bytes, deadline_seconds)
        self._keep(origin, connection)
        return answer

    async def close(self) -> None:
        """Close what is kept; an answer that is still waited for is its caller's to cancel."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # closed in the loop's next turn

    def _kept(self, origin: _Origin) -> Connection | None:
        """The connection that was used last: it is the likeliest to be still open."""
        kept = self._idle.get(origin)
        while kept:
            connection = kept.pop()
            if connection.usable:
                return connection
        return None

    def _keep(self, origin: _Origin, connection: Connection) -> None:
        if not connection.usable:
            return
        connection.idle_since_seconds = time.monotonic()
        self._idle[origin].append(connection)
        if self._sweep is None:
            self._sweep_later()

    def _sweep_later(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self.keep_seconds, self._close_old)

    def _close_old(self) -> None:
        oldest_seconds = time.monotonic() - self.keep_seconds
        for origin, connections in list(self._idle.items()):
            kept = [one for one in connections if one.usable and one.idle_since_seconds > oldest_seconds]
            for connection in connections:
                if connection not in kept:
                    connection.close()
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        self._sweep = None
        if self._idle:
            self._sweep_later()

    async def _connect(self, origin: _Origin) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
            connected = await aiohappyeyeballs.start_connection(
                addresses, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_SECONDS, interleave=1
            )
            _, connection = await loop.create_connection(
                lambda: Connection(self._receiving),
                sock=connected,
                ssl=origin.tls,
                server_hostname=(origin.server_name or origin.host.rstrip(".")) if origin.tls else None,
            )
        except OSError as error:
            raise CannotConnect(error) from error
        return connection


@lru_cache(_REMEMBERED)
def address_of(url: str) -> Address:
    """Raises ValueError for an address that nothing can be asked for at."""
    parts = URL(url, encoded=True)
    if parts.raw_host is None or parts.port is None or parts.scheme not in ("http", "https"):
        raise ValueError(f"'{parts.scheme}' with host '{parts.raw_host}' is not an http or https address")
    if _NOT_IN_ADDRESS.search(url):
        raise ValueError("the address has a space or a control character: write them as %20 and the like")
    opening = f"GET {parts.raw_path_qs or '/'} HTTP/1.1\r\nHost: {parts.host_port_subcomponent}"
    has_login = parts.raw_user is not None or parts.raw_password is not None
    if has_login:
        login = f"{parts.user or ''}:{parts.password or ''}"
        opening += f"\r\nAuthorization: Basic {b64encode(login.encode()).decode()}"
    return Address(parts.scheme, parts.raw_host, parts.port, opening, has_login)


def redirected(url: str, location: str) -> str:
    """Where a redirect leads. Raises ValueError for one that can't be read."""
    return str(URL(url, encoded=True).join(URL(location)))


@cache
def _system_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def _origin(address: Address, tls: ssl.SSLContext | bool, server_name: str | None) -> _Origin:
    if address.scheme == "http":
        return _Origin(address.host, address.port, None, None)
    trust = tls if isinstance(tls, ssl.SSLContext) else _system_trust()
    return _Origin(address.host, address.port, trust, server_name)


def _request(address: Address, headers: Mapping[str, str]) -> bytes:
    """As bytes on the wire. Raises ValueError."""
    if address.has_login and any(name.lower() == "authorization" for name in headers):
        raise ValueError("the address has a user name or password beside the target's authentication: give one")
    lines = "".join([f"\r\n{name}: {value}" for name, value in headers.items()])
    if _CONTROL.search(lines) or not lines.count("\r") == lines.count("\n") == len(headers):
        raise ValueError("a header has a control character")
    return f"{address.opening}{lines}\r\n\r\n".encode()
