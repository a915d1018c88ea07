"""From the bytes of an answer, read by read, to the fields of its exchange.

A read in the middle of a stream is only stamped and kept: what it means is found out some reads later, for many at
once. That way a chunk costs a fraction of what it would cost to go through all parsers for each, with cold caches every
time, and no stamp waits while another stream's chunk is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixwatch.loadgen.client.http_response import HttpError, HttpResponse, may_end_in
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.openai_api.answer import UNREPORTED, Answer, AnswerOutcome, Content, Usage

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
    first_answer: float | None = None
    """First token of the answer proper, after any reasoning."""
    last_token: float | None = None
    end: float | None = None
    outcome: Outcome = Outcome.CANCELLED
    error: str = ""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    usage: Usage = UNREPORTED
    gaps_seconds: list[float] = field(default_factory=list)
    body_bytes: int = 0
    first_event_data: bytes = b""
    """The event that brought the first token, as received."""
    text: str = ""
    """The answer's text, without reasoning and tool calls; only when asked for."""


class AnswerReader:
    """Takes the reads of one answer. While it runs, its exchange says what is known up to the last `catch_up`."""

    __slots__ = ("_answer", "_http", "_keep_text", "_kept", "_reads", "_stamps", "exchange")

    def __init__(self, exchange: Exchange, *, keep_text: bool = False) -> None:
        self.exchange = exchange
        self._keep_text = keep_text
        self._http = HttpResponse()
        self._answer: Answer | None = None
        """None until the response's head is read."""
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
        self._kept = self._answer is not None and self._answer.streamed and self._http.chunked
        if self._http.complete:
            self._finish(now)
        return self._http.complete

    def catch_up(self) -> None:
        """Parse the reads that were kept, each at its stamp. Raises HttpError."""
        if not self._reads:
            return
        reads, stamps = self._reads, self._stamps
        self._reads, self._stamps = [], []
        feed, body_came = self._http.feed, self._body
        for data, stamp in zip(reads, stamps, strict=True):
            if body := feed(data):
                body_came(body, stamp)
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
        self._take_answer()

    def _parse(self, data: bytes, now: float) -> None:
        exchange, http = self.exchange, self._http
        if exchange.first_byte is None:
            exchange.first_byte = now
        body = http.feed(data)
        if exchange.status is None and http.status is not None:
            exchange.status, exchange.headers = http.status, http.headers
            content_type = http.headers.get("content-type", "")
            self._answer = Answer(http.status, content_type, keep_text=self._keep_text)
        if body:
            self._body(body, now)

    def _body(self, body: bytes, now: float) -> None:
        exchange, answer = self.exchange, self._answer
        assert answer is not None
        exchange.body_bytes += len(body)
        content = answer.feed(body)
        if exchange.first_event is None and answer.events:
            exchange.first_event = now
        if not content:
            return
        if exchange.first_answer is None and content is Content.ANSWER:
            exchange.first_answer = now
        if exchange.last_token is None:
            exchange.first_token = now
            exchange.first_event_data = answer.first_content
        else:
            exchange.gaps_seconds.append(now - exchange.last_token)
        exchange.last_token = now

    def _end_of_connection(self, now: float) -> None:
        answer = self._answer
        if self.exchange.first_byte is None:
            self.stopped(Outcome.FAILED, "closed_without_answer")
        elif self._http.end_of_connection() or (answer is not None and answer.done):
            self._finish(now)
        else:
            streamed = answer is not None and answer.streamed
            self.stopped(Outcome.CUT_OFF, "eof_without_done" if streamed else "eof_in_body")

    def _finish(self, now: float) -> None:
        self.exchange.end = now
        if self._answer is not None:
            self._answer.end()
            self.exchange.outcome, self.exchange.error = _verdict(self._answer)
        self._take_answer()

    def _take_answer(self) -> None:
        if self._answer is not None:
            self.exchange.usage, self.exchange.text = self._answer.usage, self._answer.text


_OUTCOMES = {
    AnswerOutcome.COMPLETED: Outcome.COMPLETED,
    AnswerOutcome.REFUSED: Outcome.REFUSED,
    AnswerOutcome.REJECTED: Outcome.FAILED,
    AnswerOutcome.FAILED: Outcome.FAILED,
}
"""A plan's requests are legal, so one that the server rejects counts as failed."""


def _verdict(answer: Answer) -> tuple[Outcome, str]:
    outcome, error = _OUTCOMES[answer.outcome], answer.error
    if answer.status != 200:
        return outcome, f"http_{answer.status}: {error.text}" if error else f"http_{answer.status}"
    if error is not None:
        return outcome, f"error_in_200: {error.text}"
    return (outcome, "") if answer.complete else (Outcome.CUT_OFF, "eof_without_done")
