"""One JSON object of an answer: an event of a stream, or a whole body.

`read_event` decodes by type, which is fast. What doesn't fit the types is decoded once more without them, and each
field is judged by itself: an absurd token count makes that count unknown and loses nothing else.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, NamedTuple

import msgspec

MAX_TOKENS = 100_000_000
"""No count of an answer is higher: a larger one is an error of the engine, and would spoil every sum it enters."""
OVERLOAD_STATUSES = frozenset({429, 503})
_OVERLOAD_WORDS = ("overload", "rate_limit", "rate limit", "too many requests", "queue is full", "queue full",
                   "no capacity")  # fmt: skip
_MESSAGE_CHARACTERS = 200
_INT_DIGITS = 18

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


class Choice(msgspec.Struct, gc=False):
    """One choice of an event."""

    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, gc=False):
    """What the prompt consisted of."""

    cached_tokens: _Count | None = None


class UsageFields(msgspec.Struct, gc=False):
    """The usage object as it is sent."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct, gc=False):
    """The fields of an event that matter here."""

    choices: list[Choice] | None = None
    usage: UsageFields | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None


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
    """The error of an event: `{"error": {…}}`, `{"error": "text"}`, or vLLM's older `{"object": "error", …}`."""
    if not event.error and event.object != "error":
        return None
    error = event.error or {"message": event.message, "code": event.code}
    fields = error if isinstance(error, dict) else {"message": error}
    codes = (fields.get("code"), fields.get("status"), event.code)
    code = next((status for status in map(_status, codes) if status is not None), None)
    message, kind = _words(fields.get("message")), _words(fields.get("type"))
    said = " ".join((message, kind, *(text for text in codes if isinstance(text, str)))).lower()
    overloaded = code in OVERLOAD_STATUSES or any(word in said for word in _OVERLOAD_WORDS)
    return AnswerError(message, kind, code, overloaded)


def _by_field(data: bytes) -> Event:
    try:
        fields = json.loads(data.decode("utf-8", "replace"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise UnreadableEvent(str(error)) from None
    if not isinstance(fields, dict):
        raise UnreadableEvent("not a JSON object")
    choices, usage = fields.get("choices"), fields.get("usage")
    return Event(
        choices=[_choice(one) for one in choices if isinstance(one, dict)] if isinstance(choices, list) else None,
        usage=_usage(usage) if isinstance(usage, dict) else None,
        **{name: fields.get(name) for name in ("error", "object", "message", "code")},
    )


def _choice(fields: dict[str, Any]) -> Choice:
    text, reason = fields.get("text"), fields.get("finish_reason")
    return Choice(
        delta=_delta(fields.get("delta")),
        message=_delta(fields.get("message")),
        text=text if isinstance(text, str) else None,
        finish_reason=reason if isinstance(reason, str) else None,
    )


def _delta(fields: Any) -> Delta | None:
    return Delta(*map(fields.get, Delta.__struct_fields__)) if isinstance(fields, dict) else None


def _usage(fields: dict[str, Any]) -> UsageFields:
    details = fields.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, output = _count(fields.get("prompt_tokens")), _count(fields.get("completion_tokens"))
    return UsageFields(prompt, output, PromptDetails(_count(cached)))


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
