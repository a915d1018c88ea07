"""`bench --grafana`, `--metrics-listen` and `--otlp`: a run is seen on dashboards while it goes on."""

from __future__ import annotations

import gzip
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from prefixwatch.engines.process import free_port
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.bench.watching.run_metrics import RunMetrics
from tests.stack.command_line import prefixwatch

SCENARIO = """
name: seen
duration_seconds: 3
arrivals: {rate_per_second: 20}
groups: {count: 2, shared_tokens: 64, unique_tokens: 16, output_tokens: 2}
engine: {workers: 1, profile: assumed-gpu}
slo: [availability]
"""


@dataclass
class Heard:
    """What came to the server: Grafana's API, and a collector's."""

    url: str = ""
    status: int = 200
    answer: dict[str, Any] | None = None
    """Instead of Grafana's own."""
    asked: list[tuple[str, str, str, Any]] = field(default_factory=list)
    """Method, path, authorization and body."""
    pushed: list[ExportMetricsServiceRequest] = field(default_factory=list)


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/metrics":
                unpacked = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                found.pushed.append(ExportMetricsServiceRequest.FromString(unpacked))
                return self._answer(200, ExportMetricsServiceResponse().SerializeToString(), "application/x-protobuf")
            authorization = self.headers.get("Authorization", "")
            found.asked.append((self.command, self.path, authorization, json.loads(body)))
            answer = {"message": "Annotation added", "id": 40 + len(found.asked)}
            answer = answer if found.answer is None else found.answer
            return self._answer(found.status, json.dumps(answer).encode(), "application/json")

        do_PATCH = do_POST

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Standard error is the test's."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    file = tmp_path / "seen.yaml"
    file.write_text(SCENARIO)
    return str(file)


def page_of(address: str, found: list[str], stop: threading.Event) -> None:
    """Keep the pages that can be read."""
    while not stop.wait(0.2):
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=2) as answer:
                found.append(answer.read().decode())
        except OSError:
            continue


def test_a_run_is_marked_on_grafana_and_its_figures_are_served_and_pushed(
    heard: Heard, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", "glsa_secret")
    address, pages, stop = f"127.0.0.1:{free_port()}", list[str](), threading.Event()
    reader = threading.Thread(target=page_of, args=(address, pages, stop))
    reader.start()
    fixed = ("--policy", "round_robin", "--repeats", "1", "--out", str(tmp_path / "out"))
    grafana = ("--grafana", heard.url, "--grafana-token-env", "GRAFANA_TOKEN")
    begun_ms = time.time() * 1e3
    try:
        result = prefixwatch("bench", scenario, *fixed, *grafana, "--metrics-listen", address, "--otlp", heard.url)
    finally:
        stop.set()
        reader.join()
    assert result.code in (0, 3), result.err

    begun, ended = heard.asked
    assert begun[:3] == ("POST", "/api/annotations", "Bearer glsa_secret")
    assert begun_ms <= begun[3].pop("time") <= ended[3]["timeEnd"] - 3000
    assert begun[3] == {
        "tags": ["prefixwatch", "bench", "scenario:seen", "policy:round_robin"],
        "text": "prefixwatch bench: seen, round_robin, repeat 1",
    }
    assert ended[:3] == ("PATCH", "/api/annotations/41", "Bearer glsa_secret")
    [report] = [json.loads(file.read_text()) for file in tmp_path.rglob("run.json")]
    counts = report["counts"]
    assert f"repeat 1: {counts['completed']} of {counts['planned']} completed" in ended[3]["text"]

    labels = 'policy="round_robin",repeat="0",scenario="seen"'
    assert any(f"prefixwatch_bench_planned_requests{{{labels}}}" in page for page in pages)
    last = {metric.name: metric for metric in heard.pushed[-1].resource_metrics[0].scope_metrics[0].metrics}
    done = {
        next(a.value.string_value for a in point.attributes if a.key == "outcome"): point.as_int
        for point in last["prefixwatch.bench.requests"].sum.data_points
    }
    assert last["prefixwatch.bench.requests"].sum.is_monotonic
    assert (done["completed"], done["failed"]) == (counts["completed"], 0)
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*.yaml"))
    assert "glsa_secret" not in everything + result.err


def test_a_grafana_that_refuses_ends_the_bench_before_it_sends(heard: Heard, scenario: str, tmp_path: Path) -> None:
    heard.status = 403
    fixed = ("--policy", "round_robin", "--repeats", "1", "--out", str(tmp_path / "out"))
    result = prefixwatch("bench", scenario, *fixed, "--grafana", heard.url)
    assert result.code == 2
    assert "answers 403: name the environment variable" in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--metrics-listen", "here"), "--metrics-listen here: write it as HOST:PORT"),
        (("--otlp", "collector:4318"), "--otlp collector:4318: give it as http://HOST:PORT"),
        (("--grafana-token-env", "T"), "--grafana-token-env: only with --grafana"),
    ],
)
def test_addresses_that_are_none_are_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = prefixwatch("bench", "smoke", "--policy", "round_robin", "--out", str(tmp_path), *options)
    assert (result.code, message in " ".join(result.err.split())) == (2, True)


def test_what_is_not_known_yet_has_no_sample() -> None:
    metrics = RunMetrics("s")
    metrics.update(Run(1, "p", 0), {"planned": 9, "in_flight": 2, "ttft_p50_ms": None, "ttft_p95_ms": None})
    found = {family.name: [s.value for s in family.samples] for family in metrics.collect()}
    assert found["prefixwatch_bench_planned_requests"] == [9]
    assert found["prefixwatch_bench_ttft_seconds"] == []
    metrics.update(Run(1, "p", 0), {"ttft_p50_ms": 120.0, "completed": 4})
    found = {family.name: [s.value for s in family.samples] for family in metrics.collect()}
    assert (found["prefixwatch_bench_ttft_seconds"], found["prefixwatch_bench_requests"]) == ([0.12], [4])


def test_an_answer_that_names_no_annotation_ends_the_bench_before_it_sends(
    heard: Heard, scenario: str, tmp_path: Path
) -> None:
    heard.answer = {}
    out = ("--policy", "round_robin", "--repeats", "1", "--out", str(tmp_path / "out"))
    result = prefixwatch("bench", scenario, *out, "--grafana", heard.url)
    assert (result.code, "makes no annotation: is it Grafana's address?" in result.err) == (2, True), result.err
    assert not list(tmp_path.rglob("run.json"))
