"""Readers of the formats that recorded traffic comes in.

- mooncake: JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one for every 512
  tokens; Mooncake, FAST'25).
- openai: JSON lines of chat requests: a request body, alone or under `body` or `request` (as in OpenAI's batch files),
  with the time under `timestamp`, `time` or `created` (Unix seconds or milliseconds, or ISO 8601).
- azure: CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` (Azure LLM inference traces 2023 and 2024).
- burstgpt: CSV with `Timestamp` (s), `Request tokens`, `Response tokens` (BurstGPT).
- otel: OTLP JSON, one export a line; spans with GenAI attributes (`gen_ai.*` semantic conventions).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from loadgen.recorded import Format, Lines, RecordedRequest

MOONCAKE_BLOCK_TOKENS = 512
_LONG_FRACTION = re.compile(r"(\.\d{6})\d+")
_MILLISECONDS_FROM = 1e11
"""A Unix time above this is in milliseconds (as seconds it would lie after the year 5000)."""


@dataclass(frozen=True, slots=True)
class RecordedFormat:
    name: Format
    expects: str
    """In words, for messages."""
    marks: tuple[frozenset[str], ...]
    """Sets of keys or columns; a file whose first line has all of one set is of this format."""
    read: Callable[[Lines], Iterator[RecordedRequest]]
    block_tokens: int | None = None


def _mooncake(lines: Lines) -> Iterator[RecordedRequest]:
    for line in lines:
        row = _object(lines, line)
        prompt = _count(lines, row, "input_length")
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(item, int) and item >= 0 for item in ids):
            raise lines.error("hash_ids must be a list of whole numbers from 0 on")
        expected = -(-prompt // MOONCAKE_BLOCK_TOKENS)
        if len(ids) != expected:
            raise lines.error(
                f"{len(ids)} hash_ids for input_length {prompt}: expected {expected}, one for every "
                f"{MOONCAKE_BLOCK_TOKENS} tokens"
            )
        yield RecordedRequest(
            where=lines.where,
            arrival_s=_number(lines, row, "timestamp") / 1000,
            prompt_tokens=prompt,
            output_tokens=_count(lines, row, "output_length"),
            block_ids=tuple(ids),
        )


def _openai(lines: Lines) -> Iterator[RecordedRequest]:
    for line in lines:
        row = _object(lines, line)
        body = next((row[key] for key in ("body", "request") if isinstance(row.get(key), dict)), row)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise lines.error("no messages: a line is a chat request with a list of {role, content} under messages")
        usage = _usage(row)
        output = usage.get("completion_tokens") or body.get("max_completion_tokens") or body.get("max_tokens")
        yield RecordedRequest(
            where=lines.where,
            arrival_s=_time(lines, row, body),
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=output if isinstance(output, int) and output > 0 else None,
            messages=tuple(messages),
            tools=body.get("tools"),
            tool_choice=body.get("tool_choice"),
            model=str(body.get("model") or ""),
            session=str(_first(row, body, "session_id", "conversation_id", "session") or ""),
            tenant=str(_first(row, body, "tenant", "user") or ""),
            salt=body.get("cache_salt"),
        )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _usage(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer's token counts, where the log has the answer too."""
    response = row.get("response")
    for place in (row, response, response.get("body") if isinstance(response, dict) else None):
        if isinstance(place, dict) and isinstance(place.get("usage"), dict):
            usage: Mapping[str, Any] = place["usage"]
            return usage
    return {}


def _time(lines: Lines, row: Mapping[str, Any], body: Mapping[str, Any]) -> float | None:
    value = _first(row, body, "timestamp", "time", "created_at", "created", "ts")
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return _iso_seconds(value)
        except ValueError as error:
            raise lines.error(f"time {value!r} is neither Unix seconds nor ISO 8601") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise lines.error(f"time {value!r} is neither Unix seconds nor ISO 8601")
    return value / 1000 if value > _MILLISECONDS_FROM else float(value)


def _first(row: Mapping[str, Any], body: Mapping[str, Any], *keys: str) -> Any:
    metadata = body.get("metadata") if isinstance(body.get("metadata"), dict) else {}
    assert isinstance(metadata, dict)
    return next((place[key] for key in keys for place in (row, body, metadata) if place.get(key) is not None), None)


def _azure(lines: Lines) -> Iterator[RecordedRequest]:
    for row in _table(lines):
        try:
            arrival_s = _iso_seconds(row["TIMESTAMP"])
        except ValueError as error:
            raise lines.error(f"TIMESTAMP {row['TIMESTAMP']!r} is no date and time") from error
        yield RecordedRequest(
            lines.where, arrival_s, _cell(lines, row, "ContextTokens"), _output(lines, row, "GeneratedTokens")
        )


def _burstgpt(lines: Lines) -> Iterator[RecordedRequest]:
    for row in _table(lines):
        prompt, output = _cell(lines, row, "Request tokens"), _output(lines, row, "Response tokens")
        try:
            arrival_s = float(row["Timestamp"])
        except ValueError as error:
            raise lines.error(f"Timestamp {row['Timestamp']!r} is no number of seconds") from error
        session = (row.get("Session ID") or "").strip()
        yield RecordedRequest(lines.where, arrival_s, prompt, output, session=session)


