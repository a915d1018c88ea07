"""A streaming chat client on raw gevent sockets.

Locust's own clients hand bytes over in blocks of 1,024 or stop the clock at the headers; here every read of
the socket is stamped as it returns, and nothing but the pool's keep-alive stands between socket and parser.
The pool has no limit: a limit would cap the concurrency that the server sees and call it a result.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import gevent
from gevent import socket, ssl
from gevent.hub import Waiter

from loadgen.chat_stream import OVERLOAD_CODES, ChatStream, Usage
from loadgen.http_response import HttpError, HttpResponse
from loadgen.records import Outcome
from loadgen.scenario import Timeouts
from loadgen.sse import SseParser

READ_BYTES = 65_536
READ_EVENT = 1
"""libev's and libuv's flag for a readable descriptor."""
WATCH_SECONDS = 0.05
"""How often time-outs are looked at: one watcher for all streams costs less than a timer a read."""


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
        """From `http://host:port[/prefix]`. Raises ValueError with the remedy."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"target '{url}' is not an http or https URL: write it as http://host:port")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(slots=True)
class Exchange:
    """One request and what came of it; times are of the client's monotonic clock, in seconds."""

    sent: float
    """When the client set to work on it: connecting is part of the wait."""
    first_byte: float | None = None
    first_event: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    end: float | None = None
    outcome: Outcome = Outcome.CUT_OFF
    error: str = ""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    usage: Usage | None = None
    gaps_seconds: list[float] = field(default_factory=list)
    body_bytes: int = 0
    first_event_data: bytes = b""
    """The event that brought the first token, as received."""
    content_events: list[bytes] | None = None
    """Events that brought content, as received; kept only when asked for."""


class _Abandoned(Exception):
    """Thrown into the greenlet of a request that must end now."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome
        self.error = error


class HttpClient:
    """Sends chat requests to one target, each from the greenlet that calls `post`."""

    def __init__(self, target: Target, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self.timeouts = timeouts
        self.clock = clock
        self._idle: list[Any] = []
        self._addresses: list[Any] = []
        self._next_key = 0
        self._active: dict[int, tuple[Any, Exchange]] = {}
        self._tls = ssl.create_default_context() if target.tls else None
        self._watcher = gevent.spawn(self._watch)

    def head(self, path: str, headers: Mapping[str, str]) -> bytes:
        """Request line and headers for a JSON body, all but its length."""
        lines = [f"POST {self.target.path}{path} HTTP/1.1", f"Host: {self.target.authority}"]
        lines += ["Content-Type: application/json", "Accept: text/event-stream", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header may not hold a line break")
        return ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1")

    def post(self, head: bytes, body: bytes, *, keep_content: bool = False) -> Exchange:
        """Send one request and read its answer to the end. Never raises for what the network or server does."""
        exchange = Exchange(sent=self.clock(), content_events=[] if keep_content else None)
        request = head + str(len(body)).encode() + b"\r\n\r\n" + body
        key = self._next_key
        self._next_key += 1
        self._active[key] = (gevent.getcurrent(), exchange)
        try:
            self._exchange(request, exchange)
        except _Abandoned as abandoned:
            exchange.outcome, exchange.error = abandoned.outcome, abandoned.error
        finally:
            del self._active[key]
        exchange.end = self.clock() if exchange.end is None else exchange.end
        return exchange

    def connect_once(self) -> None:
        """See that something listens at the target; the connection is kept for the first request. Raises OSError."""
        self._idle.append(self._connect())

    def cut_off(self) -> None:
        """End every request in flight: they return as cut off."""
        for key in self._active:
            self._abandon(key, _Abandoned(Outcome.CUT_OFF, "still running when the run ended"))

    def close(self) -> None:
        """Stop watching time-outs and close idle connections."""
        self._watcher.kill()
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _exchange(self, request: bytes, exchange: Exchange) -> None:
        """Send on a kept connection if there is one; if the peer had closed that meanwhile, once more on a new one."""
        while self._idle:
            connection = self._idle.pop()
            if self._converse(connection, request, exchange, reused=True):
                return
        try:
            connection = self._connect()
        except OSError as error:
            exchange.outcome = Outcome.FAILED
            refused = error.errno == errno.ECONNREFUSED
            exchange.error = "connect_refused" if refused else f"connect_failed: {error}"
            return
        self._converse(connection, request, exchange, reused=False)

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

    def _converse(self, connection: Any, request: bytes, exchange: Exchange, *, reused: bool) -> bool:
        """Send and read on this connection; False if it turned out stale before the server can have acted."""
        reader = _AnswerReader(exchange)
        keep = False
        try:
            try:
                connection.sendall(request)
                keep = self._read(connection, reader)
            except OSError as error:
                if reused and exchange.first_byte is None:
                    return False
                reader.broken(f"connection error: {error}" if exchange.first_byte is None else "midstream_reset")
            except HttpError as error:
                reader.broken(f"bad_http: {error}")
            else:
                if reused and exchange.first_byte is None:
                    return False
        finally:
            if keep:
                self._idle.append(connection)
            else:
                connection.close()
        return True

    def _read(self, connection: Any, reader: _AnswerReader) -> bool:
        """Read to the end of the answer; True if the connection can serve another request."""
        if self._tls is None:
            return _read_in_loop(connection, reader, self.clock)
        while True:
            data = connection.recv(READ_BYTES)
            if reader.take(data, self.clock()):
                return reader.http.keep_alive and bool(data)

    def _watch(self) -> None:
        while True:
            gevent.sleep(WATCH_SECONDS)
            now = self.clock()
            for key, (_, exchange) in self._active.items():
                if overdue := _overdue(exchange, self.timeouts, now):
                    self._abandon(key, _Abandoned(Outcome.TIMED_OUT, overdue))

    def _abandon(self, key: int, reason: _Abandoned) -> None:
        """Have the loop throw into a request's greenlet, if that is still at this request when the loop comes to it."""

        def throw() -> None:
            if key in self._active:
                self._active[key][0].throw(reason)

        gevent.get_hub().loop.run_callback(throw)


