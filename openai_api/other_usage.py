"""Token counts in answers of other formats: Anthropic's Messages, OpenAI's Responses, SGLang's own `/generate`.

Nothing else of them is read. Messages count cached tokens apart from `input_tokens`, the others among the prompt's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prefixwatch.openai_api.events import MAX_TOKENS
from prefixwatch.openai_api.sse import SseParser

_KEPT_BYTES = 2**20
"""Of an answer that isn't streamed; of a longer one nothing is known."""
_NAMES = (b'"usage"', b'"meta_info"')
_decode = msgspec.json.Decoder().decode

Counts = tuple[int | None, int | None, int | None]
"""Prompt, cached and output tokens."""


class OtherUsage:
    """Reads the counts from the bytes as they come."""

    def __init__(self, *, streamed: bool) -> None:
        self._parser = SseParser() if streamed else None
        self._body = bytearray()
        self._found: dict[str, int] = {}

    def feed(self, received: bytes) -> None:
        if self._parser is None:
            if len(self._body) <= _KEPT_BYTES:
                self._body += received[: _KEPT_BYTES + 1]
            return
        for event in self._parser.feed(received):
            self._read(event)

    def end(self) -> None:
        """The answer is over."""
        for event in [bytes(self._body)] if self._parser is None else self._parser.end():
            self._read(event)

    @property
    def counts(self) -> Counts:
        """What is known by now. A count that isn't given, or can't be true, is None."""
        found = self._found
        return found.get("prompt"), found.get("cached"), found.get("output")

    def _read(self, data: bytes) -> None:
        if len(data) > _KEPT_BYTES or not any(name in data for name in _NAMES):
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        for holder in (event, _inside(event, "message"), _inside(event, "response")):
            self._take(_inside(holder, "usage"))
            self._take(_inside(holder, "meta_info"))

    def _take(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        apart = [_count(usage.get(name)) for name in ("cache_read_input_tokens", "cache_creation_input_tokens")]
        prompt = _first(usage, "input_tokens", "prompt_tokens")
        cached = _first(usage, "cached_tokens")
        if cached is None:
            cached = _first(_inside(usage, "input_tokens_details"), "cached_tokens")
        if apart[0] is not None:
            cached = apart[0]
        if prompt is not None:
            prompt += sum(tokens for tokens in apart if tokens is not None)
        output = _first(usage, "output_tokens", "completion_tokens")
        counts = {"prompt": prompt, "cached": cached, "output": output}
        self._found |= {name: count for name, count in counts.items() if count is not None}


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
