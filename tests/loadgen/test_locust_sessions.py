"""`--users` and a LoadTestShape drive sessions, in one process and in several; the verdict is on Locust's web page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from prefixwatch.engines.process import free_port
from prefixwatch.loadgen.request_log.records import RequestRecord, read_requests
from tests.loadgen.conftest import Connection, FakeServer, Script
from tests.loadgen.test_locustfile import locust_command, run_locust, start

Serve = Callable[[Script], FakeServer]


def quick(server: Connection, sent: bytes) -> None:
    time.sleep(0.02)
    server.start_stream()
    server.content(" a")
    server.end_stream()


def rows(folder: Path) -> list[RequestRecord]:
    return list(read_requests(folder / "requests.parquet"))


def test_users_are_a_closed_loop_of_sessions_that_is_graded(serve: Serve, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    users = ["--users", "3", "--spawn-rate", "3", "--run-time", "8", "--slo", "availability", "--out", str(out)]
    done = run_locust(tmp_path, "--host", serve(quick).url, "--model-dir", str(model_dir), *users)

    report, summary = (json.loads((out / name).read_text()) for name in ("run.json", "summary.json"))
    assert report["loop"] == "closed"
    assert 1 <= report["concurrency"] <= 3  # on a busy machine some users may come too late
    assert any("closed loop" in note for note in summary["notes"])
    assert done.returncode == {"pass": 0, "fail": 1, "inconclusive": 3}[summary["verdict"]]
    assert (out / "report.html").exists()
    assert (out / "junit.xml").exists()
    found = rows(out)
    assert len(found) > 3  # users go on to further sessions
    assert len({record.session for record in found}) == len(found)


SHAPED = """\
from locust import LoadTestShape
from prefixwatch.loadgen.sending.locust_user import PlanUser

class Steps(LoadTestShape):
    def tick(self):
        seconds = self.get_run_time()
        return (1, 9) if seconds < 3 else (4, 9) if seconds < 10 else None
"""


def test_a_shape_sets_the_number_of_sessions_in_several_processes_and_the_rows_are_merged(
    serve: Serve, model_dir: Path, tmp_path: Path
) -> None:
    """Together the workers play each session once, with one nonce, and the master grades all rows on one clock."""
    shaped, out, port = tmp_path / "shaped.py", tmp_path / "out", str(free_port())
    shaped.write_text(SHAPED)
    server = serve(quick)
    several = ["--processes", "2", "--master-port", port, "--master-bind-port", port]
    options = ["--host", server.url, "--model-dir", str(model_dir), "--out", str(out), *several]
    process = start(locust_command(tmp_path, *options, file=shaped))
    _, errors = process.communicate(timeout=90)

    report = json.loads((out / "run.json").read_text())
    found = rows(out)
    assert (report["loop"], report["processes"]) == ("closed", 2), errors
    assert [record.index for record in found] == list(range(len(found)))
    assert len({record.session for record in found}) == len(found)
    assert len(server.requests) >= len(found) > 4
    assert all(record.scheduled_s >= 0 for record in found)


def page(port: int, path: str, data: dict[str, str] | None = None) -> Any:
    body = urlencode(data).encode() if data is not None else None
    with urlopen(f"http://127.0.0.1:{port}{path}", data=body, timeout=10) as answer:
        return answer.read().decode()


def eventually(ask: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while True:
        try:
            if found := ask():
                return found
        except URLError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_verdict_is_a_tab_of_the_web_page(serve: Serve, model_dir: Path, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--slo", "availability", "--out", str(out)]
    command = locust_command(tmp_path, "--host", serve(quick).url, "--model-dir", str(model_dir), *options)
    process = start([part for part in command if part not in {"--headless", "--only-summary"}])

    def verdict() -> list[dict[str, str]]:
        [shown] = json.loads(page(port, "/stats/requests"))["extended_stats"]
        assert shown["key"] == "prefixwatch-verdict"
        return [row for row in shown["data"] if row["judged"] == "availability"]

    try:
        index = eventually(lambda: page(port, "/"))
        assert '"title": "Verdict"' in index
        assert verdict() == []
        page(port, "/swarm", {"user_count": "1", "spawn_rate": "1", "host": serve(quick).url})
        [row] = eventually(verdict)
        assert row["measured"].endswith("%")
        assert "What decides" in page(port, "/prefixwatch/report") or "verdict" in page(port, "/prefixwatch/report")
    finally:
        process.terminate()
        process.communicate(timeout=30)
