"""Plain Locust with our file, as a process of its own: Locust patches whatever process imports it."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.records import Outcome, read_requests
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]

ROOT = Path(__file__).parents[2]
SCENARIO = """\
name: tiny
duration_seconds: 1
arrivals: {rate_per_second: 20}
groups: {count: 2, shared_tokens: 64, unique_tokens: 8, output_tokens: 2}
"""


def run_locust(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    scenario = folder / "tiny.yaml"
    scenario.write_text(SCENARIO)
    command = [sys.executable, "-m", "locust", "-f", "loadgen/locustfile.py", "--headless", "--only-summary"]
    return subprocess.run(
        [*command, "--scenario", str(scenario), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "x_stats.csv").open() as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def test_headless_locust_sends_the_plan_and_shows_true_times_and_lengths(
    serve: Serve, model_dir: Path, tmp_path: Path
) -> None:
    """locustio/locust#2443 (LT12) and #3492 (LT11): E2E ends at the last byte and has the body's length."""

    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content(" a")
        time.sleep(0.1)
        server.content(" b")
        server.end_stream()

    server = serve(script)
    done = run_locust(
        tmp_path, "--host", server.url, "--model-dir", str(model_dir), "--out", str(tmp_path / "out"),
        "--csv", str(tmp_path / "x"), "--policy", "p",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = rows(tmp_path)
    e2e, ttft, total = table["E2E", "tiny"], table["TTFT", "tiny"], table["", "Aggregated"]
    assert int(e2e["Request Count"]) == int(ttft["Request Count"]) == len(server.requests)
    assert total["Request Count"] == e2e["Request Count"]
    assert float(e2e["Min Response Time"]) >= 100
    assert float(ttft["Median Response Time"]) < 100
    assert float(e2e["Average Content Size"]) > 100
    records = read_requests(tmp_path / "out" / "requests.parquet")
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * len(server.requests)


def test_failures_show_in_locusts_failures_and_percentiles_stay_below_the_maximum(
    serve: Serve, model_dir: Path, tmp_path: Path
) -> None:
    """locustio/locust#1563 (LT14): 149 ms would become 150 in Locust's own bins."""

    def script(server: Connection, sent: bytes) -> None:
        time.sleep(0.146)
        server.answer("503 Busy", {"error": {"message": "no room"}})

    done = run_locust(
        tmp_path, "--host", serve(script).url, "--model-dir", str(model_dir), "--csv", str(tmp_path / "x")
    )
    assert done.returncode == 1  # Locust's own: there were failures
    row = rows(tmp_path)["E2E", "tiny"]
    assert row["Failure Count"] == row["Request Count"]
    assert float(row["99%"]) <= float(row["Max Response Time"]) + 0.1
    assert float(row["50%"]) % 10 != 0 or float(row["90%"]) % 10 != 0
    assert "refused: http_503: no room" in (tmp_path / "x_failures.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "http://127.0.0.1:1"], "missing or wrong: --model-dir"),
        (["--host", "http://127.0.0.1:1", "--model-dir", "nowhere"], "no tokenizer.json in nowhere"),
    ],
)
def test_wrong_input_ends_with_2_and_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run_locust(tmp_path, *arguments)
    assert done.returncode == 2
    assert f"prefixwatch: {message}" in done.stderr
    assert "Traceback" not in done.stderr
