"""What the events of an OpenAI-compatible stream mean: content, usage, an error, the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from loadgen.sse import DONE

OVERLOAD_CODES = frozenset({429, 503})
_OVERLOAD_WORDS = ("overload", "rate_limit", "rate limit", "too many requests", "queue is full", "no capacity")


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """Token counts as the engine reports them; what it leaves out is None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None
    code: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class ChatStream:
    """The state of one stream, event by event.

    A role-only or empty delta is not content; a usage-only event has no choices and may stand anywhere.
    """

    __slots__ = ("done", "error", "error_code", "usage")

    def __init__(self) -> None:
        self.done = False
        """`[DONE]` was seen."""
        self.usage: Usage | None = None
        self.error = ""
        """The error the stream carried, in a few words."""
        self.error_code: int | None = None

    def event(self, data: bytes) -> bool:
        """Take in one event; True if it brought content, reasoning or a tool call."""
        if data == DONE:
            self.done = True
            return False
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.error = self.error or f"unreadable event: {error}"
            return False
        if event.usage is not None:
            self.usage = event.usage
        if event.error or event.object == "error":
            self._take_error(event.error or {"message": event.message, "code": event.code})
            return False
        return any(map(_has_content, event.choices or ()))

    def body(self, body: bytes) -> None:
        """Take in a whole JSON body: an answer that wasn't streamed, or an error."""
        try:
            event = _decode_event(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.error = body[:120].decode("utf-8", "replace").strip()
            return
        self.usage = event.usage
        self.done = event.choices is not None
        if event.error or event.object == "error" or not self.done:
            self._take_error(event.error or {"message": event.message, "code": event.code})

    @property
    def overloaded(self) -> bool:
        """Whether the error is a refusal for want of capacity."""
        text = self.error.lower()
        return self.error_code in OVERLOAD_CODES or any(word in text for word in _OVERLOAD_WORDS)

    def _take_error(self, error: Any) -> None:
        fields = error if isinstance(error, dict) else {"message": str(error)}
        code = fields.get("code")
        if isinstance(code, int) or (isinstance(code, str) and code.isdigit()):
            self.error_code = int(code)
        words = [str(fields[key]) for key in ("type", "message") if fields.get(key)]
        self.error = ": ".join(words)[:200] or "error without a message"


def content_of(events: Iterable[bytes]) -> str:
    """The answer's text, from the events that brought content; reasoning and tool calls are left out."""
    choices = (choice for event in events for choice in _decode_event(event).choices or ())
    return "".join(choice.delta.content or "" if choice.delta else choice.text or "" for choice in choices)


def _has_content(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
