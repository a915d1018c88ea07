"""Results of AIPerf, GuideLLM, inference-perf and `vllm bench serve`, in small files of their documented shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.request_log.records import Outcome, record_from
from prefixwatch.loadgen.results.comparison import run_compare
from prefixwatch.loadgen.results.run_folder import read_run
from prefixwatch.stack.cli.slo_grade import grade


@dataclass(frozen=True)
class Sent:
    """A request as a tool saw it; times in seconds."""

    at: float
    ttft: float = 0.1
    gaps: tuple[float, ...] = (0.02, 0.03)
    error: str = ""
    code: int | None = None
    kind: str = ""


REQUESTS = [
    Sent(0.0),
    Sent(1.0, ttft=0.25),
    Sent(2.0, error="429: Too Many Requests", code=429, kind="HTTPError"),
    Sent(3.0, error="Request timed out", kind="TimeoutError"),
]
START = 1_760_000_000.0


def aiperf(folder: Path, requests: list[Sent]) -> Path:
    rows = []
    for number, sent in enumerate(requests):
        total = 0.0 if sent.error else sent.ttft + sum(sent.gaps)
        metrics: dict[str, Any] = {
            "input_sequence_length": {"value": 550, "unit": "tokens"},
            "time_to_first_token": {"value": sent.ttft * 1e3, "unit": "ms"},
            "request_latency": {"value": total * 1e3, "unit": "ms"},
            "output_sequence_length": {"value": 3, "unit": "tokens"},
            "inter_chunk_latency": {"value": [gap * 1e3 for gap in sent.gaps], "unit": "ms"},
        }
        rows.append({
            "metadata": {
                "session_num": number, "x_request_id": f"x{number}", "x_correlation_id": f"c{number}", "turn_index": 0,
                "request_start_ns": int((START + sent.at) * 1e9), "request_ack_ns": None,
                "request_end_ns": int((START + sent.at + total) * 1e9), "benchmark_phase": "profiling",
                "was_cancelled": False, "cancellation_time_ns": None,
            },
            "metrics": {"error_isl": {"value": 550, "unit": "tokens"}} if sent.error else metrics,
            "error": {"code": sent.code, "type": sent.kind, "message": sent.error} if sent.error else None,
        })  # fmt: skip
    (folder / "profile_export.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def guidellm(folder: Path, requests: list[Sent]) -> Path:
    ended: dict[str, list[Any]] = {"successful": [], "errored": [], "incomplete": []}
    for number, sent in enumerate(requests):
        start, total = START + sent.at, sent.ttft + sum(sent.gaps)
        timings = {"targeted_start": start, "resolve_start": start, "request_start": start}
        if not sent.error:
            timings |= {"first_token_iteration": start + sent.ttft, "last_token_iteration": start + total}
            timings |= {"request_end": start + total}
        ended["errored" if sent.error else "successful"].append({
            "request_id": f"g{number}",
            "info": {"status": "errored" if sent.error else "completed", "timings": timings,
                     "error": sent.error or None},
            "input_metrics": {"text_tokens": 550}, "output_metrics": {"text_tokens": None if sent.error else 3},
        })  # fmt: skip
    file = folder / "benchmarks.json"
    file.write_text(json.dumps({"metadata": {"version": 1}, "benchmarks": [{"requests": ended}]}, indent=1))
    return file


def inference_perf(folder: Path, requests: list[Sent]) -> Path:
    rows = []
    for sent in requests:
        times = list(np.cumsum([sent.at + sent.ttft, *sent.gaps])) if not sent.error else []
        rows.append({
            "scheduled_time": 500 + sent.at, "start_time": 500 + sent.at,
            "end_time": 500 + (times[-1] if times else sent.at),
            "request": "{}", "response": "",
            "info": {"input_tokens": 550, "output_tokens": 0 if sent.error else 3,
                     "output_token_times": [500 + time for time in times]},
            "error": {"error_type": sent.kind, "error_msg": sent.error} if sent.error else None,
        })  # fmt: skip
    (folder / "per_request_lifecycle_metrics.json").write_text(json.dumps(rows))
    return folder


def vllm_bench(folder: Path, requests: list[Sent]) -> Path:
    file = folder / "openai-infqps-concurrency4-model-20261130.json"
    file.write_text(json.dumps({
        "date": "20261130", "backend": "openai-chat", "duration": 5.0, "completed": 2, "failed": 2,
        "request_throughput": 0.4, "input_lens": [550 for _ in requests],
        "output_lens": [0 if sent.error else 3 for sent in requests],
        "ttfts": [0.0 if sent.error else sent.ttft for sent in requests],
        "itls": [[] if sent.error else list(sent.gaps) for sent in requests],
        "start_times": [90 + sent.at for sent in requests], "generated_texts": ["" for _ in requests],
        "errors": [f"Traceback …\n{sent.kind}: {sent.error}" if sent.error else "" for sent in requests],
    }))  # fmt: skip
    return file


TOOLS: dict[str, Callable[[Path, list[Sent]], Path]] = {
    "AIPerf": aiperf,
    "GuideLLM": guidellm,
    "inference-perf": inference_perf,
    "vllm bench serve": vllm_bench,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_same_run_reads_alike_from_every_tool(tool: str, tmp_path: Path) -> None:
    run = read_run(TOOLS[tool](tmp_path, REQUESTS))
    rows = [record_from(row) for row in run.log.to_pylist()]
    assert [row.outcome for row in rows] == [
        Outcome.COMPLETED, Outcome.COMPLETED, Outcome.REFUSED, Outcome.TIMED_OUT,
    ]  # fmt: skip
    assert [row.scheduled_s for row in rows] == pytest.approx([0, 1, 2, 3], abs=1e-5)
    first, second = rows[:2]
    assert [row.ttft_s for row in rows] == [pytest.approx(0.1, abs=1e-5), pytest.approx(0.25, abs=1e-5), None, None]
    assert (first.end_s or 0) - first.scheduled_s == pytest.approx(0.15, abs=1e-5)
    assert [first.tpot_s, second.tpot_s] == pytest.approx([0.025, 0.025], abs=1e-5)
    assert (first.prompt_tokens, first.output_tokens, first.cached_tokens) == (550, 3, None)
    assert first.chunk_gaps_ms == ([] if tool == "GuideLLM" else pytest.approx([20, 30], abs=1e-3))
    notes = "\n".join(run.summary.notes)
    assert f"The requests are from {tool}" in notes
    assert f"{tool} recorded no cached tokens: hit tokens are unknown." in notes
    assert (f"{tool} doesn't record when a request was due" in notes) == (tool in ("AIPerf", "vllm bench serve"))
    assert run.summary.policies[tool].requests.scheduled == 4


@pytest.mark.parametrize("tool", TOOLS)
def test_grade_and_compare_take_them(tool: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    paths = []
    for name, factor in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        ttfts = 0.1 * factor * rng.lognormal(0, 0.2, 400)
        paths.append(TOOLS[tool](tmp_path / name, [Sent(k * 0.2, ttft) for k, ttft in enumerate(ttfts.tolist())]))
    found, code = grade(paths[0], ["ttft"])
    assert (found["verdict"], code) == ("pass", 0)
    compared, code = run_compare(paths[0], paths[1], [], ["ttft"], 0.0)
    assert (compared.verdict, code) == ("worse", 1)
    assert {d.metric: d.effect for d in compared.comparison}["ttft_p50"] == "worse"
    same, code = run_compare(paths[0], paths[0], [], ["ttft"], 0.0)
    assert (same.verdict, code) == ("same", 0)


def test_two_tools_are_compared_by_one_definition(tmp_path: Path) -> None:
    requests = [Sent(k * 0.2, 0.1 + 0.001 * (k % 7)) for k in range(400)]
    (tmp_path / "other").mkdir()
    files = aiperf(tmp_path, requests), vllm_bench(tmp_path / "other", requests)
    compared, code = run_compare(*files, [], ["ttft"], 0.1)  # their clocks round differently
    assert (compared.verdict, code) == ("same", 0)
    assert max(abs(d.relative) for d in compared.comparison if d.relative is not None) < 1e-4


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"request_throughput": 1.0, "completed": 3}, "has no ttfts: run vllm bench serve with --save-result --save-"),
        ({"benchmarks": [{"requests": {"successful": [{"info": {}}]}}]}, "a request has no start"),
        ({"benchmarks": [{}]}, "isn't a result of GuideLLM as this version knows it: KeyError('requests')"),
        ({"time_to_first_token": {"avg": 3}}, "not a result that can be read: give a prefixwatch run, AIPerf's"),
    ],
)
def test_a_file_without_requests_is_refused_with_the_remedy(tmp_path: Path, content: Any, complaint: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_run(file)
    assert complaint in str(caught.value)
    assert str(file) in str(caught.value)
