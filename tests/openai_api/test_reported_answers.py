"""Answers as users of many servers and gateways reported them: what ended badly inside a 200 is a failure, and a count
has its value under whichever name it comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.openai_api.answer import Answer, AnswerOutcome, Usage

SSE, JSON = "text/event-stream", "application/json"


def events(*every: Any, named: bool = False) -> bytes:
    lines = []
    for one in every:
        name = f"event: {one['type']}\n" if named else ""
        lines.append(f"{name}data: {one if isinstance(one, str) else json.dumps(one)}\n\n")
    return "".join(lines).encode()


def chat(reason: Any = None, **fields: Any) -> dict[str, Any]:
    content = "" if reason else "A"
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}], **fields}


def read(body: bytes, content_type: str = SSE, **options: Any) -> Answer:
    answer = Answer(200, content_type, **options)
    answer.feed(body)
    answer.end()
    return answer


def other(body: bytes, content_type: str = SSE) -> Answer:
    return read(body, content_type, opaque=True, other_usage=True)


REASONS = ("abort", "error", "cancelled", "canceled", "timeout", "network_error", {"type": "abort", "message": "oom"})


@pytest.mark.parametrize("reason", REASONS, ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_that_the_engine_gave_up_is_no_completed_one(reason: Any, *, whole: bool) -> None:
    """vllm-project/vllm#57082, vllm-project/vllm#26813, sgl-project/sglang#19357: the status is 200, `[DONE]` comes."""
    body = {"choices": [{"message": {"content": "A"}, "finish_reason": reason}]}
    answer = read(json.dumps(body).encode(), JSON) if whole else read(events(chat(), chat(reason), "[DONE]"))
    assert answer.outcome is AnswerOutcome.FAILED
    assert answer.error is not None
    assert answer.error.text.startswith("finish reason ")


def test_an_answer_given_up_for_lack_of_capacity_is_refused() -> None:
    answer = read(events(chat(), chat("insufficient_system_resource"), "[DONE]"))
    assert answer.outcome is AnswerOutcome.REFUSED


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter", "eos_token", "function_call"])
def test_other_reasons_end_an_answer(reason: str) -> None:
    assert read(events(chat(), chat(reason), "[DONE]")).outcome is AnswerOutcome.COMPLETED


@pytest.mark.parametrize(
    "fault", [{"message": "boom", "code": 500}, {"detail": "boom"}, {"error": {"message": "boom"}, "choices": []}]
)
def test_an_event_that_is_only_a_message_is_an_error(fault: Any) -> None:
    """jgravelle/jmunch-mcp#5, diegosouzapw/OmniRoute#8210."""
    answer = read(events(fault, "[DONE]"))
    assert (answer.outcome, answer.error and answer.error.text) == (AnswerOutcome.FAILED, "boom")


def test_a_stream_of_nothing_is_no_answer() -> None:
    """diegosouzapw/OmniRoute#3388, iflytek/astron-agent#1568."""
    assert read(events("[DONE]")).outcome is AnswerOutcome.FAILED
    assert read(events({"choices": []}, "[DONE]")).outcome is AnswerOutcome.FAILED
    assert read(events(chat("stop"), "[DONE]")).outcome is AnswerOutcome.COMPLETED


USAGES: list[dict[str, Any]] = [
    {"usage": {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 80}}},
    {"usage": {"prompt_tokens": 100, "completion_tokens": 5, "prompt_cache_hit_tokens": 80}},  # BerriAI/litellm#5017
    {"usage": {"prompt_tokens": 100, "completion_tokens": 5, "cached_tokens": 80}},
    {"usage": {"prompt_tokens": 100, "completion_tokens": 5, "cache_read_input_tokens": 80}},
    {"usage": {"input_tokens": 100, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 80}}},
    {"timings": {"cache_n": 80, "prompt_n": 20, "predicted_n": 5}},  # ikawrakow/ik_llama.cpp#695
]


@pytest.mark.parametrize("figures", USAGES)
def test_counts_are_read_under_each_name_in_each_place(figures: dict[str, Any]) -> None:
    """mozilla-ai/any-llm#795 and its like; vllm-project/semantic-router#2215: a first chunk may hold a preview."""
    preview = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}
    streams = [
        events(preview, chat(), chat("stop"), {"choices": [], **figures}, "[DONE]"),
        events(chat(), chat("stop", **figures), "[DONE]"),
        events({"choices": [], **figures, "odd": None}, chat(), chat("stop"), "[DONE]"),
        events(chat(), chat("stop", object=5, choices=[{"delta": {}, "finish_reason": "stop", "text": 5}], **figures)),
    ]
    if "usage" in figures:
        ending = {"choices": [{"delta": {}, "finish_reason": "stop", **figures}]}
        streams.append(events(chat(), ending, "[DONE]"))
    whole = {"choices": [{"message": {"content": "A"}, "finish_reason": "stop"}], **figures}
    assert read(json.dumps(whole).encode(), JSON).usage == Usage(100, 80, 5)
    for stream in streams:
        answer = read(stream)
        assert (answer.usage, answer.outcome) == (Usage(100, 80, 5), AnswerOutcome.COMPLETED)


