"""One answer of a chat or completion endpoint: what it brought, what it reported, and how it ended.

The router, the load generator, the prober and the preflight all read answers through this class, so an answer has
the same outcome everywhere.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple

from prefixwatch.openai_api.events import (
    OVERLOAD_STATUSES,
    AnswerError,
    Choice,
    Event,
    UnreadableEvent,
    UsageFields,
    broken_off,
    content_text,
    error_of,
    read_event,
)
from prefixwatch.openai_api.other_usage import OtherUsage
from prefixwatch.openai_api.sse import MAX_EVENT_BYTES, SseParser, looks_like_events

MAX_BODY_BYTES = MAX_EVENT_BYTES
"""The most that is kept of an answer that isn't streamed."""
_DONE = b"[DONE]"
_SHOWN_BODY_CHARACTERS = 120
_NO_CHOICES = "an answer without choices"


class AnswerOutcome(StrEnum):
    """How an answer ended, as far as the server decides it."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """For lack of capacity: status 429 or 503, or such an error inside a 200."""
    REJECTED = "rejected"
    """The request was at fault: any other 4xx."""
    FAILED = "failed"


class Content(IntEnum):
    """What some bytes of an answer brought. Role, usage and empty deltas are not content."""

    NONE = 0
    REASONING = 1
    ANSWER = 2
    """Text, a refusal, audio or a tool call."""


_NONE, _REASONING, _ANSWER = Content


class Usage(NamedTuple):
    """Token counts as the server reports them. What it leaves out, or can't be true, is None."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def uncached_tokens(self) -> int | None:
        """Prompt tokens that were computed for this request; None where either count isn't known."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return max(0, self.prompt_tokens - self.cached_tokens)


UNREPORTED = Usage()


def is_event_stream(content_type: str) -> bool:
    """Whether a Content-Type header announces server-sent events."""
    return content_type.partition(";")[0].strip().lower() == "text/event-stream"


def outcome_of_status(status: int) -> AnswerOutcome:
    """What the HTTP status says of a chat or completion: only a 200 carries an answer."""
    if status == 200:
        return AnswerOutcome.COMPLETED
    if status in OVERLOAD_STATUSES:
        return AnswerOutcome.REFUSED
    return AnswerOutcome.REJECTED if 400 <= status < 500 else AnswerOutcome.FAILED


class Answer:
    """Takes the bytes of one HTTP body as they come, cut anywhere; `end` when the body ended in order.

    Time is linear in the bytes, and at most MAX_EVENT_BYTES are kept.
    """

    __slots__ = (
        "_body",
        "_ended",
        "_opaque",
        "_other",
        "_parser",
        "_texts",
        "_undecided",
        "content",
        "done",
        "error",
        "events",
        "finished",
        "first_content",
        "status",
        "streamed",
        "usage",
    )

    def __init__(
        self,
        status: int = 200,
        content_type: str = "text/event-stream",
        *,
        keep_text: bool = False,
        opaque: bool = False,
        other_usage: bool = False,
    ) -> None:
        """`opaque`: another format than that of chats and completions; with `other_usage` its token counts
        and errors are read."""
        self.status = status
        self._opaque = opaque and status == 200
        """Its end completes it."""
        self._other = OtherUsage(streamed=is_event_stream(content_type)) if self._opaque and other_usage else None
        self.streamed = self._opaque or (status == 200 and is_event_stream(content_type))
        self._undecided = not self.streamed and status == 200
        """Whether the body is an event stream though its header doesn't say so."""
        self.content = _NONE
        """The most that has come so far: ANSWER once any of the answer proper came."""
        self.done = False
        """`[DONE]` was read, or a whole body."""
        self.finished = False
        """The latest choice gave a finish reason."""
        self.error: AnswerError | None = None
        """The first error, in whichever form it came."""
        self.usage = UNREPORTED
        """The latest value of each figure."""
        self.events = 0
        self.first_content = b""
        """The event that brought the first content, as received."""
        self._texts: list[str] | None = [] if keep_text else None
        self._parser = SseParser()
        self._body = bytearray()
        self._ended = False

    def feed(self, received: bytes) -> Content:
        """Take in the next bytes; returns the most that they brought."""
        if self._opaque:
            if self._other is not None:
                self._other.feed(received)
                self._take_over(self._other)
            return _NONE
        if not self.streamed:
            if len(self._body) <= MAX_BODY_BYTES:
                self._body += received[: MAX_BODY_BYTES + 1]
            found = looks_like_events(bytes(self._body[:_SHOWN_BODY_CHARACTERS])) if self._undecided else False
            self._undecided, self.streamed = found is None, bool(found)
            if not found:
                return _NONE
            received = bytes(self._body)
            self._body.clear()
        brought = _NONE
        events = self._parser.feed(received)
        for data in events:
            content = self._event(data)
            if content > brought:  # noqa: PLR1730  # once a token: max() takes a fifth of the time of all the rest
                brought = content
        if not events and self._parser.too_long and self.error is None:
            self.error = AnswerError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return brought

    def end(self) -> None:
        """The body ended in order: its framing says that nothing is missing."""
        if self._ended:
            return
        self._ended = True
        if self._other is not None:
            self._other.end()
            self._take_over(self._other)
        self.done = self.done or (self._opaque and self.error is None)
        if not self.streamed:
            self._whole(bytes(self._body))
            self._body.clear()
            return
        for data in self._parser.end():
            if not self.done and not _is_cut(data):
                self._event(data)

    @property
    def complete(self) -> bool:
        """Nothing is missing: `[DONE]` came, or the last choice was finished when the body ended in order."""
        return self.done or (self.finished and self._ended)

    @property
    def inside_event(self) -> bool:
        """The bytes so far end within an event."""
        return self._parser.incomplete

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and tool calls; empty unless it was to be kept."""
        return "".join(self._texts or ()).encode("utf-8", "replace").decode()

    @property
    def outcome(self) -> AnswerOutcome:
        """How it ended. An answer that isn't complete has failed."""
        if self.status != 200:
            return outcome_of_status(self.status)
        if self.error is not None:
            return AnswerOutcome.REFUSED if self.error.overloaded else AnswerOutcome.FAILED
        return AnswerOutcome.COMPLETED if self.complete else AnswerOutcome.FAILED

    def _take_over(self, other: OtherUsage) -> None:
        self.usage, self.error = Usage(*other.counts), other.error

    def _event(self, data: bytes) -> Content:
        """Take in one event; nothing counts after `[DONE]`. Runs once a token: the common case comes first."""
        self.events += 1
        if self.done:
            return _NONE
        if data[:6] == _DONE:
            self._done()
            return _NONE
        brought = _NONE
        try:
            event = read_event(data)
            if (event.choices is None or event.error or event.object == "error") and event.is_error:
                self.error = self.error or error_of(event)
                return _NONE
            self._figures(event)
            for choice in event.choices or ():
                delta = choice.delta
                if delta is not None and delta.content.__class__ is str and delta.content and self._texts is None:
                    content = _ANSWER
                else:
                    content = self._choice(choice)
                if content > brought:  # noqa: PLR1730  # as above
                    brought = content
                if choice.finish_reason:
                    self._ends(choice, choice.finish_reason)
                elif content:
                    self.finished = False
        except UnreadableEvent as error:
            if data.strip():  # servers send empty events to keep a connection open
                self.error = self.error or AnswerError(f"unreadable event: {error}")
            return _NONE
        if brought > self.content:
            self.first_content = self.first_content or data
            self.content = brought
        return brought

    def _choice(self, choice: Choice) -> Content:
        delta = choice.delta or choice.message
        if delta is None:
            text, reasoning, other = choice.text or "", False, None
        else:
            text, reasoning = content_text(delta.content)
            reasoning = reasoning or bool(delta.reasoning_content or delta.reasoning)
            other = delta.tool_calls or delta.refusal or delta.function_call or delta.audio
        if text and self._texts is not None:
            self._texts.append(text)
        if text or other:
            return _ANSWER
        return _REASONING if reasoning else _NONE

    def _done(self) -> None:
        self.done = True
        if not (self.content or self.finished or self.error):
            self.error = AnswerError(_NO_CHOICES)

    def _figures(self, event: Event) -> None:
        """What the event counts; usage has the last word."""
        if event.timings is not None:
            self._report(event.timings.usage())
        if event.usage is not None:
            self._report(event.usage)

    def _ends(self, choice: Choice, reason: str) -> None:
        self.finished = True
        self.error = self.error or broken_off(reason)
        if choice.usage is not None:
            self._report(choice.usage)

    def _report(self, usage: UsageFields) -> None:
        before, (prompt, cached, output) = self.usage, (usage.prompt, usage.cached, usage.output)
        self.usage = Usage(
            before.prompt_tokens if prompt is None else prompt,
            before.cached_tokens if cached is None else cached,
            before.output_tokens if output is None else output,
        )

    def _whole(self, body: bytes) -> None:
        if len(body) > MAX_BODY_BYTES:
            self.error = AnswerError(f"an answer of more than {MAX_BODY_BYTES} bytes")
            return
        try:
            event = read_event(body)
            self.error = error_of(event)
            self._figures(event)
            for choice in event.choices or ():
                self.content = max(self.content, self._choice(choice))
                if choice.finish_reason:
                    self._ends(choice, choice.finish_reason)
        except UnreadableEvent:
            shown = body[: 4 * _SHOWN_BODY_CHARACTERS].decode("utf-8", "replace").strip()[:_SHOWN_BODY_CHARACTERS]
            self.error = AnswerError(shown) if shown else None
            event = None
        if self.error is None and self.status == 200 and (event is None or not event.choices):
            self.error = AnswerError(_NO_CHOICES)
        self.done = self.error is None


def _is_cut(data: bytes) -> bool:
    """Whether the last event of a stream, which lacks its empty line, lacks more than that."""
    if data.startswith(_DONE):
        return False
    try:
        read_event(data)
    except UnreadableEvent:
        return True
    return False