def _read_in_loop(connection: Any, reader: _AnswerReader, clock: Callable[[], float]) -> bool:
    """Read in the event loop's own callback and wake the greenlet once, when the answer is whole.

    Half the cost of a chunk would be switching greenlets for it, and a stamp would wait for the switch.
    """
    hub = gevent.get_hub()
    waiter = Waiter(hub)
    receive = connection._sock.recv  # the plain non-blocking socket inside: gevent's own recv would switch

    def on_readable() -> None:
        try:
            data = receive(READ_BYTES)
            if reader.take(data, clock()):
                waiter.switch(reader.http.keep_alive and bool(data))
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


def _overdue(exchange: Exchange, limits: Timeouts, now: float) -> str:
    """Which time-out this request has passed; empty if none."""
    if now - exchange.sent > limits.total_seconds:
        return "total"
    if exchange.last_token is None:
        return "first_token" if now - exchange.sent > limits.first_token_seconds else ""
    return "inter_token_stall" if now - exchange.last_token > limits.inter_token_seconds else ""


class _AnswerReader:
    """From the bytes of an answer, read by read, to the fields of its exchange."""

    __slots__ = ("_body", "_streamed", "chat", "exchange", "http", "sse")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.http = HttpResponse()
        self.sse = SseParser()
        self.chat = ChatStream()
        self._streamed = False
        self._body: list[bytes] = []

    def take(self, data: bytes, now: float) -> bool:
        """Take in one read, stamped `now`, empty at the end of the connection; True when the answer is over."""
        if not data:
            self._end_of_connection(now)
            return True
        exchange, http = self.exchange, self.http
        if exchange.first_byte is None:
            exchange.first_byte = now
        body = http.feed(data)
        if exchange.status is None and http.status is not None:
            exchange.status, exchange.headers = http.status, http.headers
            streamed = http.headers.get("content-type", "").startswith("text/event-stream")
            self._streamed = streamed and http.status == 200
        if body:
            exchange.body_bytes += len(body)
            if self._streamed:
                self._events(body, now)
            else:
                self._body.append(body)
        if http.complete:
            self._finish(now)
        return http.complete

    def _end_of_connection(self, now: float) -> None:
        if self.exchange.first_byte is None:
            self.broken("closed_without_answer")
        elif self.http.end_of_connection() or self.chat.done:
            self._finish(now)
        else:
            self.broken("eof_without_done" if self._streamed else "eof_in_body")

    def broken(self, error: str) -> None:
        """The answer ended where it should not have; what came before stays recorded."""
        exchange = self.exchange
        exchange.usage = self.chat.usage
        exchange.outcome, exchange.error = Outcome.FAILED, error

    def _events(self, body: bytes, now: float) -> None:
        exchange = self.exchange
        content = False
        for data in self.sse.feed(body):
            if exchange.first_event is None:
                exchange.first_event = now
            if not self.chat.event(data):
                continue
            if exchange.content_events is not None:
                exchange.content_events.append(data)
            if not content:
                content = True
                if exchange.first_token is None:
                    exchange.first_event_data = data
        if not content:
            return
        if exchange.last_token is None:
            exchange.first_token = now
        else:
            exchange.gaps_seconds.append(now - exchange.last_token)
        exchange.last_token = now

    def _finish(self, now: float) -> None:
        exchange, chat = self.exchange, self.chat
        exchange.end = now
        if not self._streamed:
            chat.body(b"".join(self._body))
        exchange.usage = chat.usage
        exchange.outcome, exchange.error = self._verdict()

    def _verdict(self) -> tuple[Outcome, str]:
        chat, status = self.chat, self.http.status or 0
        if status != 200:
            outcome = Outcome.REFUSED if status in OVERLOAD_CODES else Outcome.FAILED
            return outcome, f"http_{status}: {chat.error}" if chat.error else f"http_{status}"
        if chat.error:
            return (Outcome.REFUSED if chat.overloaded else Outcome.FAILED), f"error_in_200: {chat.error}"
        if not chat.done:
            return Outcome.FAILED, "eof_without_done"
        return Outcome.COMPLETED, ""
