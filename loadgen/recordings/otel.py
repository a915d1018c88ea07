"""Reader of OTLP JSON with GenAI spans (`gen_ai.*` semantic conventions)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from prefixwatch.loadgen.recordings.fields import json_object, whole
from prefixwatch.loadgen.recordings.request import Lines, RecordedRequest

_ERROR_STATUS = (2, "STATUS_CODE_ERROR")


def otel(lines: Lines) -> Iterator[RecordedRequest]:
    """Chat and completion spans; spans of other kinds are skipped."""
    for line in lines:
        for resource in json_object(lines, line).get("resourceSpans", []):
            for scope in resource.get("scopeSpans", []):
                for span in scope.get("spans", []):
                    request = _span(lines, span)
                    if request is not None:
                        yield request


def _span(lines: Lines, span: Mapping[str, Any]) -> RecordedRequest | None:
    """A chat or completion span; None for any other."""
    attributes = {item.get("key"): _value(item.get("value", {})) for item in span.get("attributes", [])}
    prompt = whole(attributes.get("gen_ai.usage.input_tokens", attributes.get("gen_ai.usage.prompt_tokens")))
    messages = _genai_messages(attributes)
    if prompt is None and messages is None:
        return None
    start = whole(span.get("startTimeUnixNano"))
    if start is None:
        raise lines.error("a GenAI span has no startTimeUnixNano")
    output = attributes.get("gen_ai.usage.output_tokens", attributes.get("gen_ai.usage.completion_tokens"))
    return RecordedRequest(
        where=lines.where,
        arrival_s=start / 1e9,
        prompt_tokens=prompt,
        output_tokens=whole(output) or None,
        messages=messages,
        model=str(attributes.get("gen_ai.request.model") or ""),
        session=str(attributes.get("gen_ai.conversation.id") or attributes.get("session.id") or ""),
        tenant=str(attributes.get("tenant.id") or ""),
        failed=(span.get("status") or {}).get("code") in _ERROR_STATUS,
    )


def _value(value: Mapping[str, Any]) -> Any:
    """An OTLP AnyValue; OTLP's JSON writes numbers as texts."""
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
