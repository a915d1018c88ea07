"""The prompt of a recorded request of any API, as one conversation in the chat form; no part of it is dropped.

A prompt is in `messages`, `input` (Responses), `prompt` (completions, request logs of engines) or `text_input`, and
`system` (Messages API) or `instructions` (Responses) come before it. A part that no chat has, such as a tool's result
in the Messages API, is carried as text at its place; images, audio and files stay parts of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Message = dict[str, Any]

LEADING = ("system", "instructions")
"""Fields whose text is in front of the conversation."""
PROMPTS = ("messages", "input", "prompt", "text_input", "conversation", "conversations")
"""Fields that hold the conversation itself; a request has one of them."""

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "model": "assistant", "developer": "system"}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MEDIA = ("image", "image_url", "input_image", "document", "file", "input_file", "input_audio", "audio", "video_url")


class ConversationError(ValueError):
    """The request's prompt can't be read whole; the message says which part."""


def conversation(body: Mapping[str, Any]) -> list[Message]:
    """All messages of a request, in order. Raises ConversationError."""
    present = [name for name in PROMPTS if body.get(name)]
    if len(present) > 1:
        raise ConversationError(f"has a prompt in {' and in '.join(present)}: keep the one that was sent")
    if not present:
        raise ConversationError("no messages: a line is a chat request with a list of {role, content} under messages")
    messages = [_message({"role": "system", "content": body[name]}) for name in LEADING if body.get(name)]
    prompt = body[present[0]]
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise ConversationError(f"{present[0]} is neither a text nor a list of messages")
    if all(isinstance(item, int) for item in prompt):
        raise ConversationError(f"{present[0]} holds token ids: give a log with texts, or a trace with hash_ids")
    return [*messages, *(message for item in prompt for message in _messages(item))]


def functions(tools: Any) -> Any:
    """Tools in the chat form: a function with its schema under `parameters`."""
    if not isinstance(tools, list):
        return tools
    return [_function(tool) if isinstance(tool, dict) else tool for tool in tools]


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in tool or "name" not in tool:
        return tool
    kept = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {
        "type": "function",
        "function": {**kept, "parameters": tool.get("parameters", tool.get("input_schema", {}))},
    }


def _messages(item: Any) -> Iterator[Message]:
    """An item of a conversation; one with tool results becomes several messages."""
    if isinstance(item, str):
        yield {"role": "user", "content": item}
        return
    if not isinstance(item, dict):
        raise ConversationError(f"a message is {str(item)[:40]!r}, not a map of role and content")
    if "from" in item:
        yield {"role": _role(item["from"]), "content": str(item.get("value") or "")}
    elif "role" in item:
        yield _message(item)
    elif "type" in item:  # an item of the Responses API: a function call, its output, reasoning
        role = "tool" if str(item["type"]).endswith("_output") else "assistant"
        kept = {key: value for key, value in item.items() if key not in ("id", "status")}
        yield {"role": role, "content": json.dumps(kept, ensure_ascii=False)}
    else:
        raise ConversationError("a message has no role")


def _message(item: Mapping[str, Any]) -> Message:
    content = item.get("content")
    kept = {key: item[key] for key in ("name", "tool_calls", "tool_call_id", "reasoning_content") if item.get(key)}
    parts = [_part(part) for part in content] if isinstance(content, list) else None
    if parts is not None and all(part["type"] == "text" for part in parts) and parts != content:
        content = "\n".join(part["text"] for part in parts)
    elif parts is not None:
        content = parts
    elif content is not None and not isinstance(content, str):
        raise ConversationError(f"a content is {str(content)[:40]!r}, neither a text nor a list of parts")
    return {"role": _role(item.get("role")), "content": "" if content is None else content, **kept}


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise ConversationError(f"a part of a content is {str(part)[:40]!r}")
    kind = str(part.get("type", ""))
    if kind in _TEXTS and isinstance(part.get(_TEXTS[kind]), str):
        return {"type": "text", "text": part[_TEXTS[kind]]}
    if kind in _MEDIA:
        return {key: value for key, value in part.items() if key != "cache_control"}
    kept = {key: value for key, value in part.items() if key != "cache_control"}
    return {"type": "text", "text": json.dumps(kept, ensure_ascii=False)}


def _role(role: Any) -> str:
    if not isinstance(role, str):
        raise ConversationError("a message has no role")
    return _ROLES.get(role, role)


def turns(messages: list[Message]) -> Iterator[list[Message]]:
    """The requests of a recorded conversation: one for each message of a user, with all that was said before."""
    for place, message in enumerate(messages):
        if message["role"] == "user":
            yield messages[: place + 1]
