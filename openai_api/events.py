"""One JSON object of an answer: an event of a stream, or a whole body.

`read_event` decodes by type, which is fast. What doesn't fit the types is decoded once more without them, and each
field is judged by itself: an absurd token count makes that count unknown and loses nothing else.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

MAX_TOKENS = 100_000_000
"""No count of an answer is higher: a larger one is an error of the engine, and would spoil every sum it enters."""
OVERLOAD_STATUSES = frozenset({429, 503})
_OVERLOAD_WORDS = ("overload", "rate_limit", "rate limit", "too many requests", "queue is full", "queue full",
                   "no capacity")  # fmt: skip
_MESSAGE_CHARACTERS = 200
_INT_DIGITS = 18

_BROKEN_OFF = frozenset({"abort", "aborted", "cancel", "cancelled", "canceled", "error", "timeout", "timed_out",
                         "network_error", "insufficient_system_resource"})  # fmt: skip
"""Finish reasons of answers that the server gave up, though their status is 200 and their stream ends in order."""

_Counts = TypeVar("_Counts", bound=msgspec.Struct)
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Delta(msgspec.Struct, gc=False):
    """The new part of a streamed choice, or the message of a whole one."""

    content: Any = None
    """Text, or a list of parts."""
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class PromptDetails(msgspec.Struct, gc=False):
    """What the prompt consisted of."""

    cached_tokens: _Count | None = None


class UsageFields(msgspec.Struct, gc=False):
    """The usage object as it is sent. Cached tokens are always among the prompt's here, under whichever name."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: PromptDetails | None = None
    cached_tokens: _Count | None = None
    prompt_cache_hit_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None

    @property
    def prompt(self) -> int | None:
        return self.input_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def output(self) -> int | None:
        return self.output_tokens if self.completion_tokens is None else self.completion_tokens

    @property
    def cached(self) -> int | None:
        details = self.prompt_tokens_details or self.input_tokens_details
        if details is not None and details.cached_tokens is not None:
            return details.cached_tokens
        others = (self.cached_tokens, self.prompt_cache_hit_tokens, self.cache_read_input_tokens)
        return next((tokens for tokens in others if tokens is not None), None)


class Timings(msgspec.Struct, gc=False):
    """llama.cpp's counts of one answer: `prompt_n` leaves out the `cache_n` tokens that it took from its cache."""

    cache_n: _Count | None = None
    prompt_n: _Count | None = None
    predicted_n: _Count | None = None

    def usage(self) -> UsageFields:
        cached, computed = self.cache_n, self.prompt_n
        prompt = None if cached is None or computed is None else cached + computed
        return UsageFields(prompt, self.predicted_n, cached_tokens=cached)


class Choice(msgspec.Struct, gc=False):
    """One choice of an event."""

    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    usage: UsageFields | None = None
    """Where some servers put that of the answer."""


class Event(msgspec.Struct, gc=False):
    """The fields of an event that matter here."""

    choices: list[Choice] | None = None
    usage: UsageFields | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None
    detail: Any = None
    timings: Timings | None = None

    @property
    def is_error(self) -> bool:
        """Whether it is an error in place of an answer: by its name, or because there is nothing but a message."""
        if self.error or self.object == "error":
            return True
        return self.choices is None and self.usage is None and bool(self.detail or self.message)


class AnswerError(NamedTuple):
    """An error object that a server sent in place of an answer, or in the middle of one."""

    message: str
    """At most 200 characters."""
    kind: str = ""
    """Its `type`."""
    code: int | None = None
    """An HTTP status, if the error names one."""
    overloaded: bool = False
    """The server refused for lack of capacity, by its code or in words."""

    @property
    def text(self) -> str:
        """Type and message."""
        return ": ".join(part for part in (self.kind, self.message) if part) or "error without a message"


class UnreadableEvent(Exception):
    """The bytes are not a JSON object of an answer."""


_decode = msgspec.json.Decoder(Event).decode


