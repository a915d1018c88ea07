"""A streaming chat client on raw gevent sockets.

Locust's own clients hand bytes over in blocks of 1,024 or stop the clock at the headers; here every read of
the socket is stamped as it returns, and nothing but the pool's keep-alive stands between socket and parser.
The pool has no limit: a limit would cap the concurrency that the server sees and call it a result.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent
from gevent import socket, ssl
from gevent.hub import Waiter

from prefixwatch.documents.addresses import host_port
from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.client.answer_reader import AnswerReader, Exchange
from prefixwatch.loadgen.client.http_response import HttpError
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.loadgen.scenario.model import Timeouts

READ_BYTES = 65_536
READ_EVENT = 1
"""libev's and libuv's flag for a readable descriptor."""
WATCH_SECONDS = 0.2
"""How often time-outs are looked at: one watcher for all streams costs less than a timer a read."""
QUIET_SECONDS = 3.0
"""After this long, reads that no other followed are parsed, so that nonsense doesn't go unnoticed."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the requests go."""

    host: str
    port: int
    tls: bool
    path: str
    """Prefix of every path, without a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Target:
        """From `http://host:port[/prefix]`. Raises InputError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise InputError(f"target '{url}': {error}: write it as http://host:port") from error
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InputError(f"target '{url}' is not an http or https URL: write it as http://host:port")
        if parts.username is not None or parts.password is not None:
            raise InputError(
                f"target at {parts.hostname}: a login in the URL would end up in logs and reports: leave it out, and "
                "give the key in an environment variable with --api-key-env"
            )
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)

    @property
    def authority(self) -> str:
        return host_port(self.host, self.port)