def _otel(lines: Lines) -> Iterator[RecordedRequest]:
    for line in lines:
        for resource in _object(lines, line).get("resourceSpans", []):
            for scope in resource.get("scopeSpans", []):
                for span in scope.get("spans", []):
                    request = _span(lines, span)
                    if request is not None:
                        yield request


def _span(lines: Lines, span: Mapping[str, Any]) -> RecordedRequest | None:
    """A chat or completion span; None for any other."""
    attributes = {item.get("key"): _value(item.get("value", {})) for item in span.get("attributes", [])}
    prompt = _whole(attributes.get("gen_ai.usage.input_tokens", attributes.get("gen_ai.usage.prompt_tokens")))
    messages = _genai_messages(attributes)
    if prompt is None and messages is None:
        return None
    start = _whole(span.get("startTimeUnixNano"))
    if start is None:
        raise lines.error("a GenAI span has no startTimeUnixNano")
    output = attributes.get("gen_ai.usage.output_tokens", attributes.get("gen_ai.usage.completion_tokens"))
    return RecordedRequest(
        where=lines.where,
        arrival_s=start / 1e9,
        prompt_tokens=prompt,
        output_tokens=_whole(output) or None,
        messages=messages,
        model=str(attributes.get("gen_ai.request.model") or ""),
        session=str(attributes.get("gen_ai.conversation.id") or attributes.get("session.id") or ""),
        tenant=str(attributes.get("tenant.id") or ""),
    )


def _value(value: Mapping[str, Any]) -> Any:
    """An OTLP AnyValue; numbers come as texts in OTLP's JSON."""
    for key in ("stringValue", "intValue", "doubleValue", "boolValue"):
        if key in value:
            return value[key]
    return None


def _genai_messages(attributes: Mapping[Any, Any]) -> tuple[dict[str, Any], ...] | None:
    """System instructions and input messages: JSON of {role, parts: [{type: text, content}]}."""
    text = attributes.get("gen_ai.input.messages")
    if not isinstance(text, str):
        return None
    try:
        messages = [*_system(attributes), *json.loads(text)]
        return tuple({"role": str(m["role"]), "content": _content(m)} for m in messages)
    except (ValueError, KeyError, TypeError):
        return None


def _system(attributes: Mapping[Any, Any]) -> list[dict[str, Any]]:
    text = attributes.get("gen_ai.system_instructions")
    return [{"role": "system", "parts": json.loads(text)}] if isinstance(text, str) else []


def _content(message: Mapping[str, Any]) -> str:
    if isinstance(message.get("content"), str):
        return str(message["content"])
    return "".join(str(part.get("content") or part.get("text") or "") for part in message.get("parts", []))


def _object(lines: Lines, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise lines.error(f"not a JSON object in one line: {error}") from error
    if not isinstance(row, dict):
        raise lines.error("not a JSON object")
    return row


def _number(lines: Lines, row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise lines.error(f"{key} must be a number from 0 on, got {value!r}")
    return float(value)


def _count(lines: Lines, row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise lines.error(f"{key} must be a whole number from 1 on, got {value!r}")
    return value


def _table(lines: Lines) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(iter(lines))
    for row in reader:
        if None in row or None in row.values():
            raise lines.error(f"has another number of columns than the header: {', '.join(reader.fieldnames or ())}")
        yield row


def _cell(lines: Lines, row: Mapping[str, str], key: str, least: int = 1) -> int:
    value = _whole(row.get(key))
    if value is None or value < least:
        raise lines.error(f"{key} must be a whole number from {least} on, got {row.get(key)!r}: is the header right?")
    return value


def _output(lines: Lines, row: Mapping[str, str], key: str) -> int:
    """Failed requests of these data sets have no answer; they were sent all the same, and get one of a token."""
    return max(1, _cell(lines, row, key, least=0))


def _whole(value: Any) -> int | None:
    """A whole number, also as text ("120", "120.0"); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)  # nanoseconds since 1970 are more than a float holds exactly
    return int(number) if number.is_integer() else None


def _iso_seconds(text: str) -> float:
    """Seconds since 1970, UTC where no zone is given. Azure writes seven digits of a second, Python reads six."""
    moment = datetime.fromisoformat(_LONG_FRACTION.sub(r"\1", text.strip()))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


FORMATS: dict[str, RecordedFormat] = {
    form.name: form
    for form in (
        RecordedFormat(
            "mooncake",
            "JSON lines with timestamp (ms), input_length, output_length, hash_ids",
            (frozenset({"timestamp", "hash_ids"}), frozenset({"input_length"})),
            _mooncake,
            MOONCAKE_BLOCK_TOKENS,
        ),
        RecordedFormat(
            "otel",
            "OTLP JSON lines with resourceSpans",
            (frozenset({"resourceSpans"}),),
            _otel,
        ),
        RecordedFormat(
            "openai",
            "JSON lines of chat requests with messages, alone or under body",
            (frozenset({"messages"}), frozenset({"body"}), frozenset({"request"})),
            _openai,
        ),
        RecordedFormat(
            "azure",
            "a CSV table with TIMESTAMP, ContextTokens, GeneratedTokens",
            (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),),
            _azure,
        ),
        RecordedFormat(
            "burstgpt",
            "a CSV table with Timestamp, Request tokens, Response tokens",
            (frozenset({"Timestamp", "Request tokens", "Response tokens"}),),
            _burstgpt,
        ),
    )
}
