from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.chat_stream import ChatStream


def chat(**delta: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}).encode()


@pytest.mark.parametrize(
    ("event", "content"),
    [
        (chat(role="assistant"), False),
        (chat(role="assistant", content=""), False),
        (chat(content=None), False),
        (chat(content="A"), True),
        (chat(reasoning_content="hm"), True),
        (chat(reasoning="hm"), True),
        (chat(tool_calls=[{"index": 0, "function": {"name": "f"}}]), True),
        (chat(tool_calls=[]), False),
        (b'{"choices":[{"text":"A"}]}', True),
        (b'{"choices":[]}', False),
        (b'{"choices":null}', False),
        (b"{}", False),
    ],
)
def test_what_counts_as_content(event: bytes, content: bool) -> None:
    """vllm-project/vllm#3768 (LT05): the role prelude is no token."""
    stream = ChatStream()
    assert stream.event(event) is content
    assert stream.error == ""


def test_usage_is_taken_wherever_it_stands() -> None:
    """sgl-project/genai-bench#44 (LT07)"""
    stream = ChatStream()
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    assert stream.event(json.dumps({"choices": [], "usage": usage}).encode()) is False
    assert stream.event(chat(content="A")) is True
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens, stream.usage.cached_tokens) == (9, 3, 8)


def test_usage_without_details_says_nothing_of_the_cache() -> None:
    stream = ChatStream()
    stream.event(b'{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}')
    assert stream.usage is not None
    assert stream.usage.cached_tokens is None


@pytest.mark.parametrize(
    ("event", "error", "overloaded"),
    [
        (b'{"error":{"message":"engine died","type":"InternalServerError","code":500}}', "engine died", False),
        (b'{"error":{"message":"try later","code":503}}', "try later", True),
        (b'{"error":{"message":"try later","code":"429"}}', "try later", True),
        (b'{"error":{"message":"x","type":"rate_limit_exceeded"}}', "rate_limit_exceeded", True),
        (b'{"object":"error","message":"queue is full","code":null}', "queue is full", True),
        (b'{"error":"plain words"}', "plain words", False),
        (b"{not json", "unreadable event", False),
        (b'{"choices":[{"delta":{"content":7}}]}', "unreadable event", False),
    ],
)
def test_errors_inside_a_stream(event: bytes, error: str, overloaded: bool) -> None:
    stream = ChatStream()
    assert stream.event(event) is False
    assert error in stream.error
    assert stream.overloaded is overloaded
