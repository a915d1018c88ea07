"""Watching an answer go by: first content, usage, errors and the end, without touching a byte of it.

Until the first content every event is parsed; afterwards only those that mention usage, an error or the end.
Quotes inside JSON strings are escaped, so generated text can't look like one of those keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: Any = None

    def has_content(self) -> bool:
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls))
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None


_decode = msgspec.json.Decoder(_Answer).decode
_TELLING = (b'"usage"', b'"error"', b"[DONE]")


@dataclass(frozen=True, slots=True)
class EngineError:
    """An error object that an engine sent. `code` is an HTTP status where it gave one."""

    message: str
    code: int | None

    @property
    def overload(self) -> bool:
        return self.code in (429, 503)


class AnswerWatch:
    """What an answer has told so far. Tokens are None until reported, and stay so when they never are."""

    def __init__(self) -> None:
        self.content_seen = False
        self.done = False
        self.error: EngineError | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self._rest = b""

    @property
    def inside_event(self) -> bool:
        """The bytes so far end within a line."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> None:
        """The next bytes of a stream, cut anywhere."""
        data = self._rest + chunk if self._rest else chunk
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if self.content_seen and not any(word in data for word in _TELLING):
            return
        for line in data[:end].split(b"\n"):
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def whole(self, body: bytes) -> None:
        """A complete answer that wasn't streamed."""
        self._event(body)
        self.done = True

    def _event(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            answer = _decode(payload)
        except msgspec.DecodeError:
            return  # not an answer we know; it is the client's to judge
        if answer.usage is not None:
            self._usage(answer.usage)
        if answer.error is not None or answer.object == "error":
            self.error = _engine_error(answer)
        if not self.content_seen:
            self.content_seen = any(choice.has_content() for choice in answer.choices)

    def _usage(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _engine_error(answer: _Answer) -> EngineError:
    fields = answer.error if isinstance(answer.error, dict) else {"message": answer.error or answer.message}
    code = fields.get("code", answer.code)
    numeric = int(code) if isinstance(code, int) or (isinstance(code, str) and code.isdecimal()) else None
    return EngineError(str(fields.get("message") or "unnamed error"), numeric)
