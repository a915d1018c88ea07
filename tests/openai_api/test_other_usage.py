"""Token counts of answers in other formats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.openai_api.answer import UNREPORTED, Answer, AnswerOutcome, Usage

MESSAGES = {"input_tokens": 10, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 6, "output_tokens": 5}
RESPONSES = {"input_tokens": 80, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 5}
GENERATE = {"prompt_tokens": 80, "cached_tokens": 64, "completion_tokens": 5}
WHOLE = [{"usage": MESSAGES}, {"usage": RESPONSES}, {"text": "a", "meta_info": GENERATE}]
STREAMS: list[list[Any]] = [
    [
        {"type": "message_start", "message": {"usage": {**MESSAGES, "output_tokens": 1}}},
        {"type": "content_block_delta", "delta": {"text": "usage"}},
        {"type": "message_delta", "usage": {"output_tokens": 5}},
    ],
    [{"type": "response.created", "response": {"usage": None}}, {"response": {"usage": RESPONSES}}],
    [{"meta_info": {**GENERATE, "completion_tokens": k}} for k in range(6)],
]


def read(data: bytes, content_type: str, pieces: int = 7) -> Answer:
    answer = Answer(200, content_type, opaque=True, other_usage=True)
    for begin in range(0, len(data), pieces):
        answer.feed(data[begin : begin + pieces])
    answer.end()
    return answer


def streamed(events: list[Any]) -> bytes:
    return b"".join(b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n" for event in events)


@pytest.mark.parametrize("body", WHOLE)
def test_a_whole_answer(body: dict[str, Any]) -> None:
    answer = read(json.dumps(body).encode(), "application/json")
    assert (answer.usage, answer.outcome) == (Usage(80, 64, 5), AnswerOutcome.COMPLETED)


@pytest.mark.parametrize("events", STREAMS)
def test_a_stream(events: list[Any]) -> None:
    assert read(streamed(events), "text/event-stream").usage == Usage(80, 64, 5)


def test_counts_are_known_as_they_come() -> None:
    answer = Answer(200, "text/event-stream", opaque=True, other_usage=True)
    answer.feed(streamed(STREAMS[0][:1]))
    assert answer.usage == Usage(80, 64, 1)


@pytest.mark.parametrize("count", [-1, 1.5, "5", True, None, 10**9, 10**40, [], {}])
def test_a_count_that_cannot_be_true_is_unknown(count: Any) -> None:
    body = {"usage": {"input_tokens": count, "input_tokens_details": {"cached_tokens": count}, "output_tokens": 5}}
    assert read(json.dumps(body).encode(), "application/json").usage == Usage(None, None, 5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["usage", "message", "response", "meta_info", "input_tokens"]), inner, max_size=3
        )
    ),
)


@given(JSON, st.sampled_from(["application/json", "text/event-stream"]), st.binary(max_size=20))
def test_no_answer_breaks_it(body: Any, content_type: str, junk: bytes) -> None:
    answer = read(streamed([body]) + json.dumps(body).encode() + junk, content_type)
    assert answer.outcome is AnswerOutcome.COMPLETED


def test_nothing_is_read_of_what_is_no_answer_or_too_long() -> None:
    opaque = Answer(200, "application/json", opaque=True)
    opaque.feed(json.dumps(WHOLE[0]).encode())
    opaque.end()
    assert opaque.usage == UNREPORTED
    assert read(b'{"usage": {"input_tokens": 1}' + b" " * 2**20 + b"}", "application/json", 2**16).usage == UNREPORTED
