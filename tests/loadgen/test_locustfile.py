"""Plain Locust with our file, as a process of its own: Locust patches whatever process imports it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.documents import parse
from prefixwatch.engines.process import free_port
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.request_log.records import Outcome, read_requests
from prefixwatch.loadgen.scenario.model import Scenario
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "loadgen" / "locustfile.py"
SCENARIO = """\
name: tiny
duration_seconds: 1
warm_up_seconds: 0.2
arrivals: {rate_per_second: 20}
groups: {count: 2, shared_tokens: 64, unique_tokens: 8, output_tokens: 2}
"""


def locust_command(folder: Path, *arguments: str, file: Path = LOCUSTFILE) -> list[str]:
    scenario = folder / "tiny.yaml"
    scenario.write_text(SCENARIO)
    command = [sys.executable, "-m", "locust", "-f", str(file), "--headless", "--only-summary"]
    return [*command, "--scenario", str(scenario), *arguments]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_locust(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = locust_command(folder, *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def in_processes(count: int) -> list[str]:
    port = str(free_port())
    return ["--processes", str(count), "--master-port", port, "--master-bind-port", port]


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Locust's statistics by request type."""
    return {entry["method"]: entry for entry in json.loads((folder / "stats.json").read_text())}


def test_headless_locust_sends_the_plan_and_shows_true_times_and_lengths(
    serve: Serve, model_dir: Path, tmp_path: Path
) -> None:
    """locustio/locust#2443 (LT12) and #3492 (LT11): E2E ends at the last byte and has the body's length."""

    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content(" a")
        time.sleep(0.2)
        server.content(" b")
        server.end_stream()

    server = serve(script)
    out = tmp_path / "out"
    files = ["--out", str(out), "--json-file", str(tmp_path / "stats")]
    done = run_locust(tmp_path, "--host", server.url, "--model-dir", str(model_dir), *files)
    assert done.returncode == 0, done.stderr
    stats = entries(tmp_path)
    e2e, ttft = stats["E2E"], stats["TTFT"]
    records = read_requests(out / "requests.parquet")
    measured = [record for record in records if record.phase == "measured"]
    assert e2e["num_requests"] == ttft["num_requests"] == len(measured) < len(server.requests)
    assert e2e["min_response_time"] >= 200
    assert ttft["min_response_time"] < 200
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * len(server.requests)
    body = sum(len(f'data: {{"choices": [{{"index": 0, "delta": {{"content": " {x}"}}}}]}}\n\n') for x in "ab")
    assert e2e["total_content_length"] == len(measured) * (body + len("data: [DONE]\n\n"))


def test_failures_are_locusts_failures_and_percentiles_are_not_binned(
    serve: Serve, model_dir: Path, tmp_path: Path
) -> None:
    """locustio/locust#1563 (LT14): 149 ms would become 150 in Locust's own bins, above the maximum."""

    def script(server: Connection, sent: bytes) -> None:
        time.sleep(0.146)
        server.answer("503 Busy", {"error": {"message": "no room"}})

    done = run_locust(tmp_path, "--host", serve(script).url, "--model-dir", str(model_dir))
    assert done.returncode == 1  # Locust's own: there were failures
    counts, percentiles = (table_rows(part) for part in done.stderr.split("Response time percentiles")[:2])
    requests, failures, highest = (int(re.sub(r"\(.*", "", counts["E2E"][column])) for column in (0, 1, 4))
    assert failures == requests
    assert int(counts["Aggregated"][0]) == requests
    times = [int(time) for time in percentiles["E2E"][:-1]]
    assert any(time % 10 for time in times)
    assert max(times) <= highest
    assert "refused: http_503: no room" in done.stderr


def table_rows(text: str) -> dict[str, list[str]]:
    """Rows of Locust's tables by their first word, without it and without the request name."""
    rows = (line.replace("|", " ").replace(" tiny ", " ").split() for line in text.splitlines())
    return {row[0]: row[1:] for row in rows if row}


def test_a_time_limit_logs_what_was_sent_and_what_was_not(serve: Serve, model_dir: Path, tmp_path: Path) -> None:
    """locustio/locust#1407 (LT17): Locust kills its users at the end; the request log survives it."""
    released = threading.Event()

    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content(" a")
        released.wait(20)

    out = tmp_path / "out"
    files = ["--model-dir", str(model_dir), "--out", str(out)]
    run_locust(tmp_path, "--host", serve(script).url, *files, "--run-time", "8")
    released.set()
    records = read_requests(out / "requests.parquet")
    assert {record.outcome for record in records} == {Outcome.CANCELLED}
    assert any(record.first_token_s is not None for record in records)


