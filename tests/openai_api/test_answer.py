from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.openai_api import answer as answers
from prefixwatch.openai_api import events
from prefixwatch.openai_api.answer import Answer, AnswerOutcome, Content, Usage
from prefixwatch.openai_api.events import MAX_TOKENS, AnswerError, UnreadableEvent, read_event

DONE = b"data: [DONE]\n\n"


def line(event: Any) -> bytes:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


def chat(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": None}


def read(*pieces: bytes, ended: bool = True, **options: Any) -> Answer:
    answer = Answer(**options)
    for piece in pieces:
        answer.feed(piece)
    if ended:
        answer.end()
    return answer


@pytest.mark.parametrize(
    ("event", "content"),
    [
        (chat(role="assistant"), Content.NONE),
        (chat(role="assistant", content=""), Content.NONE),
        (chat(content=None), Content.NONE),
        (chat(content="A"), Content.ANSWER),
        (chat(content=[{"type": "text", "text": "A"}]), Content.ANSWER),
        (chat(content=[{"type": "text", "text": ""}]), Content.NONE),
        (chat(content=[{"type": "thinking", "thinking": [{"text": "hm"}]}]), Content.REASONING),
        (chat(content=[]), Content.NONE),
        (chat(reasoning_content="hm"), Content.REASONING),
        (chat(reasoning="hm"), Content.REASONING),
        (chat(reasoning="hm", content="A"), Content.ANSWER),
        (chat(tool_calls=[{"index": 0, "function": {"name": "f"}}]), Content.ANSWER),
        (chat(tool_calls=[]), Content.NONE),
        (chat(refusal="no"), Content.ANSWER),
        ({"choices": [{"text": "A"}]}, Content.ANSWER),
        ({"choices": [{"text": ""}]}, Content.NONE),
        ({"choices": []}, Content.NONE),
        ({"choices": None}, Content.NONE),
        ({}, Content.NONE),
    ],
)
def test_what_counts_as_content(event: dict[str, Any], content: Content) -> None:
    """vllm-project/vllm#3768 (LT05): the opening role is not a token."""
    answer = Answer()
    assert answer.feed(line(event)) is content
    assert (answer.content, answer.error) == (content, None)


def test_the_text_leaves_out_reasoning_and_tool_calls() -> None:
    parts = [{"type": "text", "text": "c"}, {"type": "thinking", "thinking": "x"}]
    stream = [chat(reasoning="hm"), chat(content="a"), {"choices": [{"text": "b"}]}, chat(content=parts)]
    assert read(*map(line, stream), DONE, keep_text=True).text == "abc"
    assert read(line(chat(content="\ud800")), DONE, keep_text=True).text == "?"


def test_each_figure_of_usage_keeps_its_latest_value() -> None:
    """sgl-project/genai-bench#44 (LT07): usage may come first, several times, and with details only once."""
    first = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    later = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None}
    answer = read(line({"choices": [], "usage": first}), line({**chat(content="A"), "usage": later}), DONE)
    assert answer.usage == Usage(9, 8, 3)


def test_cached_tokens_that_nobody_reports_are_unknown_and_not_zero() -> None:
    assert read(line({"choices": [], "usage": {"prompt_tokens": 9}}), DONE).usage == Usage(9, None, None)


_figure = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, MAX_TOKENS), st.floats(), st.text(max_size=3),
    st.lists(st.integers(), max_size=1), st.just(10**400),
)  # fmt: skip


@given(_figure, _figure, _figure)
def test_a_figure_that_cannot_be_true_is_unknown_and_spoils_no_other(prompt: Any, cached: Any, output: Any) -> None:
    """Security review M6."""
    fields = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    answer = read(line(chat(content="A")), line({"choices": [], "usage": fields}), DONE)
    assert answer.outcome is AnswerOutcome.COMPLETED

    def count(value: Any) -> int | None:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS
        return int(value) if whole and value == int(value) else None

    assert answer.usage == Usage(count(prompt), count(cached), count(output))


@pytest.mark.parametrize(
    ("event", "text", "code", "overloaded"),
    [
        ({"error": {"message": "died", "type": "Internal", "code": 500}}, "Internal: died", 500, False),
        ({"error": {"message": "try later", "code": 503}}, "try later", 503, True),
        ({"error": {"message": "try later", "code": "429"}}, "try later", 429, True),
        ({"error": {"message": "try later", "code": "rate_limit_exceeded"}}, "try later", None, True),
        ({"error": {"message": "try later", "status": 503}}, "try later", 503, True),
        ({"error": {"type": "overloaded_error"}}, "overloaded_error", None, True),
        ({"object": "error", "message": "queue is full", "code": None}, "queue is full", None, True),
        ({"object": "error", "message": "older form", "code": 500}, "older form", 500, False),
        ({"error": "plain words"}, "plain words", None, False),
        ({"error": {"message": "x", "code": 9**99}}, "x", None, False),
        ({"error": {"message": "x", "code": "4²9"}}, "x", None, False),
        ({"error": {"message": "x" * 900}}, "x" * 200, None, False),
        ({"error": {"message": "\ud800"}}, "?", None, False),
        ({"error": {"a": 1}}, "error without a message", None, False),
        ("{not json", "unreadable event: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
         None, False),
        ('{"choices":[{"delta":{"content":7}}]}', "unreadable event: content is neither text nor a list of parts",
         None, False),
        ("[1]", "unreadable event: not a JSON object", None, False),
    ],
)  # fmt: skip
def test_errors_inside_a_stream(event: Any, text: str, code: int | None, overloaded: bool) -> None:
    answer = read(line(event), line({"error": {"message": "a later one"}}), DONE)
    assert answer.error is not None
    assert (answer.error.text, answer.error.code, answer.error.overloaded) == (text, code, overloaded)
    assert answer.outcome is (AnswerOutcome.REFUSED if overloaded else AnswerOutcome.FAILED)


