"""From the bytes of an answer, read by read, to the fields of its exchange.

A read in the middle of a stream is only stamped and kept: what it means is found out some reads later, for many at
once. That way a chunk costs a fraction of what it would cost to go through all parsers for each, with cold caches every
time, and no stamp waits while another stream's chunk is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loadgen.chat_stream import OVERLOAD_CODES, ChatStream, Usage
from loadgen.http_response import HttpError, HttpResponse, may_end_in
from loadgen.records import Outcome
from loadgen.sse import SseParser

KEPT_READS = 64
"""Reads kept at most: more would only make the pause longer in which they are parsed."""
KEPT_SECONDS = 2.0
"""How long they are kept, as long as others follow. Each stream looks to that by itself: parsed by a clock, those of
all streams would be parsed in one long pause."""


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


class AnswerReader:
    """Takes the reads of one answer. While it runs, its exchange says what is known up to the last `catch_up`."""

    __slots__ = ("_body", "_chat", "_http", "_kept", "_reads", "_sse", "_stamps", "_streamed", "exchange")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._http = HttpResponse()
        self._sse = SseParser()
        self._chat = ChatStream()
        self._streamed = False
        self._body: list[bytes] = []
        self._kept = False
        """Whether reads in the middle are kept: in a stream of chunks, once its head is read."""
        self._reads: list[bytes] = []
        self._stamps: list[float] = []

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can serve another request, once the answer is over."""
        return self._http.complete and self._http.keep_alive

    @property
    def behind_since(self) -> float | None:
        """The stamp of the oldest read that is kept; None if all are parsed."""
        return self._stamps[0] if self._stamps else None

    def take(self, data: bytes, now: float) -> bool:
        """Take in one read, stamped `now`, empty at the end of the connection; True when the answer is over.

        Raises HttpError, for this read or one before it.
        """
        if self._kept and not may_end_in(data):
            self._reads.append(data)
            self._stamps.append(now)
            if len(self._reads) == KEPT_READS or now - self._stamps[0] > KEPT_SECONDS:
                self.catch_up()
            return False
        self.catch_up()
        if not data:
            self._end_of_connection(now)
            return True
        self._parse(data, now)
        self._kept = self._streamed and self._http.chunked
        if self._http.complete:
            self._finish(now)
        return self._http.complete

    def catch_up(self) -> None:
        """Parse the reads that were kept, each at its stamp. Raises HttpError."""
        if not self._reads:
            return
        reads, stamps = self._reads, self._stamps
        self._reads, self._stamps = [], []
        feed, events = self._http.feed, self._events
        for data, stamp in zip(reads, stamps, strict=True):
            if body := feed(data):
                events(body, stamp)
        if self._http.complete:
            raise HttpError("bytes after the end of the answer")

    def stopped(self, outcome: Outcome, error: str) -> None:
        """The answer ended where it should not have; what came before stays recorded."""
        exchange = self.exchange
        exchange.outcome, exchange.error = outcome, error
        try:
            self.catch_up()
        except HttpError as bad:
            exchange.outcome, exchange.error = Outcome.FAILED, f"bad_http: {bad}"
        exchange.usage = self._chat.usage

    def _parse(self, data: bytes, now: float) -> None:
        exchange, http = self.exchange, self._http
        if exchange.first_byte is None:
            exchange.first_byte = now
        body = http.feed(data)
        if exchange.status is None and http.status is not None:
            exchange.status, exchange.headers = http.status, http.headers
            streamed = http.headers.get("content-type", "").startswith("text/event-stream")
            self._streamed = streamed and http.status == 200
        if body and self._streamed:
            self._events(body, now)
        elif body:
            exchange.body_bytes += len(body)
            self._body.append(body)

    def _events(self, body: bytes, now: float) -> None:
        exchange = self.exchange
        exchange.body_bytes += len(body)
        content = False
        for data in self._sse.feed(body):
            if exchange.first_event is None:
                exchange.first_event = now
            if not self._chat.event(data):
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

    def _end_of_connection(self, now: float) -> None:
        if self.exchange.first_byte is None:
            self.stopped(Outcome.FAILED, "closed_without_answer")
        elif self._http.end_of_connection() or self._chat.done:
            self._finish(now)
        else:
            self.stopped(Outcome.FAILED, "eof_without_done" if self._streamed else "eof_in_body")

    def _finish(self, now: float) -> None:
        exchange, chat = self.exchange, self._chat
        exchange.end = now
        if not self._streamed:
            chat.body(b"".join(self._body))
        exchange.usage = chat.usage
        exchange.outcome, exchange.error = self._verdict()

    def _verdict(self) -> tuple[Outcome, str]:
        chat, status = self._chat, self._http.status or 0
        if status != 200:
            outcome = Outcome.REFUSED if status in OVERLOAD_CODES else Outcome.FAILED
            return outcome, f"http_{status}: {chat.error}" if chat.error else f"http_{status}"
        if chat.error:
            return (Outcome.REFUSED if chat.overloaded else Outcome.FAILED), f"error_in_200: {chat.error}"
        if not chat.done:
            return Outcome.FAILED, "eof_without_done"
        return Outcome.COMPLETED, ""
