"""Recorded traffic of every format, and what is said of a line that is wrong."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.documents import DocumentError
from prefixwatch.loadgen.recordings.conversation import conversation
from prefixwatch.loadgen.recordings.reader import read_arrivals, read_recording
from prefixwatch.loadgen.recordings.request import RecordedRequest

MOONCAKE = '{"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def written(folder: Path, *lines: str, name: str = "log.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n")
    return file


def read(folder: Path, *lines: str, **options: Any) -> list[RecordedRequest]:
    return read_recording(written(folder, *lines), **options).requests


def test_mooncake_traces_have_block_ids(tmp_path: Path) -> None:
    recording = read_recording(written(tmp_path, MOONCAKE, "", MOONCAKE.replace("27482", "25000")))
    assert (recording.format, recording.block_tokens) == ("mooncake", 512)
    first, second = recording.requests
    assert [first.arrival_s, second.arrival_s] == pytest.approx([0.0, 2.482])
    assert (second.prompt_tokens, second.output_tokens, second.block_ids) == (600, 5, (0, 7))
    assert second.where.endswith("log.jsonl:1")


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 1700000000.5, "messages": MESSAGES, "model": "m", "max_tokens": 9},
        {"time": "2023-11-14T22:13:20.500Z", "body": {"messages": MESSAGES, "model": "m", "max_completion_tokens": 9}},
        {"created": 1700000000500, "request": {"messages": MESSAGES, "model": "m"}, "usage": {"completion_tokens": 9}},
    ],
)
def test_openai_requests_come_bare_or_wrapped_with_seconds_milliseconds_or_dates(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    later = {"timestamp": 1700000002.0, "messages": MESSAGES, "session_id": "s", "user": "acme", "cache_salt": "x"}
    first, second = read(tmp_path, json.dumps(row), json.dumps(later))
    assert first.messages == tuple(MESSAGES)
    assert (first.model, first.output_tokens, first.arrival_s) == ("m", 9, 0.0)
    assert (second.session, second.tenant, second.salt) == ("s", "acme", "x")
    assert second.arrival_s == pytest.approx(1.5)


def test_azure_tables_have_times_and_lengths(tmp_path: Path) -> None:
    first, second = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,110,0",
    )
    assert (first.prompt_tokens, first.output_tokens, first.block_ids, first.messages) == (4808, 10, None, None)
    assert second.arrival_s == pytest.approx(0.052, abs=1e-6)
    assert second.output_tokens == 1  # one that failed was sent all the same


def test_burstgpt_tables_have_sessions(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    first, second = read(tmp_path, header, "5,7,3,ChatGPT,472,18,490,Conversation log", "45,,1,GPT-4,100,0,100,API log")
    assert (first.prompt_tokens, first.output_tokens, first.session) == (472, 18, "7")
    assert (second.arrival_s, second.output_tokens, second.session) == (40.0, 1, "")


def span(start: int, **attributes: Any) -> dict[str, Any]:
    kinds = {int: "intValue", str: "stringValue"}
    values = [{"key": key, "value": {kinds[type(value)]: str(value)}} for key, value in attributes.items()]
    return {"name": "chat", "startTimeUnixNano": str(start), "attributes": values}


def export(*spans: dict[str, Any]) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]})


def test_otel_spans_of_the_genai_conventions_are_requests_and_others_are_not(tmp_path: Path) -> None:
    parts = [{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]
    chat = {"gen_ai.usage.input_tokens": 120, "gen_ai.usage.output_tokens": 7, "gen_ai.request.model": "m"}
    first, second = read(
        tmp_path,
        export(span(1_700_000_000_000_000_000, **chat), span(1, **{"http.request.method": "GET"})),
        export(
            span(
                1_700_000_001_500_000_001,
                **{"gen_ai.input.messages": json.dumps(parts), "gen_ai.conversation.id": "c1"},
            )
        ),
    )
    assert (first.prompt_tokens, first.output_tokens, first.model, first.messages) == (120, 7, "m", None)
    assert (second.messages, second.session) == (({"role": "user", "content": "hello"},), "c1")
    assert second.arrival_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([MOONCAKE, "nonsense"], "log.jsonl:2: not a JSON object in one line"),
        ([MOONCAKE, '{"timestamp": 1, "hash_ids": []}'], "log.jsonl:2: input_length must be a whole number from 1 on"),
        ([MOONCAKE, MOONCAKE.replace("600", '"600"')], "log.jsonl:2: input_length must be a whole number"),
        ([MOONCAKE, MOONCAKE.replace("27482", "-1")], "log.jsonl:2: timestamp must be a number from 0 on, got -1"),
        ([MOONCAKE.replace("[0, 7]", "[0]")], "log.jsonl:1: 1 hash_ids for input_length 600: expected 2"),
        (['{"timestamp": 1, "messages": []}'], "log.jsonl:1: no messages: a line is a chat request"),
        (['{"timestamp": "noon", "messages": [{"role": "user"}]}'], "log.jsonl:1: time 'noon' is neither Unix"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"], "log.jsonl:2: TIMESTAMP 'noon' is not a date"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,1"], "log.jsonl:2: has another number of columns"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,x,1"], "log.jsonl:2: ContextTokens must be a whole"),
        (["a,b,c", "1,2,3"], "log.jsonl:1: no known kind of recording. Expected one of mooncake"),
        (['{"x": 1}'], "log.jsonl:1: no known kind of recording"),
        ([""], "log.jsonl: is empty"),
        ([MOONCAKE, '{"timestamp": 1, "input_length": 600}'], "log.jsonl:2: has no hash_ids, and other lines have"),
        (['{"prompt": "a", "messages": [{"role": "user"}]}'], "log.jsonl:1: has a prompt in messages and in prompt"),
        (['{"input": [1, 2, 3]}'], "log.jsonl:1: input holds token ids"),
        (['[{"messages": []}'], "log.jsonl: begins as a JSON array and isn't one"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "log.jsonl: holds no request: expected a CSV table"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read(tmp_path, *lines)
    assert complaint in str(caught.value)


def test_a_format_may_be_given_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="unknown format 'csv': choose one of mooncake, sessions, aiperf"):
        read(tmp_path, MOONCAKE, name="csv")
    with pytest.raises(DocumentError, match=r"log\.jsonl:1: no messages"):
        read(tmp_path, MOONCAKE, name="openai")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"nowhere\.jsonl: can't be read: No such file"):
        read_recording(tmp_path / "nowhere.jsonl")


def test_only_the_first_requests_and_only_their_times(tmp_path: Path) -> None:
    file = written(tmp_path, *(MOONCAKE.replace("27482", str(1000 * k)) for k in range(4)))
    assert read_arrivals(file, limit=3) == [0.0, 1.0, 2.0]
    with pytest.raises(DocumentError, match=r"log\.jsonl:1: has no time"):
        read_arrivals(written(tmp_path, json.dumps({"messages": MESSAGES})))


SESSIONS = [
    {"session_id": "s1", "input_length": 700, "output_length": 20, "hash_ids": [1, 2]},
    {"session_id": "s1", "delay": 1500, "input_length": 1200, "output_length": 30, "hash_ids": [1, 2, 3]},
    {"session_id": "s2", "timestamp": 400, "input_length": 600, "output_length": 25, "hash_ids": [1, 7]},
]


def test_sessions_with_delays_wait_for_the_answer_before(tmp_path: Path) -> None:
    """ai-dynamo/aiperf#273 (N04): later turns have a delay instead of a time."""
    timed = [{**SESSIONS[0], "timestamp": 100}, *SESSIONS[1:]]
    first, other, later = read(tmp_path, *map(json.dumps, timed))
    assert [(r.session, r.arrival_s, r.delay_s) for r in (first, later)] == [("s1", 0.0, None), ("s1", 1.5, 1.5)]
    assert other.arrival_s == pytest.approx(0.3)
    untimed = read(tmp_path, *map(json.dumps, SESSIONS[:2]))
    assert [r.arrival_s for r in untimed] == [0.0, 1.5]