@pytest.mark.parametrize("error", [None, False, "", {}])
def test_an_empty_error_is_none(error: Any) -> None:
    assert read(line({**chat(content="A"), "error": error}), DONE).outcome is AnswerOutcome.COMPLETED


def test_text_cannot_pose_as_an_error_or_the_end() -> None:
    answer = read(line(chat(content='data: [DONE]\n\ndata: {"error":{"message":"no"}}')), ended=False)
    assert (answer.done, answer.error) == (False, None)


def test_a_stream_is_complete_with_done_or_finished_choices_and_an_orderly_end() -> None:
    finished = line(chat("stop", content="B"))
    assert read(line(chat(content="A")), DONE, ended=False).complete
    assert read(line(chat(content="A")), finished).complete
    assert not read(line(chat(content="A")), finished, ended=False).complete
    assert not read(finished, line(chat(content="of another choice"))).complete
    assert not read(line(chat("", content="A"))).complete
    assert read(finished, line({"choices": [], "usage": {"prompt_tokens": 3}})).complete


def test_nothing_counts_after_done() -> None:
    answer = read(line(chat("stop")), DONE, line({"error": "late"}), line(chat(content="A")))
    assert (answer.outcome, answer.content) == (AnswerOutcome.COMPLETED, Content.NONE)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "completed"), (429, "refused"), (503, "refused"), (400, "rejected"), (404, "rejected"), (500, "failed"),
     (101, "failed"), (201, "failed"), (204, "failed"), (302, "failed"), (0, "failed")],
)  # fmt: skip
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_only_a_200_carries_an_answer(status: int, outcome: str, content_type: str) -> None:
    """Security review M5: 101, 204 and 3xx counted as completed."""
    whole = json.dumps({"choices": [{"message": {"content": "A"}}]}).encode()
    body = line(chat(content="A")) + DONE if status == 200 and content_type == "text/event-stream" else whole
    assert read(body, status=status, content_type=content_type).outcome == outcome


def test_an_error_status_gives_its_message() -> None:
    body = b'{"error":{"message":"too long","type":"BadRequest"}}'
    answer = read(body, status=400, content_type="application/json")
    assert answer.error == AnswerError("too long", "BadRequest")
    assert read(b"<html>bad", status=502, content_type="text/html").error == AnswerError("<html>bad")
    assert read(status=502, content_type="text/html").error is None


def test_what_is_kept_of_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BODY_BYTES", 1000)
    answer = read(*[b"x" * 600] * 9, content_type="application/json", ended=False)
    assert len(answer._body) <= 2001
    answer.end()
    assert answer.error == AnswerError("an answer of more than 1000 bytes")


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
_delta = st.fixed_dictionaries(
    {}, optional={name: st.one_of(st.text(max_size=3), _json) for name in events.Delta.__struct_fields__}
)
_choice = st.fixed_dictionaries(
    {}, optional={"delta": st.one_of(_delta, _json), "text": _json, "finish_reason": _json, "message": _delta}
)
_usage = st.fixed_dictionaries(
    {}, optional={"prompt_tokens": _figure, "completion_tokens": _figure, "prompt_tokens_details": _json}
)
_event = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.one_of(st.lists(st.one_of(_choice, _json), max_size=2), _json),
        "usage": st.one_of(_usage, _json), "error": _json, "object": _json, "code": _json, "message": _json,
    },
)  # fmt: skip


def state(answer: Answer) -> tuple[Any, ...]:
    return (answer.content, answer.events, answer.done, answer.finished, answer.error, answer.usage, answer.text,
            answer.first_content, answer.complete, answer.outcome)  # fmt: skip


@given(_event)
def test_decoding_by_type_and_field_by_field_say_the_same(event: dict[str, Any]) -> None:
    """The fast way is only a fast way."""
    data = json.dumps(event).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "_decode", lambda _: (_ for _ in ()).throw(msgspec.DecodeError))
        slowly = state(read(b"data: " + data + b"\n\n", DONE, keep_text=True))
    assert state(read(b"data: " + data + b"\n\n", DONE, keep_text=True)) == slowly


_bytes = st.one_of(
    _event.map(line),
    st.sampled_from(
        [DONE, line(chat(content="中文")), b": ping\n\n", b"data: {\n\n", b"\r", b"\n", b"data: x", b"\xff"]
    ),
    st.binary(max_size=8),
)


@given(st.lists(_bytes, max_size=6).map(b"".join), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_where_a_stream_is_cut_makes_no_difference(stream: bytes, newline: bytes, data: st.DataObject) -> None:
    stream = stream.replace(b"\n", newline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]
    assert state(read(*pieces, keep_text=True)) == state(read(stream, keep_text=True))


@given(st.binary(max_size=60))
def test_no_bytes_upset_it(data: bytes) -> None:
    read(data, content_type="application/json")
    with contextlib.suppress(UnreadableEvent):
        read_event(data)
