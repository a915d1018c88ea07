"""Recorded traffic of every format, and what is said of a line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from documents import DocumentError
from loadgen.recorded import RecordedRequest
from loadgen.recordings import read_arrivals, read_recording

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
        ([MOONCAKE, '{"timestamp": 1}'], "log.jsonl:2: input_length must be a whole number from 1 on, got None"),
        ([MOONCAKE, MOONCAKE.replace("600", '"600"')], "log.jsonl:2: input_length must be a whole number"),
        ([MOONCAKE, MOONCAKE.replace("27482", "-1")], "log.jsonl:2: timestamp must be a number from 0 on, got -1"),
        ([MOONCAKE.replace("[0, 7]", "[0]")], "log.jsonl:1: 1 hash_ids for input_length 600: expected 2"),
        (['{"timestamp": 1, "messages": []}'], "log.jsonl:1: no messages: a line is a chat request"),
        (['{"timestamp": "noon", "messages": [{"role": "user"}]}'], "log.jsonl:1: time 'noon' is neither Unix"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"], "log.jsonl:2: TIMESTAMP 'noon' is no date"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,1"], "log.jsonl:2: has another number of columns"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,x,1"], "log.jsonl:2: ContextTokens must be a whole"),
        (["a,b,c", "1,2,3"], "log.jsonl:1: no known kind of recording. Expected one of mooncake"),
        (['{"x": 1}'], "log.jsonl:1: no known kind of recording"),
        ([""], "log.jsonl:1: no known kind of recording"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "log.jsonl: holds no request: expected a CSV table"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read(tmp_path, *lines)
    assert complaint in str(caught.value)


def test_a_format_may_be_given_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="unknown format 'csv': choose one of mooncake, otel, openai, azure, burst"):
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
