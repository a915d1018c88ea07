"""`bench --target --exporter`: what runs already, seen whole, and other people's traffic found out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.loadgen.request_log.engine_counters import EngineCounters, foreign_traffic
from prefixwatch.loadgen.request_log.fleet_rows import read_fleet
from prefixwatch.loadgen.request_log.records import RequestRecord, table_of
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.bench.watching.exporter_log import fleet_row
from tests.stack.command_line import prefixwatch
from tests.stack.staging import Staging, others_chatting, running_staging


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staging]:
    with running_staging(tmp_path_factory.mktemp("staging")) as running:
        yield running


def bench(staging: Staging, out: Path) -> Any:
    arguments = ("--target", staging.router, "--exporter", staging.exporter, "--model-dir", str(default_model_dir()))
    result = prefixwatch("bench", "smoke", *arguments, "--repeats", "1", "--out", str(out))
    assert result.code in (0, 1, 3), result.err
    return json.loads((out / "summary.json").read_text())


def test_the_workers_of_a_target_are_rows_and_their_counters_agree_with_the_answers(
    staging: Staging, tmp_path: Path
) -> None:
    summary = bench(staging, tmp_path / "out")
    rows = read_fleet(tmp_path / "out" / "fleet.parquet")
    assert {row.worker for row in rows} == {"simulated-0", "simulated-1"}
    assert all(row.kv_usage_ratio is not None and row.running is not None for row in rows)
    assert min(row.at_s for row in rows if row.at_s is not None) < 0
    [run] = summary["runs"]
    assert run["engine"]["query_tokens"] > 0
    told = " ".join([*summary["notes"], *summary["validity"]["reasons"]])
    assert "the engines counted" not in told
    assert "others used these engines" not in told
    assert 'id="engine-load"' in (tmp_path / "out" / "report.html").read_text()


def test_other_peoples_traffic_makes_the_run_invalid(staging: Staging, tmp_path: Path) -> None:
    with others_chatting(staging.router):
        summary = bench(staging, tmp_path / "out")
    assert summary["verdict"] == "inconclusive"
    reasons = summary["validity"]["reasons"]
    assert "others used these engines during the run: the engines looked up" in reasons[0]
    again = json.loads(prefixwatch("slo", "grade", str(tmp_path / "out"), "--slo", "ttft", "--json").out)
    assert again["validity"]["reasons"] == reasons


def test_an_address_that_is_no_exporter_is_refused(staging: Staging, tmp_path: Path) -> None:
    wrong = Staging(staging.router, staging.router)
    arguments = ("--target", wrong.router, "--exporter", wrong.exporter, "--model-dir", str(default_model_dir()))
    result = prefixwatch("bench", "smoke", *arguments, "--repeats", "1", "--out", str(tmp_path))
    assert result.code == 2
    assert "--exporter: " in result.err
    assert "answers 404: is it a prefixwatch exporter?" in " ".join(result.err.split())


def test_an_exporter_goes_with_a_target(tmp_path: Path) -> None:
    result = prefixwatch("bench", "smoke", "--exporter", "http://127.0.0.1:9", "--out", str(tmp_path))
    assert (result.code, "--exporter: only with --target" in " ".join(result.err.split())) == (2, True)


def test_a_target_that_is_down_is_a_row_without_figures() -> None:
    target = {"name": "e0", "up": False, "scrape": {"age_seconds": 40.0}, "signals": {}, "derived": {}}
    row = fleet_row(target, Run(1, "target", 0), 100.0)
    assert (row.unix_s, row.up, row.running, row.prefix_query_tokens_total, row.kv_usage_ratio) == (
        60.0, False, None, None, None,
    )  # fmt: skip


@pytest.mark.parametrize(("looked_up", "alone"), [(100.0, True), (105.0, True), (106.0, False), (None, True)])
def test_a_run_is_alone_up_to_five_percent_more_than_it_sent(looked_up: float | None, *, alone: bool) -> None:
    counters = EngineCounters(
        start_hit_tokens=0, start_query_tokens=0, end_hit_tokens=0, end_query_tokens=looked_up, hit_tokens=0,
        query_tokens=looked_up, hit_ratio=None,
    )  # fmt: skip
    answered, lost = (
        RequestRecord(
            id=str(k), policy="target", repeat=0, index=k, phase="measured", tenant="-", session="", turn=0, group="",
            request_class="", scheduled_s=0.0, sent_s=0.0, planned_prompt_tokens=50, prompt_tokens=reported,
        )
        for k, reported in enumerate((50, None))
    )  # fmt: skip
    assert (foreign_traffic(counters, table_of([answered, lost])) is None) is alone
