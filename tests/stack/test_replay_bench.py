"""Recordings through the whole stack: `bench --trace` on simulated engines, `analyze` on files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.documents import DocumentError
from prefixwatch.kvcache.cache_class import reusable_part
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, read_requests
from prefixwatch.stack.bench.scenario_choice import TraceOptions, chosen_scenario, scenario_notes
from prefixwatch.stack.errors import UsageError
from tests.stack.command_line import prefixwatch


def mooncake(folder: Path) -> Path:
    file = folder / "trace.jsonl"
    rows = [
        {"timestamp": 250 * k, "input_length": 1300 + k, "output_length": 3, "hash_ids": [0, 1 + k % 2, 100 + k]}
        for k in range(12)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def conversation(folder: Path) -> Path:
    """Two recorded turns of each of three sessions."""
    file = folder / "chats.jsonl"
    rows = []
    for k in range(3):
        first = [{"role": "system", "content": "answer briefly " * 20}, {"role": "user", "content": f"question {k}"}]
        second = [*first, {"role": "assistant", "content": "recorded"}, {"role": "user", "content": "and then"}]
        rows += [
            {"timestamp": 100 + k, "session_id": f"c{k}", "messages": first, "max_tokens": 4},
            {"timestamp": 100.5 + k, "session_id": f"c{k}", "messages": second, "max_tokens": 4},
        ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def bench(trace: Path, out: Path, *more: str) -> dict[str, Any]:
    result = prefixwatch(
        "bench", "--trace", str(trace), "--policy", "cache_aware", "--repeats", "1", "--workers", "1", "--json",
        "--out", str(out), *more,
    )  # fmt: skip
    assert result.code in (0, 1, 3), result.err
    assert f"Replaying {len(trace.read_text().splitlines())} of" in result.err
    report: dict[str, Any] = json.loads(next((out / "logs").glob("*/run.json")).read_text())
    return report


def sent_alone(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that came when all before them were answered; on a busy machine some come earlier, and can't hit all."""
    return [
        record
        for k, record in enumerate(records)
        if k and (record.sent_s or 0.0) > max(before.end_s or 0.0 for before in records[:k])
    ]


def test_a_mooncake_trace_is_replayed_over_http_token_by_token(tmp_path: Path) -> None:
    report = bench(mooncake(tmp_path), tmp_path / "out")
    assert (report["loop"], report["answers"], report["retokenization_loss_tokens"]) == ("open", "recorded", None)
    records = read_requests(tmp_path / "out" / "requests.parquet")
    assert [record.prompt_tokens for record in records] == [1300 + k for k in range(12)]
    alone = sent_alone(records)
    assert len(alone) >= 3
    for record in alone:
        expected = reusable_part(record.planned_shared_tokens, record.planned_prompt_tokens, 16)
        assert record.cached_tokens == expected
        assert expected >= 512


def test_a_conversation_is_replayed_with_the_answers_of_this_run(tmp_path: Path) -> None:
    """kubernetes-sigs/inference-perf#649 (LT02)."""
    report = bench(conversation(tmp_path), tmp_path / "out", "--answers", "generated")
    assert report["answers"] == "generated"
    assert report["retokenization_loss_tokens"] >= 3  # a token of every answer stands differently in the next prompt
    records = read_requests(tmp_path / "out" / "requests.parquet")
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 6
    assert all(record.prompt_tokens == record.planned_prompt_tokens for record in records)
    for record in sent_alone(records):
        assert record.cached_tokens == reusable_part(record.planned_shared_tokens, record.prompt_tokens or 0, 16)


def test_analyze_answers_the_same_for_files_and_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    found = json.loads(prefixwatch("analyze", str(mooncake(tmp_path)), "--json").out)
    assert found["infinite_cache"]["hit_tokens"] == 512 + 10 * 1024
    assert found["lost_tokens"] is None
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 1, "hash_ids": [1], "input_length": 5, "output_length": 1}\n{"timestamp"\n')
    result = prefixwatch("analyze", str(broken))
    assert result.code == 2
    assert "broken.jsonl:2: not a JSON object in one line" in result.err


def test_what_the_replay_is_is_said(tmp_path: Path) -> None:
    scenario = chosen_scenario(None, TraceOptions(mooncake(tmp_path), speed=0.5, answers="generated"), 2.0)
    (note,) = scenario_notes(scenario)
    assert note.startswith("Replaying 4 of 12 requests of")
    assert "(mooncake): the first 2 s (--duration) at 0.5 times the recorded speed" in note
    assert note.endswith("answers of earlier turns as generated in this run.")


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        (None, None, "give a scenario or a recording"),
        ("smoke", {}, "scenario smoke draws its own requests"),
        (None, {"answers": "guessed"}, "--answers guessed: choose recorded or generated"),
    ],
)
def test_impossible_choices_are_refused(
    tmp_path: Path, name: str | None, options: dict[str, Any] | None, complaint: str
) -> None:
    trace = None if options is None else TraceOptions(mooncake(tmp_path), **options)
    with pytest.raises(UsageError, match=complaint):
        chosen_scenario(name, trace)


def test_a_closed_loop_says_that_it_is_one() -> None:
    scenario = chosen_scenario("smoke").at_concurrency(4)
    assert next(scenario_notes(scenario)).startswith(
        "Closed loop of 4 users: a server that stalls is sent fewer requests"
    )


def test_pictures_in_a_recording_count_as_differences(tmp_path: Path) -> None:
    """vllm#33304, llm-d-kv-cache#411 (N35): the same question about other pictures shares nothing behind them."""
    question = {"type": "text", "text": "describe what you see and list every defect of the part " * 30}
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"i{k}.png"}}, question]}
            ]
        }
        for k in (0, 1, 2, 0)
    ]
    file = tmp_path / "images.jsonl"
    file.write_text("".join(json.dumps({"timestamp": k, "body": row}) + "\n" for k, row in enumerate(rows)))
    found = json.loads(prefixwatch("analyze", str(file), "--json").out)
    share = found["prompt_tokens"] / 4
    hits = found["infinite_cache"]["hit_tokens"]
    assert share - 2 * 16 < hits < share + 3 * 32  # the last one repeats the first; the others share the head
    assert found["notes"][0].startswith("4 of 4 requests have images, audio or files")


def test_a_recording_without_times_and_a_window_without_requests_are_refused_at_once(tmp_path: Path) -> None:
    """It started, said "Replaying 0 of 6 requests" and failed in a process of its own."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(UsageError, match=r"log.jsonl:1: has no time"):
        chosen_scenario(None, TraceOptions(log))
    rows = [{"timestamp": t, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]} for t in (0, 9000)]
    log.write_text("\n".join(map(json.dumps, rows)))
    scenario = chosen_scenario(None, TraceOptions(log, from_seconds=5))
    assert "Replaying 1 of 1 requests" in next(scenario_notes(scenario))
    with pytest.raises(DocumentError, match="no request between 20 and inf s"):
        chosen_scenario(None, TraceOptions(log, from_seconds=20))
