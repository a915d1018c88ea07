"""`prefixwatch trace export`: an exporter's live records become a trace that simulate and plan read."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prefixwatch.documents.errors import InputError
from prefixwatch.exporters.live.live_trace import LiveTrace, trace_row
from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.kvcache.request_record import RequestRecord, mark_depths
from prefixwatch.loadgen.recordings.reader import read_recording
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.planning.plan import PlanOptions, run_plan
from prefixwatch.stack.traffic.trace import ExportOptions, run_export

KEY = b"k" * 32


def record(tokens: list[int], ended: float = 1_700_000_000.0, **fields: object) -> RequestRecord:
    """As the router's recorder makes it."""
    blocks = block_hashes(np.array(tokens, dtype=np.uint32), 16).tolist()
    given = {
        "ended_unix_seconds": ended, "outcome": "completed", "prompt_tokens": len(tokens), "output_tokens": 20,
        "e2e_seconds": 0.5, "block_size": 16, "session": "s", "tenant": "acme", "model": "m",
        "marks": tuple(blocks[depth - 1] & 0xFFFFFFFF for depth in mark_depths(len(blocks))),
        "prompt_block": blocks[-1] if blocks else None,
    }  # fmt: skip
    return RequestRecord(**{**given, **fields})  # type: ignore[arg-type]