@given(st.dictionaries(st.sampled_from([*USAGES[0]["usage"], *USAGES[4]["usage"], "cached_tokens"]), st.booleans()))
def test_what_is_no_count_is_unknown_under_each_name(usage: dict[str, Any]) -> None:
    assert read(events(chat(), chat("stop", usage=usage), "[DONE]")).usage == Usage()


MESSAGES: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 90}}},
    {"type": "content_block_delta", "delta": {"text": 'an "error" or "message_stop" in words'}},
    {"type": "message_delta", "usage": {"input_tokens": 10, "output_tokens": 5}},
    {"type": "message_stop"},
]
RESPONSES: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"status": "in_progress", "error": None}},
    {"type": "response.output_text.delta", "delta": "A"},
    {"type": "response.completed", "response": {"status": "completed", "error": None}},
]


@pytest.mark.parametrize("stream", [MESSAGES, RESPONSES])
@given(data=st.data())
def test_a_stream_without_its_last_event_was_cut(stream: list[Any], data: st.DataObject) -> None:
    assert other(events(*stream, named=True)).outcome is AnswerOutcome.COMPLETED
    kept = data.draw(st.integers(1, len(stream) - 1))
    answer = other(events(*stream[:kept], named=True))
    assert (answer.outcome, answer.done) == (AnswerOutcome.FAILED, False)


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, AnswerOutcome.REFUSED),
        ({"type": "error", "error": {"type": "api_error", "message": "x"}}, AnswerOutcome.FAILED),
        ({"type": "error", "code": "server_error", "message": "x"}, AnswerOutcome.FAILED),
        ({"type": "response.failed", "response": {"status": "failed", "error": {"code": "x"}}}, AnswerOutcome.FAILED),
        ({"type": "response.cancelled", "response": {"status": "cancelled"}}, AnswerOutcome.FAILED),
        ({"type": "response.incomplete", "response": {"status": "incomplete"}}, AnswerOutcome.COMPLETED),
    ],
)
@pytest.mark.parametrize("opening", [MESSAGES[:2], RESPONSES[:2]])
def test_an_error_inside_a_200_is_one_in_every_format(opening: list[Any], ending: Any, outcome: AnswerOutcome) -> None:
    """BerriAI/litellm#39703, BerriAI/litellm#29187, karthink/gptel#1512, brainlid/langchain#193."""
    answer = other(events(*opening, ending, named=True))
    assert answer.outcome is outcome
    assert (answer.error is None) == (outcome is AnswerOutcome.COMPLETED)


@pytest.mark.parametrize(
    "body",
    [
        {"status": "failed", "error": {"message": "x"}},
        {"type": "error", "error": {"type": "api_error", "message": "x"}},
        {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "x"}, "prompt_tokens": 4}},
        {"error": {"message": "x"}},
    ],
)
def test_a_whole_answer_that_says_it_failed(body: dict[str, Any]) -> None:
    answer = other(json.dumps(body).encode(), JSON)
    assert (answer.outcome, answer.error and answer.error.message) == (AnswerOutcome.FAILED, "x")


def test_cached_tokens_of_the_start_stay_in_the_prompt_of_a_later_event() -> None:
    """envoyproxy/ai-gateway#2290: usage may come at the start, at the end, or in parts at both."""
    assert other(events(*MESSAGES, named=True)).usage == Usage(100, 90, 5)
    late = {"type": "message_delta", "usage": {"input_tokens": 4, "cache_creation_input_tokens": 6, "output_tokens": 5}}
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 0, "output_tokens": 0}}}
    assert other(events(start, late, MESSAGES[-1], named=True)).usage == Usage(10, None, 5)


@pytest.mark.parametrize("content_type", [JSON, "text/plain", "application/octet-stream", ""])
@given(cuts=st.lists(st.integers(1, 9), max_size=12))
def test_an_event_stream_is_one_whatever_its_header_says(content_type: str, cuts: list[int]) -> None:
    """vllm-project/vllm-ascend#5033, cita-777/metapi#177: a gateway in front writes `application/json`."""
    streams = (
        events(chat(), chat("stop", usage=USAGES[0]["usage"]), "[DONE]"),
        b": ping\n\n" + events(chat(), chat("stop", usage=USAGES[0]["usage"]), "[DONE]"),
        b"\xef\xbb\xbfevent: x\n" + events(chat(), chat("stop", usage=USAGES[0]["usage"]), "[DONE]"),
    )
    for stream in streams:
        answer, at = Answer(200, content_type), 0
        for cut in cuts:
            answer.feed(stream[at : at + cut])
            at += cut
        answer.feed(stream[at:])
        answer.end()
        assert (answer.outcome, answer.usage, answer.streamed) == (AnswerOutcome.COMPLETED, Usage(100, 80, 5), True)
    named = events(*RESPONSES[:2], {**RESPONSES[2], "response": USAGES[4]}, named=True)
    assert other(named, content_type).usage == Usage(100, 80, 5)


@pytest.mark.parametrize("body", [b"data", b"", b"retry", b'"data: x"', b"[1]", b"d: 1", b"<html>", b" {}"])
def test_what_is_no_stream_is_read_whole(body: bytes) -> None:
    assert not read(body, JSON).streamed
