"""Readers of logged API requests and of whole conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prefixwatch.loadgen.recordings.conversation import ConversationError, conversation, functions, turns
from prefixwatch.loadgen.recordings.fields import first, json_object, moment, positive
from prefixwatch.loadgen.recordings.request import Lines, RecordedRequest
from prefixwatch.loadgen.recordings.token_ids import TOKEN_BLOCK, block_ids_of

_LONGEST_OUTPUT = (
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "output_tokens_count",
    "output_tokens",
    "output_length",
)
"""Fields that bound an answer's length; the last three are GuideLLM's and AIPerf's."""
HTTP_ERROR = 400


def openai(lines: Lines) -> Iterator[RecordedRequest]:
    """Requests of the chat, completions, Responses or Messages API; GuideLLM's rows of `prompt` are among them."""
    for line in lines:
        row = json_object(lines, line)
        body = next((row[key] for key in ("body", "request") if isinstance(row.get(key), dict)), row)
        yield request_of(lines, row, body)


def request_of(lines: Lines, row: Mapping[str, Any], body: Mapping[str, Any]) -> RecordedRequest:
    """One request with this body; `row` is what the log says around it. Raises DocumentError."""
    usage = _usage(row)
    output = next((body[key] for key in _LONGEST_OUTPUT if isinstance(body.get(key), int)), None)
    output = usage.get("completion_tokens") or usage.get("output_tokens") or output
    ids = token_prompt(body)
    if ids is not None:
        lines.block_tokens = TOKEN_BLOCK
    return RecordedRequest(
        where=lines.where,
        arrival_s=moment(lines, row, body),
        prompt_tokens=usage.get("prompt_tokens") if ids is None else len(ids),
        output_tokens=positive(output),
        block_ids=None if ids is None else block_ids_of(ids),
        messages=None if ids is not None else tuple(messages_of(lines, body)),
        tools=functions(body.get("tools")),
        tool_choice=body.get("tool_choice"),
        model=str(body.get("model") or ""),
        session=str(first(row, body, "session_id", "conversation_id", "session") or ""),
        tenant=str(first(row, body, "tenant", "user") or ""),
        salt=body.get("cache_salt"),
        failed=_failed(row),
    )


def token_prompt(body: Mapping[str, Any]) -> list[int] | None:
    """The prompt's token ids where the request has ids in place of a text."""
    prompt = body.get("prompt")
    ids = isinstance(prompt, list) and bool(prompt) and all(isinstance(item, int) for item in prompt)
    return prompt if ids else None


def conversations(lines: Lines) -> Iterator[RecordedRequest]:
    """Each message of a user is a request that carries what was said before; its answer has no recorded length."""
    for line in lines:
        row = json_object(lines, line)
        session = str(row.get("conversation_hash") or row.get("conversation_id") or row.get("id") or lines.where)
        began = moment(lines, row, row)
        for turn, messages in enumerate(turns(messages_of(lines, row))):
            yield RecordedRequest(
                where=lines.where,
                arrival_s=began if began is not None or turn else 0.0,
                prompt_tokens=None,
                output_tokens=None,
                messages=tuple(messages),
                model=str(row.get("model") or ""),
                session=session,
                delay_s=0.0 if turn else None,
            )


def messages_of(lines: Lines, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All messages of a request. Raises DocumentError."""
    try:
        return conversation(body)
    except ConversationError as error:
        raise lines.error(str(error)) from error


def _usage(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer's token counts, where the log has the answer too."""
    response = row.get("response")
    for place in (row, response, response.get("body") if isinstance(response, dict) else None):
        if isinstance(place, dict) and isinstance(place.get("usage"), dict):
            usage: Mapping[str, Any] = place["usage"]
            return usage
    return {}


def _failed(row: Mapping[str, Any]) -> bool:
    response = row.get("response")
    status = response.get("status_code") if isinstance(response, dict) else row.get("status_code", row.get("status"))
    return bool(row.get("error")) or (isinstance(status, int) and status >= HTTP_ERROR)
