"""A small file of every kind of recording: how it is read, and what `simulate` and `analyze` make of it."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefixwatch.documents import DocumentError
from prefixwatch.loadgen.recordings.formats import FORMATS
from prefixwatch.loadgen.recordings.reader import read_recording
from prefixwatch.openai_api.events import content_text
from prefixwatch.stack.bench.simulate import run_simulate
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.simulation.options import SimulateOptions
from prefixwatch.stack.traffic.analyze import AnalyzeOptions, run_analyze

FILES = Path(__file__).parent / "recordings"


@dataclass(frozen=True)
class Kind:
    """What a file of `FILES` says."""

    format: str
    times: list[float | None]
    outputs: list[int | None]
    prompt: Any
    """Of the last request: its block ids, the contents of its messages, or its length."""
    block_tokens: int | None = None
    sessions: int = 0
    note: str = ""


KINDS = {
    "mooncake.jsonl": Kind("mooncake", [0, 2.5], [20, 30], (11, 12, 14), 512),
    "mooncake_hex_ids.jsonl": Kind("mooncake", [0, 0.5], [20, 30], (0xAF3C, 0xAF3D, 0xC22), 16),
    "chat_tree.jsonl": Kind("mooncake", [0, 29.386, 29.886], [13, 9, 5], (20, 21), 16, sessions=2),
    "mooncake_sessions.jsonl": Kind("mooncake", [0, 1.5], [20, 30], (1, 3, 4), 512, sessions=1),
    "session_turns.jsonl": Kind("sessions", [0, 1.2], [50, 40], 1200, sessions=1),
    "aiperf_single_turn.jsonl": Kind("aiperf", [None, None], [20, None], ["What is a router?"]),
    "aiperf_multi_turn.jsonl": Kind(
        "sessions", [None, None], [None, None], ["Be terse.", "What is a block?", "And a page?"], sessions=1,
        note="The file has no answers",
    ),
    "aiperf_inputs.json": Kind("aiperf", [None, None], [5, 6], ["One", "Yes", "Two"], sessions=1),
    "guidellm.jsonl": Kind("openai", [None, None], [12, 14], ["Summarise the second note."]),
    "azure.csv": Kind("azure", [0, 2], [20, 1], 111, note="1 of 2 requests failed"),
    "burstgpt.csv": Kind("burstgpt", [0, 40], [18, 1], 500, sessions=1, note="1 of 2 requests failed"),
    "sharegpt.json": Kind(
        "conversations", [0, 0], [None, None], ["Explain tides.", "The moon pulls.", "And the sun?"], sessions=1
    ),
    "wildchat.jsonl": Kind(
        "conversations", [0, 0], [None, None], ["Explain tides.", "The moon pulls.", "And the sun?"], sessions=1
    ),
    "openai_chat.jsonl": Kind("openai", [0, 2], [9, 9], ["Be brief.", "Bye"]),
    "openai_batch.jsonl": Kind("openai", [0], [None], ["Hello"], note="1 of 1 requests failed"),
    "openai_responses.jsonl": Kind("openai", [0], [4], ["Be brief.", "Hello"]),
    "openai_token_ids.jsonl": Kind("openai", [0, 1], [4, 4], 3, 16),
    "anthropic_messages.jsonl": Kind("openai", [0], [4], ["Be brief.", "Hello"]),
    "vllm.log": Kind("vllm", [0, 4], [3, 16], ["<|user|>bye"], note="Prompts are as the engine saw them"),
    "vllm_token_ids.log": Kind("vllm", [0, 1], [16, 16], 3, 16),
    "sglang.log": Kind("sglang", [0, 3], [7, 16], ["<|user|>bye"], note="Prompts are as the engine saw them"),
    "sglang.jsonl": Kind("sglang", [0, 2.5], [7, 16], ["<|user|>bye"]),
    "otel.json": Kind("otel", [0, 1.5], [3, None], ["Hello"], sessions=1, note="1 of 2 requests failed"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_each_kind_is_read_whole(name: str) -> None:
    expected, recording = KINDS[name], read_recording(FILES / name)
    assert recording.format == expected.format
    assert [r.arrival_s for r in recording.requests] == pytest.approx(expected.times)
    assert [r.output_tokens for r in recording.requests] == expected.outputs
    assert recording.block_tokens == expected.block_tokens
    last = recording.requests[-1]
    if last.messages is not None:
        assert [content_text(message["content"])[0] for message in last.messages] == expected.prompt
    elif isinstance(expected.prompt, tuple):
        assert last.block_ids == expected.prompt
    elif last.block_ids is not None:
        assert len(last.block_ids) == expected.prompt
    else:
        assert last.prompt_tokens == expected.prompt
    assert len({r.session for r in recording.requests if r.session}) == expected.sessions
    assert expected.note in "\n".join(recording.notes)


def test_every_format_has_a_file() -> None:
    assert {kind.format for kind in KINDS.values()} == set(FORMATS)
    assert {file.name for file in FILES.iterdir()} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_simulate_and_analyze_take_what_bench_takes(name: str) -> None:
    console, source = Console(file=io.StringIO()), str(FILES / name)
    options = SimulateOptions(source=source, policy="cache_aware", workers=2, rate=2.0)
    simulated, _ = run_simulate(options, console)
    assert simulated["policies"]["cache_aware"]["requests"]["completed"] == len(KINDS[name].times)
    analyzed, _ = run_analyze(AnalyzeOptions(source), console)
    assert analyzed["requests"] == len(KINDS[name].times)
    known = read_recording(FILES / name).requests[0]
    if known.messages is None and known.block_ids is None:
        assert analyzed["infinite_cache"]["hit_ratio"] is None
        assert "what their prompts share is unknown" in "\n".join(analyzed["notes"])


def test_token_ids_share_what_their_tokens_share() -> None:
    """40 and 35 tokens with the first 32 in common; then with all 35, of which 32 are full blocks."""
    for name in ("openai_token_ids.jsonl", "vllm_token_ids.log"):
        a, b = (request.block_ids or () for request in read_recording(FILES / name).requests)
        assert (a[:2], a[2] == b[2]) == (b[:2], False)


def test_requests_without_times_need_a_rate_where_times_matter() -> None:
    with pytest.raises(UsageError, match="not every request has a time: give --rate"):
        run_simulate(SimulateOptions(source=str(FILES / "guidellm.jsonl"), workers=2), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["[2025-11-30 09:00:05] Receive: obj=GenerateReqInput(rid='a', text='x' ... 'y', input_ids=None)"],
         "log:1: the log has cut this prompt short: log with --log-requests-level 3"),
        ([json.dumps({"timestamp": "2025-11-30T09:00:05", "event": "request.received", "rid": "a",
                      "obj": {"text": "x" * 1024 + "..." + "y" * 1024}})], "log:1: the log has cut this prompt short"),
        (["INFO 11-30 09:00:05 [l.py:6] Received request c-1: params: SamplingParams(max_tokens=9)."],
         "log:1: the log has neither the prompt nor its length: log with --enable-log-requests and VLLM_LOGGING_LEVEL"),
        ([json.dumps({"timestamp": k / 10, "input_length": 9, "output_length": 1}) for k in range(200)],
         "read as milliseconds, its time stamps make 10,050 requests per second: say which unit"),
        ([json.dumps({"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}),
          json.dumps({"timestamp": 2, "input_length": 1024, "output_length": 1, "hash_ids": [3, 2]})],
         "log:2: block id 2 follows block 3 here and block 1 in"),
        ([json.dumps({"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [1, 1]})],
         "log:1: block id 1 follows block 1 here and the start of the prompt in"),
    ],
    ids=["SGLang's text", "SGLang's JSON", "vLLM without prompts", "unit", "two prefixes", "id twice"],
)  # fmt: skip
def test_what_can_not_be_read_rightly_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], complaint: str
) -> None:
    file = tmp_path / "log"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DocumentError) as caught:
        read_recording(file)
    assert complaint in str(caught.value)


def test_unit_and_block_size_may_be_asked_for(tmp_path: Path) -> None:
    rows = [{"timestamp": k, "input_length": 100, "output_length": 1, "hash_ids": [9]} for k in range(2)]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    asked = read_recording(file, time_unit="s", block_tokens=128)
    assert ([r.arrival_s for r in asked.requests], asked.block_tokens) == ([0.0, 1.0], 128)
    assert [r.arrival_s for r in read_recording(file).requests] == [0.0, 0.001]
    with pytest.raises(DocumentError, match="1 hash_ids for input_length 100: expected 7, one for every 16 tokens"):
        read_recording(file, block_tokens=16)


@pytest.mark.parametrize("length", [100, 112])
def test_traces_may_leave_out_the_partial_block(tmp_path: Path, length: int) -> None:
    """Then nobody knows what it shares: it is a block of its own in every row."""
    rows = [
        {"chat_id": k, "timestamp": k, "input_length": length, "hash_ids": list(range(length // 16))} for k in (1, 2)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "\n".join(map(json.dumps, [*rows, {**rows[0], "timestamp": 3, "input_length": 35, "hash_ids": [0, 1]}]))
    )
    a, b, _ = (request.block_ids or () for request in read_recording(file).requests)
    assert len(a) == len(b) == -(-length // 16)
    assert len(set(a) & set(b)) == length // 16


def test_a_rate_replaces_the_times_and_keeps_the_turns_apart() -> None:
    recording = read_recording(FILES / "mooncake_sessions.jsonl").at_rate(10)
    assert [r.arrival_s for r in recording.requests] == [0.0, 1.5]
    timed = read_recording(FILES / "mooncake.jsonl").at_rate(10)
    assert [r.arrival_s for r in timed.requests] == [0.0, pytest.approx(0.1, rel=2)]
    assert timed == read_recording(FILES / "mooncake.jsonl").at_rate(10)


def test_a_window_says_what_it_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    rows = [{"timestamp": 1, "prompt": "a"}, {"timestamp": 5, "prompt": "b"}, {"prompt": "c"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_recording(file).between(0, 3).notes == ["Left out of the window, since they have no time: 1."]
