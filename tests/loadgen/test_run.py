"""The headless run as a process: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.request_log.records import Outcome, read_requests
from prefixwatch.loadgen.sending.run_config import load_run_config
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]

SCENARIO = """\
name: tiny
duration_seconds: 1.5
arrivals: {rate_per_second: 12}
groups: {count: 2, shared_tokens: 64, unique_tokens: 8, output_tokens: 2}
tenants: [{name: acme, salt: s1}, {name: globex}]
prime: true
"""


def answer(server: Connection, sent: bytes) -> None:
    server.start_stream()
    server.content(" a")
    server.content(" b")
    server.usage(prompt_tokens=1, completion_tokens=2)
    server.end_stream()


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(SCENARIO)
    return file


def write_config(folder: Path, **fields: Any) -> Path:
    file = folder / "run-config.json"
    file.write_text(json.dumps({"model": "tiny", "out": str(folder / "out"), **fields}))
    return file


def start(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "prefixwatch.loadgen.run", "--config", str(config)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)


def test_a_run_writes_its_log_and_its_check(serve: Serve, scenario: Path, model_dir: Path, tmp_path: Path) -> None:
    server = serve(answer)
    config = write_config(
        tmp_path, target=server.url, scenario=str(scenario), model_dir=str(model_dir), nonce="n1", policy="p"
    )
    with start(config) as process:
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    lines = [json.loads(line) for line in output.splitlines()]
    assert {line["event"] for line in lines[:-1]} == {"progress"}
    assert {"sent", "completed", "failed", "in_flight", "ttft_p50_ms", "ttft_p95_ms", "lag_max_ms"} <= set(lines[0])
    records = read_requests(tmp_path / "out" / "requests.parquet")
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * len(records)
    assert len(records) == len(server.requests)
    assert [record.phase for record in records[:5]] == ["prime"] * 4 + ["measured"]
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert lines[-1] == {"event": "end", **run, "zero_unix_seconds": lines[-1]["zero_unix_seconds"]}
    assert (run["nonce"], run["policy"], run["counts"]["completed"]) == ("n1", "p", len(records))


def test_the_first_request_leaves_soon_after_the_start(
    serve: Serve, scenario: Path, model_dir: Path, tmp_path: Path
) -> None:
    first = threading.Event()

    def script(server: Connection, sent: bytes) -> None:
        first.set()
        answer(server, sent)

    config = write_config(tmp_path, target=serve(script).url, scenario=str(scenario), model_dir=str(model_dir))
    with start(config) as process:
        assert first.wait(20)
        spent = psutil.Process(process.pid).cpu_times()
        process.kill()
    # In CPU time, beside that of loading the libraries alone: neither load nor speed of the machine counts.
    print(f"first request after {spent.user + spent.system:.2f} s of CPU, libraries {libraries_cpu_seconds():.2f} s")
    assert spent.user + spent.system < 4 * libraries_cpu_seconds()


def libraries_cpu_seconds() -> float:
    code = "import locust, numpy, pyarrow, pydantic, tokenizers, time; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def test_sigterm_ends_the_run_with_every_request_logged(
    serve: Serve, scenario: Path, model_dir: Path, tmp_path: Path
) -> None:
    released = threading.Event()
    running = threading.Event()

    def script(server: Connection, sent: bytes) -> None:
        if b'"max_tokens":1,' in sent:  # the prime phase
            answer(server, sent)
            return
        server.start_stream()
        server.content(" a")
        running.set()
        released.wait(20)

    settings = {"scenario": str(scenario), "model_dir": str(model_dir), "lag_limit_ms": 10_000}
    config = write_config(tmp_path, target=serve(script).url, **settings)
    with start(config) as process:
        assert running.wait(20)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=20)
    released.set()
    assert process.returncode == 0
    measured = [r for r in read_requests(tmp_path / "out" / "requests.parquet") if r.phase == "measured"]
    assert {record.outcome for record in measured} == {Outcome.CANCELLED, Outcome.NEVER_SENT}
    assert measured[0].first_token_s is not None
    assert measured[-1].sent_s is None
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["reasons"] == ["the run was stopped before its end"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target": "http://127.0.0.1:1"}, "loadgen: nothing answers at http://127.0.0.1:1"),
        ({"model_dir": "no-such-folder"}, "loadgen: no tokenizer.json in no-such-folder"),
    ],
)
def test_wrong_input_ends_with_2_and_a_remedy(
    model_dir: Path, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    right = {"target": "http://127.0.0.1:1", "scenario": "smoke", "model_dir": str(model_dir)}
    with start(write_config(tmp_path, **{**right, **wrong})) as process:
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith(message)
    assert "Traceback" not in errors


def test_an_unknown_field_of_the_configuration_names_the_known_ones(tmp_path: Path) -> None:
    config = write_config(tmp_path, target="http://h", model_dir="d", sede=1)
    message = f"{config}: sede: Extra inputs are not permitted\nfields are target, scenario, model_dir"
    with pytest.raises(InputError, match=re.escape(message)):
        load_run_config(config)


def test_a_missing_configuration_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can't be read .*: give the run's JSON configuration"):
        load_run_config(tmp_path / "none.json")


def test_each_run_has_a_nonce_of_its_own(tmp_path: Path) -> None:
    config = write_config(tmp_path, target="http://h", model_dir="d")
    assert load_run_config(config).nonce != load_run_config(config).nonce


def test_a_log_that_cannot_be_written_is_told(serve: Serve, scenario: Path, model_dir: Path, tmp_path: Path) -> None:
    """A full disk, for one; here something else has the log's name."""
    config = write_config(tmp_path, target=serve(answer).url, scenario=str(scenario), model_dir=str(model_dir))
    (tmp_path / "out" / "requests.parquet").mkdir(parents=True)
    with start(config) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"can't write to {tmp_path / 'out'}: " in errors
    assert "Traceback" not in errors