def test_texts_and_lengths_alone_are_mooncake_rows_too(tmp_path: Path) -> None:
    text = {"timestamp": 900, "text_input": "Summarise the note.", "output_length": 20}
    [found] = read(tmp_path, json.dumps(text))
    assert found.messages == ({"role": "user", "content": "Summarise the note."},)
    recording = read_recording(written(tmp_path, '{"timestamp": 0, "input_length": 700, "output_length": 20}'))
    assert (recording.format, recording.block_tokens, recording.requests[0].block_ids) == ("mooncake", None, None)


@pytest.mark.parametrize("size", [16, 64, 256, 512, 1024])
def test_the_block_size_is_detected_from_the_rows(tmp_path: Path, size: int) -> None:
    rows = [
        {"timestamp": k, "input_length": length, "output_length": 1, "hash_ids": list(range(-(-length // size)))}
        for k, length in enumerate((4000, 700, 2500))
    ]
    recording = read_recording(written(tmp_path, *map(json.dumps, rows)))
    assert recording.block_tokens == size


SYSTEM = "You are the support desk."
AS_CHAT = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": "Question"})


@pytest.mark.parametrize(
    "body",
    [
        {"system": SYSTEM, "messages": [{"role": "user", "content": "Question"}]},
        {"system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
         "messages": [{"role": "user", "content": [{"type": "text", "text": "Question", "cache_control": {}}]}]},
        {"instructions": SYSTEM, "input": "Question"},
        {"instructions": SYSTEM, "input": [{"role": "user", "content": [{"type": "input_text", "text": "Question"}]}]},
        {"input": [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": "Question"}]},
        {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Question"}]},
    ],
    ids=["messages API", "its blocks", "responses API", "its items", "developer", "chat API"],
)  # fmt: skip
def test_the_same_prompt_is_read_from_every_api(tmp_path: Path, body: dict[str, Any]) -> None:
    """anthropics/claude-code#68900 (N18): the system text was dropped, and reuse looked like the opposite."""
    [found] = read(tmp_path, json.dumps({"timestamp": 1, "body": body}))
    assert found.messages == AS_CHAT


@given(st.data())
def test_no_text_of_a_prompt_is_ever_lost(data: st.DataObject) -> None:
    """Whatever parts a message has, each text in it is somewhere in the conversation, in order."""
    texts = iter(f"text{k}." for k in range(99))

    def part() -> Any:
        kind = data.draw(st.sampled_from(["text", "input_text", "tool_use", "tool_result", "thinking", "strange"]))
        shapes: dict[str, Any] = {
            "tool_use": {"id": "t", "name": "search", "input": {"query": next(texts)}},
            "tool_result": {"tool_use_id": "t", "content": [{"type": "text", "text": next(texts)}]},
            "thinking": {"thinking": next(texts)},
            "strange": {"payload": next(texts)},
        }
        return {"type": kind, **shapes.get(kind, {"text": next(texts)})}

    roles = st.sampled_from(["user", "assistant", "tool"])
    messages = [
        {"role": data.draw(roles), "content": [part() for _ in range(data.draw(st.integers(1, 4)))]}
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    body = {"system": [{"type": "text", "text": next(texts)}], "messages": messages}

    found = json.dumps(conversation(body))

    sent = re.findall(r"text\d+\.", json.dumps(body))
    assert re.findall(r"text\d+\.", found) == sent


def test_images_stay_at_their_place_and_tools_are_functions(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x/1.png"}}
    content = [{"type": "text", "text": "before"}, image, {"type": "text", "text": "after"}]
    tools = [{"name": "search", "description": "d", "input_schema": {"type": "object"}}]
    [found] = read(tmp_path, json.dumps({"messages": [{"role": "user", "content": content}], "tools": tools}))
    assert found.messages == ({"role": "user", "content": content},)
    assert found.tools == [
        {"type": "function", "function": {"name": "search", "description": "d", "parameters": {"type": "object"}}}
    ]


SHAREGPT = [
    {"id": "a1", "conversations": [
        {"from": "human", "value": "Explain tides."}, {"from": "gpt", "value": "The moon pulls."},
        {"from": "human", "value": "And the sun?"}, {"from": "gpt", "value": "It adds."}]},
]  # fmt: skip
WILDCHAT = {"conversation_hash": "c1", "model": "m", "timestamp": "2024-01-02T03:04:05+00:00", "conversation": [
    {"role": "user", "content": "Explain tides."}, {"role": "assistant", "content": "The moon pulls."}]}  # fmt: skip


def test_conversations_are_sessions_of_turns(tmp_path: Path) -> None:
    """ShareGPT is one JSON array; each message of a user carries what was said before."""
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(SHAREGPT, indent=1))
    first, second = read_recording(file).requests
    assert [len(r.messages or ()) for r in (first, second)] == [1, 3]
    assert (first.session, second.session, second.delay_s) == ("a1", "a1", 0.0)
    assert (second.messages or ())[1] == {"role": "assistant", "content": "The moon pulls."}
    [wild] = read(tmp_path, json.dumps(WILDCHAT))
    assert (wild.session, wild.model, wild.arrival_s) == ("c1", "m", 0.0)


def test_packed_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress(f"{MOONCAKE}\n".encode()))
    assert read_recording(file).requests[0].block_ids == (0, 7)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DocumentError, match="can't be read"):
        read_recording(file)


def test_a_window_of_a_recording_begins_at_0_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * k, "input_length": 600, "output_length": 1, "hash_ids": [99, k]} for k in range(10)]
    recording = read_recording(written(tmp_path, *map(json.dumps, rows)))
    part = recording.between(3, 5)
    assert [(r.arrival_s, r.block_ids) for r in part.requests] == [(0.0, (99, 3)), (1.0, (99, 4))]
    assert recording.between(None, None) is recording
    with pytest.raises(DocumentError, match="no request between 20 and 30 s: its requests came from 0 to 9 s"):
        recording.between(20, 30)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"output_length": 10**12}, "log.jsonl:2: its answer has 1,000,000,000,000 tokens, more than 10,000,000"),
        ({"timestamp": 1e300}, "log.jsonl:2: comes 1e\\+297 s after the one before or the first, more than ten years"),
    ],
)
def test_a_length_or_a_time_that_no_recording_has_is_refused(
    tmp_path: Path, wrong: dict[str, Any], complaint: str
) -> None:
    row = {"timestamp": 0, "input_length": 64, "output_length": 8, "hash_ids": [1]}
    with pytest.raises(DocumentError, match=complaint):
        read(tmp_path, json.dumps(row), json.dumps(row | wrong))