def read_event(data: bytes) -> Event:
    """Decode one event. Raises UnreadableEvent."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _by_field(data)


def content_text(content: Any) -> tuple[str, bool]:
    """The text of a `content` field, and whether it holds reasoning. Raises UnreadableEvent for other types."""
    if content is None or isinstance(content, str):
        return content or "", False
    if not isinstance(content, list):
        raise UnreadableEvent("content is neither text nor a list of parts")
    parts = [part for part in content if isinstance(part, dict)]
    texts = [str(part.get("text") or part.get("refusal") or "") for part in parts]
    return "".join(texts), any(part.get("thinking") or part.get("reasoning") for part in parts)


def error_of(event: Event) -> AnswerError | None:
    """The error of an event: `{"error": {…}}`, `{"error": "text"}`, vLLM's older `{"object": "error", …}`, or what
    is in an event of the name `error`: `{"message": …}`, `{"detail": …}`."""
    if not event.is_error:
        return None
    error = event.error or {"message": event.message or event.detail, "code": event.code}
    fields = error if isinstance(error, dict) else {"message": error}
    codes = (fields.get("code"), fields.get("status"), event.code)
    code = next((status for status in map(_status, codes) if status is not None), None)
    message, kind = _words(fields.get("message")), _words(fields.get("type"))
    said = " ".join((message, kind, *(text for text in codes if isinstance(text, str)))).lower()
    overloaded = code in OVERLOAD_STATUSES or any(word in said for word in _OVERLOAD_WORDS)
    return AnswerError(message, kind, code, overloaded)


def broken_off(reason: str) -> AnswerError | None:
    """The error of a choice that ended for this reason; None where it ended as an answer does."""
    if reason.lower() not in _BROKEN_OFF:
        return None
    return AnswerError(f"finish reason {reason}", overloaded=reason == "insufficient_system_resource")


def _by_field(data: bytes) -> Event:
    try:
        fields = json.loads(data.decode("utf-8", "replace"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise UnreadableEvent(str(error)) from None
    if not isinstance(fields, dict):
        raise UnreadableEvent("not a JSON object")
    choices, timings = fields.get("choices"), fields.get("timings")
    return Event(
        choices=[_choice(one) for one in choices if isinstance(one, dict)] if isinstance(choices, list) else None,
        usage=_usage(fields.get("usage")),
        timings=_counts(Timings, timings) if isinstance(timings, dict) else None,
        **{name: fields.get(name) for name in ("error", "object", "message", "code", "detail")},
    )


def _choice(fields: dict[str, Any]) -> Choice:
    text, reason = fields.get("text"), fields.get("finish_reason")
    if isinstance(reason, dict):
        reason = reason.get("type")
    return Choice(
        delta=_delta(fields.get("delta")),
        message=_delta(fields.get("message")),
        text=text if isinstance(text, str) else None,
        finish_reason=reason if isinstance(reason, str) else None,
        usage=_usage(fields.get("usage")),
    )


def _delta(fields: Any) -> Delta | None:
    return Delta(*map(fields.get, Delta.__struct_fields__)) if isinstance(fields, dict) else None


def _usage(fields: Any) -> UsageFields | None:
    if not isinstance(fields, dict):
        return None
    usage = _counts(UsageFields, fields)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = fields.get(name)
        setattr(usage, name, _counts(PromptDetails, details) if isinstance(details, dict) else None)
    return usage


def _counts(kind: type[_Counts], fields: dict[str, Any]) -> _Counts:
    return kind(*(_count(fields.get(name)) for name in kind.__struct_fields__))


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:
        return None
    return int(value) if value == int(value) else None


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _INT_DIGITS else math.inf


def _status(value: Any) -> int | None:
    text = str(value) if isinstance(value, int | str) else ""
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() and text >= "100" else None


def _words(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)[: 4 * _MESSAGE_CHARACTERS]
    return text[:_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode().strip()