@pytest.fixture
def served() -> Iterator[tuple[LiveTrace, str]]:
    trace = LiveTrace()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            after = int(parse_qs(urlsplit(self.path).query)["after"][0])
            body = json.dumps(trace.page(after)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield trace, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_day_of_records_answers_how_many_workers(served: tuple[LiveTrace, str], tmp_path: Path) -> None:
    trace, url = served
    rng = np.random.default_rng(1)
    opening = rng.integers(0, 1000, 512).tolist()
    for k in range(300):
        prompt = [*opening, *rng.integers(0, 1000, 100).tolist()]
        trace.add(record(prompt, 1_700_000_000.0 + 2 * k, session=f"s{k % 9}"))
    out = tmp_path / "day.jsonl"

    found = run_export(ExportOptions(exporter=url, out=out), quiet())

    assert (found["requests"], found["without_blocks"], found["lost"]) == (300, 0, 0)
    recording = read_recording(out)
    assert (recording.block_tokens, len(recording.requests)) == (16, 300)
    first, second = recording.requests[:2]
    assert second.arrival_s == pytest.approx(2.0)
    assert (second.prompt_tokens, second.output_tokens) == (612, 20)
    assert (second.tenant, second.model, second.session) == ("acme", "m", "s1")
    shared = sum(a == b for a, b in zip(first.block_ids or (), second.block_ids or (), strict=True))
    assert 0.75 * 32 <= shared <= 32
    assert "acme" in out.read_text()
    assert not any(str(block) in out.read_text() for block in block_hashes(np.array(opening, dtype=np.uint32), 16))
    planned, code = run_plan(PlanOptions(source=str(out), policy="round_robin", speed=1.5), quiet())
    assert code == 0
    assert planned["plans"][0]["workers"] >= 1
    url = served[1]
    live, _ = run_plan(PlanOptions(source=url, policy="round_robin", speed=1.5), quiet())
    assert (live["traffic"], live["requests"], live["notes"]) == (url, 300, [])
    assert live["plans"][0]["fleets"] == planned["plans"][0]["fleets"]


def test_a_plan_of_live_requests_says_what_it_does_not_know(served: tuple[LiveTrace, str]) -> None:
    trace, url = served
    for k in range(20):
        trace.add(record(list(range(400)), ended=1_700_000_000.0 + k, marks=(), prompt_block=None))
    trace.add(record([], ended=1_700_000_030.0, prompt_tokens=None))
    live, _ = run_plan(PlanOptions(source=url, policy="round_robin"), quiet())
    assert live["notes"] == [
        "20 live requests have no block marks and count as sharing nothing.",
        "1 live requests were left out: the length of their prompts is unknown.",
    ]
    assert live["plans"][0]["hit_ratio"] == 0.0


def test_what_a_plan_of_live_requests_lacks_is_named_with_what_to_do(served: tuple[LiveTrace, str]) -> None:
    """One request was called several that arrive at once, and a window without any named a file that is gone."""
    trace, url = served

    def refused(**options: Any) -> str:
        with pytest.raises(InputError) as told:
            run_plan(PlanOptions(source=url, policy="round_robin", **options), quiet())
        return str(told.value)

    assert refused() == (
        f"{url} has seen no request yet: send traffic through a prefixwatch router among its exporter.targets, or send "
        "it spans (exporter.otlp), and try again"
    )
    trace.add(record([], prompt_tokens=None))
    assert refused().startswith(f"{url} has 1 requests, and the length of no prompt is known: give the router a token")
    trace.add(record(list(range(64))))
    assert refused() == (
        f"{url}: has only one request, and a plan needs some at different times: send more traffic, and plan again"
    )
    trace.add(record(list(range(64))))
    assert f"{url}: has 2 requests that all arrive at once" in refused()
    assert refused(from_seconds=100.0).startswith(f"{url}: no request between 100 and inf s")


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60))
def test_prompts_share_at_most_a_quarter_less_than_they_did_and_never_more(common: int, a: int, b: int) -> None:
    opening = list(range(16 * common))
    rows = [
        trace_row(record([*opening, *([1_000_000 + own] * 16 * count)]), KEY)
        for own, count in enumerate((a, b), start=1)
    ]
    left, right = (row["hash_ids"] for row in rows if row is not None)
    shared = next((k for k, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    assert shared <= common
    assert shared >= max(depth for depth in [0, *mark_depths(min(len(left), len(right)))] if depth <= common) * 0.79 - 1


def test_what_is_missing_is_counted(served: tuple[LiveTrace, str], tmp_path: Path) -> None:
    trace, url = served
    trace.add(record(list(range(64)), marks=()))
    trace.add(record([], prompt_tokens=None))
    console = quiet()
    found = run_export(ExportOptions(exporter=url, out=tmp_path / "t.jsonl"), console)
    assert (found["requests"], found["without_blocks"], found["without_length"]) == (1, 1, 1)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 requests have no block marks" in text
    assert "1 requests were left out: the length of their prompts is unknown" in text


def test_a_longer_export_gets_what_comes_meanwhile_and_says_what_was_lost(
    served: tuple[LiveTrace, str], tmp_path: Path
) -> None:
    trace, url = served
    trace.__init__(kept=3)  # type: ignore[misc]
    trace.add(record(list(range(64))))
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        for _ in range(5):
            trace.add(record(list(range(64))))

    options = ExportOptions(exporter=url, out=tmp_path / "t.jsonl", seconds=5)
    found = run_export(options, quiet(), clock=lambda: now, sleep=sleep)
    assert (found["requests"], found["lost"]) == (4, 2)


def test_nothing_to_export_and_nobody_there_are_errors(served: tuple[LiveTrace, str], tmp_path: Path) -> None:
    _, url = served
    with pytest.raises(UsageError, match="has seen no request yet: send traffic through a prefixwatch router"):
        run_export(ExportOptions(exporter=url, out=tmp_path / "t.jsonl"), quiet())
    assert not (tmp_path / "t.jsonl").exists()
    with pytest.raises(UsageError, match=r"--exporter: http://127\.0\.0\.1:1/api/v1/trace: .*; is it running"):
        run_export(ExportOptions(exporter="http://127.0.0.1:1", out=tmp_path / "t.jsonl"), quiet())


def test_block_sizes_of_unlike_engines_need_files_of_their_own(tmp_path: Path) -> None:
    rows = [trace_row(record(list(range(64)), block_size=size), KEY) for size in (16, 32)]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(Exception, match="block_size 32, and 16 in other lines: give one file per block size"):
        read_recording(file)
