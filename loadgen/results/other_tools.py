"""Results of other load generators as rows of our request log: AIPerf, GuideLLM, inference-perf, `vllm bench serve`.

Each reader takes the tool's stamps and leaves the tool's own figures: percentiles, goodput and verdicts are computed by
our definitions. What a tool doesn't record stays unknown, and `notes` says which figures that concerns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord

Row = Mapping[str, Any]
REFUSALS = ("429", "503")
FILES = ("profile_export.jsonl", "benchmarks.json", "per_request_lifecycle_metrics.json")
"""What the tools call their files of requests; `vllm bench serve` names its file after the run."""

NO_PLAN = (
    "{tool} doesn't record what prompts share, tenants or workers: efficiency, hit, partial hit and miss, hotspots and "
    "isolation are unknown."
)
NO_SCHEDULE = (
    "{tool} doesn't record when a request was due: latencies count from the sending, so that a wait inside the client "
    "isn't in them."
)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The requests of a finished run of another tool."""

    tool: str
    records: list[RequestRecord]
    notes: list[str]


@dataclass(slots=True)
class _Request:
    """A request in the tool's own clock, seconds; None for what the tool doesn't record."""

    sent: float
    due: float | None = None
    first: float | None = None
    first_answer: float | None = None
    end: float | None = None
    outcome: Outcome = Outcome.COMPLETED
    error: str = ""
    status: int | None = None
    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    gaps_ms: list[float] = field(default_factory=list)
    session: str = ""
    turn: int = 0
    policy: str = ""
    warm_up: bool = False


