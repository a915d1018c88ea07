"""Token counts and errors in answers of other formats: Anthropic's Messages, OpenAI's Responses, SGLang's own
`/generate`.

Nothing else of them is read. Messages count cached tokens apart from `input_tokens`, the others among the prompt's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prefixwatch.openai_api.events import MAX_TOKENS, AnswerError, Event, broken_off, error_of
from prefixwatch.openai_api.sse import SseParser, looks_like_events

_KEPT_BYTES = 2**20
"""Of an answer that isn't streamed; of a longer one nothing is known."""
_OPENINGS = frozenset({"message_start", "response.created"})
_ENDINGS = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
_NAMES = tuple(f'"{name}"'.encode() for name in ("usage", "meta_info", "error", *_OPENINGS, *_ENDINGS))
"""What an event has that is read. Within a text the second quotation mark is escaped."""
_NOT_ENDED = AnswerError("the stream ended before its last event")
_decode = msgspec.json.Decoder().decode

Counts = tuple[int | None, int | None, int | None]
"""Prompt, cached and output tokens."""


class OtherUsage:
    """Reads the counts and errors from the bytes as they come."""

    def __init__(self, *, streamed: bool) -> None:
        self._parser = SseParser() if streamed else None
        self._body = bytearray()
        self._found: dict[str, int] = {}
        self._open = False
        """A stream of a format that has a last event is before it."""
        self.error: AnswerError | None = None
        """The first one, in whichever form it came; or that the last event is missing."""

    def feed(self, received: bytes) -> None:
        if self._parser is None:
            if len(self._body) <= _KEPT_BYTES:
                self._body += received[: _KEPT_BYTES + 1]
            return
        for event in self._parser.feed(received):
            self._read(event)

    def end(self) -> None:
        """The answer is over."""
        body = bytes(self._body)
        if self._parser is None and looks_like_events(body):  # its header didn't say so
            self._parser = SseParser()
        for event in [body] if self._parser is None else self._parser.feed(body) + self._parser.end():
            self._read(event)
        if self._open:
            self.error = self.error or _NOT_ENDED

    @property
    def counts(self) -> Counts:
        """What is known by now. A count that isn't given, or can't be true, is None."""
        found = self._found
        prompt = found.get("prompt")
        if prompt is not None:
            prompt += found.get("read", 0) + found.get("written", 0)
        return prompt, found.get("read", found.get("cached")), found.get("output")

    def _read(self, data: bytes) -> None:
        if len(data) > _KEPT_BYTES or not any(name in data for name in _NAMES):
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        kind = _inside(event, "type")
        if kind in _OPENINGS or kind in _ENDINGS:
            self._open = kind in _OPENINGS
        self.error = self.error or _error(event)
        for holder in (event, _inside(event, "message"), _inside(event, "response")):
            self._take(_inside(holder, "usage"))
            self._take(_inside(holder, "meta_info"))

    def _take(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        cached = _first(usage, "cached_tokens")
        if cached is None:
            cached = _first(_inside(usage, "input_tokens_details"), "cached_tokens")
        counts = {
            "prompt": _first(usage, "input_tokens", "prompt_tokens"),
            "read": _count(usage.get("cache_read_input_tokens")),
            "written": _count(usage.get("cache_creation_input_tokens")),
            "cached": cached,
            "output": _first(usage, "output_tokens", "completion_tokens"),
        }
        self._found |= {name: count for name, count in counts.items() if count is not None}


def _error(event: Any) -> AnswerError | None:
    """Of an event, or of a whole answer, that says it failed."""
    reason = _inside(_inside(event, "meta_info"), "finish_reason")
    if isinstance(reason, dict):
        ended = broken_off(str(reason.get("type")))
        told = {"message": reason.get("message") or ended.message, "code": reason.get("status_code")} if ended else None
        return error_of(Event(error=told))
    if _inside(event, "type") == "error":
        return error_of(Event(error=_inside(event, "error") or event))
    answer = event if _inside(event, "response") is None else _inside(event, "response")
    if _inside(answer, "status") in ("failed", "cancelled"):
        return error_of(Event(error=_inside(answer, "error") or f"status {answer['status']}"))
    return error_of(Event(error=_inside(event, "error")))


def _inside(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _first(values: Any, *names: str) -> int | None:
    found = (_count(_inside(values, name)) for name in names)
    return next((count for count in found if count is not None), None)


def _count(value: Any) -> int | None:
    return (
        value
        if isinstance(value, int) and value is not True and value is not False and 0 <= value <= MAX_TOKENS
        else None
    )