class _Abandoned(Exception):
    """Thrown into the greenlet of a request that must end now."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome
        self.error = error


@dataclass(slots=True)
class _Running:
    """A request under way."""

    greenlet: Any
    reader: AnswerReader
    look_at: float = 0.0
    """When it may next be overdue: until then nobody need look."""


class HttpClient:
    """Sends chat requests to one target, each from the greenlet that calls `post`."""

    def __init__(self, target: Target, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self.timeouts = timeouts
        self.clock = clock
        self._idle: list[Any] = []
        self._addresses: list[Any] = []
        self._next_key = 0
        self._active: dict[int, _Running] = {}
        self._tls = ssl.create_default_context() if target.tls else None
        self._watcher = gevent.spawn(self._watch)

    def head(self, path: str, headers: Mapping[str, str]) -> bytes:
        """Request line and headers for a JSON body, all but its length. Names that aren't ASCII go as UTF-8."""
        lines = [f"POST {self.target.path}{path} HTTP/1.1", f"Host: {self.target.authority}"]
        lines += ["Content-Type: application/json", "Accept: text/event-stream", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header may not hold a line break")
        return ("\r\n".join(lines) + "\r\nContent-Length: ").encode()

    def post(self, head: bytes, body: bytes, *, keep_text: bool = False) -> Exchange:
        """Send one request and read its answer to the end. Never raises for what the network or server does."""
        exchange = Exchange(sent=self.clock())
        reader = AnswerReader(exchange, keep_text=keep_text)
        request = head + str(len(body)).encode() + b"\r\n\r\n" + body
        key = self._next_key
        self._next_key += 1
        self._active[key] = _Running(gevent.getcurrent(), reader)
        try:
            self._exchange(request, reader)
        except _Abandoned as abandoned:
            reader.stopped(abandoned.outcome, abandoned.error)
        finally:
            del self._active[key]
        exchange.end = self.clock() if exchange.end is None else exchange.end
        return exchange

    def connect_once(self) -> None:
        """See that something listens at the target; the connection is kept for the first request. Raises OSError."""
        self._idle.append(self._connect())

    def cancel(self) -> None:
        """End every request in flight: they return as cancelled."""
        for key in self._active:
            self._abandon(key, _Abandoned(Outcome.CANCELLED, "still running when the run ended"))

    def close(self) -> None:
        """Stop watching time-outs and close idle connections."""
        self._watcher.kill()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Send on a kept connection if there is one; if the peer had closed that meanwhile, once more on a new one."""
        while self._idle:
            connection = self._idle.pop()
            if self._converse(connection, request, reader, reused=True):
                return
        try:
            connection = self._connect()
        except OSError as error:
            refused = error.errno == errno.ECONNREFUSED
            reader.stopped(Outcome.FAILED, "connect_refused" if refused else f"connect_failed: {error}")
            return
        self._converse(connection, request, reader, reused=False)

    def _connect(self) -> Any:
        """A new connection. Raises OSError. Names are resolved once: the answer is kept for all connections."""
        if not self._addresses:
            self._addresses = socket.getaddrinfo(self.target.host, self.target.port, type=socket.SOCK_STREAM)
        problem = OSError(f"{self.target.host} has no address")
        for family, kind, protocol, _, address in self._addresses:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_hostname=self.target.host)
                return connection
            except OSError as error:
                problem = error
                connection.close()
            except _Abandoned:
                connection.close()
                raise
        raise problem

    def _converse(self, connection: Any, request: bytes, reader: AnswerReader, *, reused: bool) -> bool:
        """Send and read on this connection; False if it turned out stale before the server can have acted."""
        exchange = reader.exchange
        keep = False
        try:
            try:
                connection.sendall(request)
                keep = self._read(connection, reader)
            except OSError as error:
                if reused and exchange.first_byte is None:
                    return False
                if exchange.first_byte is None:
                    reader.stopped(Outcome.FAILED, f"connection error: {error}")
                else:
                    reader.stopped(Outcome.CUT_OFF, "midstream_reset")
            except HttpError as error:
                reader.stopped(Outcome.FAILED, f"bad_http: {error}")
            else:
                if reused and exchange.first_byte is None:
                    return False
        finally:
            if keep:
                self._idle.append(connection)
            else:
                connection.close()
        return True

    def _read(self, connection: Any, reader: AnswerReader) -> bool:
        """Read to the end of the answer; True if the connection can serve another request."""
        if self._tls is None:
            return _read_in_loop(connection, reader, self.clock)
        while True:
            data = connection.recv(READ_BYTES)
            if reader.take(data, self.clock()):
                return reader.keep_alive and bool(data)

    def _watch(self) -> None:
        while True:
            gevent.sleep(WATCH_SECONDS)
            now = self.clock()
            for key, running in self._active.items():
                if now < running.look_at:
                    continue
                try:
                    overdue = _overdue(running.reader, self.timeouts, now)
                except HttpError as error:
                    self._abandon(key, error)
                    continue
                if overdue:
                    self._abandon(key, _Abandoned(Outcome.TIMED_OUT, overdue))
                running.look_at = _next_look(running.reader, self.timeouts, now)

    def _abandon(self, key: int, reason: _Abandoned | HttpError) -> None:
        """Have the loop throw into a request's greenlet, if that is still at this request when the loop comes to it."""

        def throw() -> None:
            if key in self._active:
                self._active[key].greenlet.throw(reason)

        gevent.get_hub().loop.run_callback(throw)


def _read_in_loop(connection: Any, reader: AnswerReader, clock: Callable[[], float]) -> bool:
    """Read in the event loop's own callback and wake the greenlet once, when the answer is whole.

    Half the cost of a chunk would be switching greenlets for it, and a stamp would wait for the switch.
    """
    hub = gevent.get_hub()
    waiter = Waiter(hub)
    receive = connection._sock.recv  # the plain non-blocking socket inside: gevent's own recv would switch
    take = reader.take

    def on_readable() -> None:
        try:
            data = receive(READ_BYTES)
            if take(data, clock()):
                waiter.switch(reader.keep_alive and bool(data))
        except BlockingIOError:
            return
        except (OSError, HttpError) as error:
            waiter.throw(error)

    readable = hub.loop.io(connection.fileno(), READ_EVENT)
    readable.start(on_readable)
    try:
        return bool(waiter.get())
    finally:
        readable.stop()
        readable.close()


def _overdue(reader: AnswerReader, limits: Timeouts, now: float) -> str:
    """Which time-out this request has passed; empty if none. Raises HttpError, for a read that had been kept."""
    behind_since = reader.behind_since
    if behind_since is not None and now - behind_since > QUIET_SECONDS:
        reader.catch_up()
    late = _passed(reader.exchange, limits, now)
    if late and reader.behind_since is not None:
        reader.catch_up()
        late = _passed(reader.exchange, limits, now)
    return late


def _passed(exchange: Exchange, limits: Timeouts, now: float) -> str:
    """The limit that this moment is past, by what the exchange says; empty if none."""
    if now - exchange.sent > limits.total_seconds:
        return "total"
    if exchange.last_token is None:
        return "first_token" if now - exchange.sent > limits.first_token_seconds else ""
    return "inter_token_stall" if now - exchange.last_token > limits.inter_token_seconds else ""


def _next_look(reader: AnswerReader, limits: Timeouts, now: float) -> float:
    """The first moment at which `_overdue` could say something else than now, or has kept reads to parse."""
    exchange, behind_since = reader.exchange, reader.behind_since
    token = exchange.last_token
    next_token = exchange.sent + limits.first_token_seconds if token is None else token + limits.inter_token_seconds
    kept = (now if behind_since is None else behind_since) + QUIET_SECONDS
    return min(exchange.sent + limits.total_seconds, next_token, kept)
