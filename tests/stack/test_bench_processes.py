"""`bench --processes` and `--locust-master`: several processes send one process's plan, and the verdict is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.documents.errors import InputError
from prefixwatch.engines.process import free_port
from prefixwatch.loadgen.request_log.records import Outcome, read_requests
from prefixwatch.loadgen.sending.run_config import master_address
from tests.stack.command_line import prefixwatch

ROOT = Path(__file__).parents[2]
SCENARIO = """
name: shared
duration_seconds: 3
arrivals: {rate_per_second: 20}
groups: {count: 3, shared_tokens: 64, unique_tokens: 16, output_tokens: 2}
sessions: {turns: 2, think_seconds: 0.5}
prime: true
engine: {workers: 1, profile: assumed-gpu}
slo: [availability]
"""
KEPT = ("name", "good", "total", "measured", "ci95")


def bench(folder: Path, *options: str, text: str = SCENARIO) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """The summary and the request log's plan."""
    scenario = folder / "shared.yaml"
    scenario.write_text(text)
    out = folder / "out"
    fixed = ("--policy", "round_robin", "--repeats", "1", "--seed", "5", "--out", str(out))
    result = prefixwatch("bench", str(scenario), *fixed, *options)
    assert result.code in (0, 3), result.err
    records = read_requests(out / "requests.parquet")
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    planned = [(r.index, r.session, r.phase, r.turn, r.planned_prompt_tokens, r.tenant) for r in records]
    return json.loads((out / "summary.json").read_text()), planned


def graded(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: own[name] for name in KEPT} for own in summary["policies"]["round_robin"]["objectives"]]


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    return bench(tmp_path_factory.mktemp("one"))


def test_processes_send_one_plan_and_the_verdict_is_that_of_one(
    by_one: tuple[dict[str, Any], list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    summary, planned = bench(tmp_path, "--processes", "2")
    assert planned == by_one[1]
    assert graded(summary) == graded(by_one[0])
    [own] = [json.loads(file.read_text()) for file in tmp_path.rglob("run.json")]
    assert (own["processes"], own["counts"]["completed"]) == (2, len(planned))
    if summary["validity"]["valid"] and by_one[0]["validity"]["valid"]:  # a busy machine makes a client late
        assert summary["verdict"] == by_one[0]["verdict"]


def test_one_user_of_a_closed_loop_sends_all_of_it_from_one_of_the_processes(tmp_path: Path) -> None:
    """Half of the plan was dealt to a process without a user, and never sent."""
    text = SCENARIO.replace("{rate_per_second: 20}", "{kind: closed, concurrency: 1, requests: 8}")
    summary, planned = bench(tmp_path, "--processes", "2", text=text)
    assert len(planned) > 8
    assert summary["policies"]["round_robin"]["requests"]["completed"] == 8


def test_workers_of_locust_send_a_benchs_plan(
    by_one: tuple[dict[str, Any], list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    """As on other machines: started by hand, with the address of the machine that benches."""
    port = str(free_port())
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen/locustfile.py"), "--worker"]
    command += ["--master-host", "127.0.0.1", "--master-port", port]
    workers = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        summary, planned = bench(tmp_path, "--processes", "2", "--locust-master", f"127.0.0.1:{port}")
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
    assert planned == by_one[1]
    assert graded(summary) == graded(by_one[0])


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    arguments = ("bench", "smoke", "--policy", "round_robin", "--repeats", "1", "--out", str(tmp_path))
    result = prefixwatch(*arguments, "--locust-master", "here:there")
    assert result.code == 2
    assert "locust_master here:there: write it as HOST or HOST:PORT" in " ".join(result.err.split())


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1:x"])
def test_a_wrong_port_is_one_message(address: str) -> None:
    with pytest.raises(InputError, match=f"locust_master {address}: write it as HOST or HOST:PORT"):
        master_address(address)


def test_a_name_that_is_no_address_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text(SCENARIO)
    out = ("--out", str(tmp_path / "out"), "--policy", "round_robin")
    result = prefixwatch("bench", str(tmp_path / "shared.yaml"), *out, "--locust-master", "no.such.host.invalid:5557")
    assert result.code == 2
    assert "locust_master: can't listen on no.such.host.invalid:5557: name a free port" in result.err
    assert "Traceback" not in result.err
