"""`bench --target --approximate-prompts`: a server whose tokenizer nobody has still gets a verdict."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import prefixwatch
from prefixwatch.stack.bench.bench import run_bench
from prefixwatch.stack.bench.options import BenchOptions
from prefixwatch.stack.errors import UsageError
from tests.stack.summary_figures import value

SCENARIO = """
name: few
duration_seconds: 12
arrivals: {kind: constant, rate_per_second: 10}
groups: {count: 2, shared_tokens: 64, unique_tokens: 16, output_tokens: 2}
slo: [availability]
"""


class Server(BaseHTTPRequestHandler):
    """Counts a prompt a tenth longer than a word a token, reports no cached tokens and has no /tokenize."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "theirs"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": round(1.1 * words), "completion_tokens": 2}
        events: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in (" a", " b")]
        events.append({"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._answer("text/event-stream", text.encode())

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_latencies_are_judged_and_what_rests_on_exact_prompts_is_left_out(url: str, tmp_path: Path) -> None:
    scenario = tmp_path / "few.yaml"
    scenario.write_text(SCENARIO)
    options = BenchOptions(
        scenario=str(scenario), target=url, approximate_prompts=True, repeats=1, out=tmp_path / "out"
    )

    summary, _ = run_bench(options, Console(file=io.StringIO()))

    own = summary["policies"]["target"]
    assert own["requests"]["completed"] == own["requests"]["scheduled"] == 120
    assert not [reason for reason in summary["validity"]["reasons"] if "prompt length" in reason]
    assert any(note.startswith("approximate prompts: ") for note in summary["notes"])
    assert summary["runs"][0]["prompts"] == "approximate"
    assert value(own, "ttft_p95") > 0
    assert value(own, "expected_hit_tokens") is value(own, "ttft_hit_p50") is own["isolation_violations"] is None
    run = prefixwatch.read_run(tmp_path / "out")
    assert run.requests.prompt_tokens.between(80, 95).all(), "80 words and the opening, by their tokenizer"
    assert run.requests.reusable_tokens.isna().all()
    assert run.verdict == summary["verdict"]


def test_it_is_for_targets_without_a_tokenizer(url: str, tmp_path: Path) -> None:
    for options in (
        BenchOptions(scenario="smoke", approximate_prompts=True, out=tmp_path / "a"),
        BenchOptions(scenario="smoke", target=url, approximate_prompts=True, model_dir=tmp_path, out=tmp_path / "b"),
    ):
        with pytest.raises(UsageError, match="--approximate-prompts goes with --target, without --model-dir"):
            run_bench(options, Console(file=io.StringIO()))
