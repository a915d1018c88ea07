"""The formats that recorded traffic comes in: how each is recognised, and its reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefixwatch.loadgen.recordings.api_logs import conversations, openai
from prefixwatch.loadgen.recordings.engine_logs import SGLANG_MARK, VLLM_MARK, sglang, vllm
from prefixwatch.loadgen.recordings.otel import otel
from prefixwatch.loadgen.recordings.request import Format, Lines, RecordedRequest
from prefixwatch.loadgen.recordings.tables import azure, burstgpt
from prefixwatch.loadgen.recordings.tool_inputs import aiperf, sessions
from prefixwatch.loadgen.recordings.traces import mooncake


@dataclass(frozen=True, slots=True)
class RecordedFormat:
    """A kind of file."""

    name: Format
    expects: str
    """In words, for messages."""
    read: Callable[[Lines], Iterator[RecordedRequest]]
    marks: tuple[frozenset[str], ...] = ()
    """Sets of keys or columns; a file whose first line has all of one set is of this format."""
    text_mark: re.Pattern[str] | None = None
    """In a log of plain text, a line of this format."""


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


FORMATS: dict[str, RecordedFormat] = {
    form.name: form
    for form in (
        RecordedFormat(
            "mooncake",
            "JSON lines with timestamp (ms), input_length, output_length, hash_ids; AIPerf's with session_id and "
            "delay, text_input, or lengths alone; chat trees with chat_id and parent_chat_id (seconds)",
            mooncake,
            (_keys("timestamp", "hash_ids"), _keys("input_length"), _keys("text_input")),
        ),
        RecordedFormat(
            "sessions",
            "JSON lines of sessions with turns, of text (AIPerf) or of input_tokens, output_tokens and tool_wait_s",
            sessions,
            (_keys("turns"),),
        ),
        RecordedFormat(
            "aiperf",
            "AIPerf's inputs: JSON lines with text or texts, or inputs.json with data",
            aiperf,
            (_keys("text"), _keys("texts"), _keys("data")),
        ),
        RecordedFormat(
            "conversations",
            "JSON conversations under conversation (WildChat) or conversations (ShareGPT)",
            conversations,
            (_keys("conversation"), _keys("conversations")),
        ),
        RecordedFormat("otel", "OTLP JSON with resourceSpans", otel, (_keys("resourceSpans"),)),
        RecordedFormat(
            "sglang",
            "SGLang's request log (--log-requests-level 3), as text or JSON lines",
            sglang,
            (_keys("event", "obj"),),
            SGLANG_MARK,
        ),
        RecordedFormat(
            "vllm", "vLLM's log (--enable-log-requests, VLLM_LOGGING_LEVEL=DEBUG)", vllm, text_mark=VLLM_MARK
        ),
        RecordedFormat(
            "openai",
            "JSON lines of requests of the chat, completions, Responses or Messages API, alone or under body; "
            "GuideLLM's rows with prompt",
            openai,
            tuple(_keys(key) for key in ("messages", "body", "request", "input", "prompt")),
        ),
        RecordedFormat(
            "azure",
            "a CSV table with TIMESTAMP, ContextTokens, GeneratedTokens",
            azure,
            (_keys("TIMESTAMP", "ContextTokens", "GeneratedTokens"),),
        ),
        RecordedFormat(
            "burstgpt",
            "a CSV table with Timestamp, Request tokens, Response tokens",
            burstgpt,
            (_keys("Timestamp", "Request tokens", "Response tokens"),),
        ),
    )
}
