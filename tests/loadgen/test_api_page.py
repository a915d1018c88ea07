"""The programs of docs/api.md, each run as a reader would run it, and the generated page of columns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwatch.loadgen.request_log import fleet_rows, records
from prefixwatch.loadgen.results.columns_page import PAGE, described, page
from tests.loadgen.conftest import Connection, FakeServer, Script
from tests.stack.test_finished_runs import records as run_records
from tests.stack.test_finished_runs import write_run

Serve = Callable[[Script], FakeServer]

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def program(chapter: str, language: str = "python") -> str:
    """The block of this language in a chapter of the page."""
    text = API.split(f"## {chapter}\n")[1].split("\n## ")[0]
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return blocks[-1]


def run(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([*([str(path)] if path else []), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": search, "COLUMNS": "200"}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in results/demo."""
    here = tmp_path_factory.mktemp("reader")
    (here / "results").mkdir()
    rows = run_records("round_robin", seed=1, slower=3.0) + run_records("cache_aware", seed=2)
    write_run(here / "results" / "demo", rows, ("ttft",))
    return here


def test_a_run_is_read_in_pandas(folder: Path) -> None:
    (folder / "read.py").write_text(program("Read a run"))

    done = run(folder, "read.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pass 0\ncache_aware vs round_robin: TTFT p95 ")
    assert re.search(r"cache_aware +acme +hit +600", done.stdout)
    assert re.search(r"hit_ratio +0\.8", done.stdout)


def test_a_run_is_graded_on_an_slo_of_ones_own(folder: Path) -> None:
    (folder / "my-slo.yaml").write_text(program("Grade with your own SLO", "yaml"))
    (folder / "grade.py").write_text(program("Grade with your own SLO"))

    done = run(folder, "grade.py")

    assert done.returncode == 0, done.stderr
    assert re.search(r"round_robin +first-token-fast +0\.\d+ .* fail", done.stdout)
    assert "Verdict: PASS – cache_aware meets 1 of 1 objectives" in done.stdout


def test_a_policy_of_ones_own_is_simulated(tmp_path: Path) -> None:
    entry = program("Your own routing policy", "toml").splitlines()[1].replace('"', "")
    (tmp_path / "shortest.py").write_text(program("Your own routing policy"))
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[prefixwatch.policies]\n{entry}\n")
    command = ["-m", "prefixwatch", "simulate", "smoke", "--policy", "round_robin,shortest", "--repeats", "1", "--json"]

    done = run(tmp_path, *command, path=tmp_path)

    assert list(json.loads(done.stdout)["policies"]) == ["round_robin", "shortest"], done.stderr


def test_locust_users_of_ones_own_are_graded(serve: Serve, model_dir: Path, tmp_path: Path) -> None:
    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content(" a")
        server.content(" b")
        server.end_stream()

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(model_dir)
    (tmp_path / "chat.py").write_text(program("Your own Locust users"))
    host = serve(script).url
    load = ["--headless", "--users", "3", "--spawn-rate", "3", "--run-time", "6", "--only-summary"]

    done = run(tmp_path, "-m", "locust", "-f", "chat.py", "--host", host, *load)

    out = tmp_path / "results" / "locust"
    summary = json.loads((out / "summary.json").read_text())
    assert done.returncode == {"pass": 0, "fail": 1, "inconclusive": 3}[summary["verdict"]], done.stderr
    assert summary["runs"][0]["loop"] == "closed"
    assert [o["name"] for o in summary["policies"][""]["objectives"]] == ["ttft", "availability"]
    log = records.read_requests(out / "requests.parquet")
    assert {record.tenant for record in log if record.session.startswith("own-")} == {"me"}
    assert any(record.turn for record in log) or len({record.session for record in log}) > 3
    assert {record.outcome for record in log} <= {records.Outcome.COMPLETED, records.Outcome.CANCELLED}
    assert (out / "report.html").exists()
    assert (out / "junit.xml").exists()
    assert "completed 0." in done.stdout, "the user's own task prints its outcome"


def test_importing_the_user_class_registers_nothing() -> None:
    code = (
        "from locust import events\n"
        "counts = lambda: {name: len(hook._handlers) for name, hook in vars(events).items()}\n"
        "before = counts()\n"
        "import prefixwatch.loadgen.users\n"
        "print(before == counts())\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_every_column_is_described_and_the_page_is_up_to_date() -> None:
    for rows in (records.RequestRecord, fleet_rows.FleetRow):
        assert [name for name, text in described(rows).items() if not text] == []
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m prefixwatch.loadgen.results.columns_page"