def read_tool_result(path: Path) -> ToolResult | None:
    """The result in this file, or in this folder under the tool's name for it; None for anything else.

    Raises InputError for a file of such a tool that has no rows of requests.
    """
    file = next((path / name for name in FILES if (path / name).exists()), path) if path.is_dir() else path
    if file.is_dir() or file.suffix not in (".json", ".jsonl"):
        return None
    try:
        rows = _rows(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{file}: can't be read as JSON: {error}") from error
    for tool, (recognised, read, missing) in _TOOLS.items():
        if rows and recognised(rows[0]):
            try:
                found = list(read(rows))
            except (KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{file}: isn't a result of {tool} as this version knows it: {error!r}") from error
            except InputError as error:
                raise InputError(f"{file}: {error}") from error
            return ToolResult(tool, _records(tool, file, found), _notes(tool, found, missing))
    raise InputError(
        f"{file}: not a result that can be read: give a prefixwatch run, AIPerf's profile_export.jsonl, GuideLLM's "
        "benchmarks.json, inference-perf's per_request_lifecycle_metrics.json, or a file of vllm bench serve "
        "--save-result --save-detailed"
    )


def _rows(text: str) -> list[Row]:
    """A JSON array's items, JSON lines, or the one object of the file."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = [json.loads(line) for line in text.splitlines() if line.strip()]
    rows = whole if isinstance(whole, list) else [whole]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("its items aren't JSON objects")
    return rows


def _records(tool: str, file: Path, found: Sequence[_Request]) -> list[RequestRecord]:
    if not found:
        raise InputError(f"{file}: has no request")
    zero = min(request.sent if request.due is None else request.due for request in found)
    ordered = sorted(found, key=lambda request: (request.policy, request.sent))

    def at(moment: float | None) -> float | None:
        return None if moment is None else moment - zero

    return [
        RequestRecord(
            id=f"{request.policy or tool}-{index}",
            policy=request.policy or tool,
            repeat=0,
            index=index,
            phase="warm_up" if request.warm_up else "measured",
            tenant="-",
            session=request.session or f"r{index}",
            turn=request.turn,
            group="-",
            request_class="-",
            scheduled_s=(request.sent if request.due is None else request.due) - zero,
            sent_s=request.sent - zero,
            first_token_s=at(request.first),
            first_answer_s=at(request.first_answer),
            end_s=at(request.end),
            outcome=request.outcome,
            status=request.status,
            error=request.error,
            planned_prompt_tokens=request.prompt or 0,
            prompt_tokens=request.prompt,
            cached_tokens=request.cached,
            output_tokens=request.output,
            chunk_gaps_ms=request.gaps_ms,
        )
        for index, request in enumerate(ordered)
    ]


def _notes(tool: str, found: Sequence[_Request], missing: Sequence[str]) -> list[str]:
    texts = [NO_PLAN]
    if all(request.due is None for request in found):
        texts.append(NO_SCHEDULE)
    if all(request.first is None for request in found):
        texts.append("{tool} recorded no first token, since the answers weren't streamed: TTFT and TPOT are unknown.")
    if all(request.cached is None for request in found):
        texts.append("{tool} recorded no cached tokens: hit tokens are unknown.")
    return [f"The requests are from {tool}; figures are computed from its stamps by prefixwatch's definitions."] + [
        text.format(tool=tool) for text in (*texts, *missing)
    ]


def _failure(text: str, code: Any = None, kind: str = "") -> tuple[Outcome, str, int | None]:
    """Outcome, error and HTTP status of a failed request, from what the tool kept of it."""
    status = code if isinstance(code, int) and 100 <= code < 600 else None
    words = f"{kind} {text}".lower()
    if "cancel" in words:
        return Outcome.CANCELLED, text, None
    if str(status) in REFUSALS or any(word in words for word in ("too many requests", "service unavailable")):
        return Outcome.REFUSED, text, status
    if "timeout" in words or "timed out" in words:
        return Outcome.TIMED_OUT, text, status
    return Outcome.FAILED, text or kind or "unknown", status


def _aiperf(rows: Sequence[Row]) -> Iterator[_Request]:
    """profile_export.jsonl: `metadata` with stamps in ns, `metrics` with values and units, `error`."""
    for row in rows:
        metadata, metrics = row["metadata"], row.get("metrics") or {}
        sent = metadata["request_start_ns"] / 1e9
        due = metadata.get("credit_issued_ns")
        request = _Request(sent, due=None if due is None else due / 1e9, end=_seconds(metadata.get("request_end_ns")))
        request.session = str(metadata.get("x_correlation_id") or "")
        request.turn = int(metadata.get("turn_index") or 0)
        request.warm_up = metadata.get("benchmark_phase") == "warmup"
        request.prompt = _number(metrics, "input_sequence_length", "error_isl", kind=int)
        request.output = _number(metrics, "output_sequence_length", "output_token_count", kind=int)
        request.cached = _number(metrics, "usage_prompt_cache_read_tokens", kind=int)
        ttft, answer = _number(metrics, "time_to_first_token"), _number(metrics, "time_to_first_output_token")
        request.first = None if ttft is None else sent + ttft / 1e3
        request.first_answer = None if answer is None else sent + answer / 1e3
        request.gaps_ms = _number(metrics, "inter_chunk_latency", kind=list) or []
        if (error := row.get("error")) is not None or metadata.get("was_cancelled"):
            error = error or {"type": "cancelled"}
            request.outcome, request.error, request.status = _failure(
                str(error.get("message") or ""), error.get("code"), str(error.get("type") or "")
            )
        yield request


def _seconds(nanoseconds: Any) -> float | None:
    return None if nanoseconds is None else float(nanoseconds) / 1e9


def _number(metrics: Row, *names: str, kind: Callable[[Any], Any] = float) -> Any:
    value = next((metrics[name]["value"] for name in names if metrics.get(name) is not None), None)
    return None if value is None else kind(value)


def _guidellm(rows: Sequence[Row]) -> Iterator[_Request]:
    """benchmarks.json: each benchmark's `requests` by how they ended, with `info.timings` in Unix seconds."""
    benchmarks = rows[0]["benchmarks"]
    for number, benchmark in enumerate(benchmarks):
        policy = "GuideLLM" if len(benchmarks) == 1 else f"GuideLLM {number + 1}: {_strategy(benchmark)}"
        for ended, own in benchmark["requests"].items():
            if ended not in ("successful", "errored", "incomplete"):
                continue
            for row in own or ():
                yield _guidellm_request(row, ended, policy)


def _guidellm_request(row: Row, ended: str, policy: str) -> _Request:
    info = row.get("info") or row.get("scheduler_info") or {}
    stamps = {**row, **info, **(info.get("timings") or {})}

    def first(*names: str) -> Any:
        return next((stamps[name] for name in names if stamps.get(name) is not None), None)

    sent = first("request_start", "resolve_start", "start_time", "request_start_time")
    if sent is None:
        raise InputError(
            "a request has no start: run GuideLLM with all requests in the output (--output-extras or json)"
        )
    request = _Request(sent, policy=policy, due=first("targeted_start", "targeted_start_time"))
    request.first = first("first_token_iteration", "first_token_time", "first_iteration", "first_request_iteration")
    request.first_answer = first("first_output_token_iteration")
    request.end = first("request_end", "resolve_end", "end_time", "request_end_time")
    request.prompt = first("prompt_tokens") or (row.get("input_metrics") or {}).get("text_tokens")
    request.output = first("output_tokens") or (row.get("output_metrics") or {}).get("text_tokens")
    request.session, request.turn = str(first("conversation_id") or ""), int(first("turn_index") or 0)
    if ended == "incomplete":
        request.outcome, request.error = Outcome.CANCELLED, "unfinished at the end of the benchmark"
    elif ended == "errored":
        request.outcome, request.error, request.status = _failure(str(first("error") or ""))
    return request


def _strategy(benchmark: Row) -> str:
    config = benchmark.get("config") or benchmark.get("args") or {}
    strategy = config.get("strategy") or {}
    kind = strategy.get("type_") or strategy.get("kind") or "benchmark"
    value = next((strategy[name] for name in ("rate", "streams", "concurrency") if strategy.get(name)), None)
    return kind if value is None else f"{kind} {value:g}"


def _inference_perf(rows: Sequence[Row]) -> Iterator[_Request]:
    """per_request_lifecycle_metrics.json: monotonic seconds, and the times of chunks or events."""
    for row in rows:
        info = row.get("info") or {}
        answer = info.get("response_metrics") or info
        usage = answer.get("server_usage") or {}
        times = answer.get("chunk_times") or answer.get("output_token_times") or []
        request = _Request(row["start_time"], due=row.get("scheduled_time"), end=row["end_time"])
        request.first = times[0] if times else None
        request.gaps_ms = [(b - a) * 1e3 for a, b in pairwise(times)]
        request.prompt = usage.get("prompt_tokens") or info.get("input_tokens") or None
        request.output = usage.get("completion_tokens") or answer.get("output_tokens") or None
        request.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        request.session = str(row.get("session_id") or "")
        if (error := row.get("error")) is not None:
            request.outcome, request.error, request.status = _failure(
                str(error.get("error_msg") or ""), kind=str(error.get("error_type") or "")
            )
        yield request


def _vllm_bench(rows: Sequence[Row]) -> Iterator[_Request]:
    """A result of `vllm bench serve`, one object per run: parallel lists over its requests."""
    for number, row in enumerate(rows):
        for name in ("ttfts", "itls", "input_lens", "output_lens", "errors", "start_times"):
            if name not in row:
                raise InputError(f"has no {name}: run vllm bench serve with --save-result --save-detailed")
        columns = (row[name] for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors"))
        policy = str(row.get("label") or "vllm bench serve")
        for start, ttft, gaps, prompt, output, error in zip(*columns, strict=True):
            request = _Request(start, prompt=prompt, policy=policy if len(rows) == 1 else f"{policy} {number + 1}")
            if error:
                request.outcome, request.error, request.status = _failure(error.strip().splitlines()[-1])
            else:
                request.first, request.end = start + ttft, start + ttft + sum(gaps)
                request.output, request.gaps_ms = output, [gap * 1e3 for gap in gaps]
            yield request


_TOOLS: dict[str, tuple[Callable[[Row], bool], Callable[[Sequence[Row]], Iterator[_Request]], tuple[str, ...]]] = {
    "AIPerf": (lambda row: "metadata" in row and ("metrics" in row or "error" in row), _aiperf, ()),
    "GuideLLM": (
        lambda row: "benchmarks" in row,
        _guidellm,
        ("{tool} doesn't record the gaps between chunks: ITL is unknown, and TPOT ends with the answer.",),
    ),
    "inference-perf": (
        lambda row: "start_time" in row and "end_time" in row and "info" in row,
        _inference_perf,
        ("{tool} may take an event without text as the first token: TTFT is then too short.",),
    ),
    "vllm bench serve": (
        lambda row: "request_throughput" in row and "completed" in row,
        _vllm_bench,
        (
            "{tool} takes the first event as the first token, even one without text, and keeps no HTTP status: refused "
            "requests are recognised by their text alone.",
        ),
    ),
}
"""How each tool's first row is recognised, its reader, and what else it can't give."""