def test_a_graded_run_leaves_the_results_of_a_bench_and_its_exit_code(
    serve: Serve, model_dir: Path, tmp_path: Path
) -> None:
    """29 good requests prove nothing: 3. All refused: 1."""

    def busy(server: Connection, sent: bytes) -> None:
        server.answer("503 Busy", {"error": {"message": "no room"}})

    def quick(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content(" a")
        server.end_stream()

    scenario = tmp_path / "long.yaml"
    scenario.write_text(SCENARIO.replace("duration_seconds: 1", "duration_seconds: 5"))
    for script, verdicts in ((quick, {"pass", "inconclusive"}), (busy, {"fail", "inconclusive"})):
        out = tmp_path / script.__name__
        files = ["--model-dir", str(model_dir), "--out", str(out), "--slo", "availability"]
        done = run_locust(tmp_path, "--host", serve(script).url, "--scenario", str(scenario), *files)
        summary = json.loads((out / "summary.json").read_text())
        assert summary["verdict"] in verdicts  # a busy machine's client may be late
        assert done.returncode == {"pass": 0, "fail": 1, "inconclusive": 3}[summary["verdict"]]
        assert f"Verdict: {summary['verdict'].upper()}" in done.stdout
        assert (out / "junit.xml").exists()
        assert (out / "report.html").exists()
    nowhere = run_locust(tmp_path, "--host", "http://127.0.0.1:1", "--slo", "ttft")
    assert nowhere.returncode == 2
    assert "--slo needs --out" in nowhere.stderr


def test_wrong_input_ends_with_2_and_one_message(tmp_path: Path, model_dir: Path) -> None:
    """All at once: most of a second each is Locust's own start."""
    nowhere = ["--host", "http://127.0.0.1:1"]
    with_model = [*nowhere, "--model-dir", str(model_dir)]
    wrong = {
        "missing or wrong: --seed": locust_command(tmp_path, *with_model, "--seed", "-1"),
        "http://127.0.0.1:1/tokenize can't be asked": locust_command(tmp_path, *nowhere),
        "nothing answers at http://127.0.0.1:1": locust_command(tmp_path, *with_model, *in_processes(2)),
    }
    started = {message: start(command) for message, command in wrong.items()}
    for message, process in started.items():
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2, errors
        assert f"prefixwatch: {message}" in errors or f": {message}" in errors
        assert "Traceback" not in errors


def test_processes_send_one_plan_together_and_the_master_has_all_of_it(
    serve: Serve, model_dir: Path, writer: PromptWriter, tmp_path: Path
) -> None:
    """locustio/locust#73, #2377 (LT15): merged counts and percentiles are those of the pooled requests."""

    def script(server: Connection, sent: bytes) -> None:
        time.sleep(0.0005 * (len(sent) % 100))
        server.start_stream()
        server.content(" a")
        server.end_stream()

    together = tmp_path / "together"
    fixed = ["--model-dir", str(model_dir), "--nonce", "n", "--seed", "3"]
    scenario = parse(SCENARIO, Scenario, name="tiny.yaml")
    plan = make_plan(scenario, writer, seed=3, nonce="n", model="tiny").requests
    server = serve(script)
    files = ["--out", str(together), "--json-file", str(tmp_path / "stats")]
    graded = ["--slo", "availability"]
    done = run_locust(tmp_path, "--host", server.url, *fixed, *files, *graded, *in_processes(4))

    summary = json.loads((together / "summary.json").read_text())
    assert done.returncode == {"pass": 0, "fail": 1, "inconclusive": 3}[summary["verdict"]], done.stderr
    merged = read_requests(together / "requests.parquet")
    assert [(r.index, r.session, r.scheduled_s, r.planned_prompt_tokens) for r in merged] == [
        (r.index, r.session, r.scheduled_s, r.prompt_tokens) for r in plan
    ]
    assert {record.outcome for record in merged} == {Outcome.COMPLETED}
    report = json.loads((together / "run.json").read_text())
    assert (report["processes"], report["counts"]["completed"]) == (4, len(plan))
    e2e = entries(tmp_path)["E2E"]
    pooled = sorted((r.end_s - r.scheduled_s) * 1e3 for r in merged if r.end_s is not None and r.phase == "measured")
    assert e2e["num_requests"] == len(pooled) < len(server.requests) == len(plan)
    assert e2e["max_response_time"] == pytest.approx(pooled[-1], abs=0.01)
    assert sum(e2e["response_times"].values()) == len(pooled)

    alone = tmp_path / "alone"
    run_locust(tmp_path, "--host", serve(script).url, *fixed, *graded, "--out", str(alone))
    by_one = json.loads((alone / "summary.json").read_text())
    assert by_one["verdict"] == summary["verdict"]
    kept = ("name", "good", "total", "measured", "ci95")
    figures = [
        [{name: objective[name] for name in kept} for objective in found["policies"][""]["objectives"]]
        for found in (summary, by_one)
    ]
    assert figures[0] == figures[1]


def test_the_user_reads_its_own_bytes_whatever_locusts_clients_do() -> None:
    """locustio/locust#3018, #3311 (LT13): Locust's streaming responses differ between releases; none is used."""
    code = (
        "from locust import HttpUser\nfrom locust.contrib.fasthttp import FastHttpUser\n"
        "from prefixwatch.loadgen.sending.locust_user import PlanUser\n"
        "print(issubclass(PlanUser, (HttpUser, FastHttpUser)), hasattr(PlanUser, 'client'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "False"]
