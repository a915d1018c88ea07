"""A scenario's fleet and events in a bench: what happens to real processes, and to the requests meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwatch.loadgen.request_log.fleet_rows import read_fleet
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, read_requests
from tests.stack.command_line import prefixwatch

SCENARIO = """
name: churn
duration_seconds: 28
arrivals: {kind: poisson, rate_per_second: 8}
groups: {count: 6, shared_tokens: 200, unique_tokens: 60, output_tokens: 4}
fleet: [{count: 1, zone: a, region: eu}, {count: 2, zone: b, capacity_blocks: 6000}]
engine: {capacity_blocks: 4000}
timeouts: {first_token_seconds: 30}
events:
  - {at: 2, partition: {worker: engine-0, seconds: 1}}
  - {at: 4, kill: engine-1}
  - {at: 5, start: engine-1}
  - {at: 5.5, add: 1}
  - {at: 23, drain: engine-0}
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("churn")
    (folder / "churn.yaml").write_text(SCENARIO)
    out = folder / "out"
    result = prefixwatch(
        "bench", str(folder / "churn.yaml"), "--policy", "round_robin", "--repeats", "1", "--out", str(out)
    )
    assert result.code in (0, 3), result.err
    return out


@pytest.fixture(scope="module")
def records(bench: Path) -> list[RequestRecord]:
    return list(read_requests(bench / "requests.parquet"))


def test_no_request_is_lost_that_had_not_begun_to_stream(records: list[RequestRecord]) -> None:
    lost = [record for record in records if record.outcome is not Outcome.COMPLETED]
    assert all(record.first_token_s is not None for record in lost), [record.error for record in lost]
    assert len(lost) < len(records) / 10


def test_what_was_said_happened(bench: Path, records: list[RequestRecord]) -> None:
    """Margins are wide: on a busy machine an event comes late, but never early."""

    def scheduled(worker: str) -> list[float]:
        return [record.scheduled_s for record in records if record.worker == worker]

    held_up = [r.ttft_s for r in records if r.worker == "simulated-0" and 1 < r.scheduled_s < 4 and r.ttft_s]
    assert max(held_up) > 0.5
    killed = [row for row in read_fleet(bench / "fleet.parquet") if row.worker == "simulated-1"]
    assert not all(row.up for row in killed)
    assert (killed[-1].up, killed[-1].counter_resets) == (True, 1)
    assert min(scheduled("simulated-3")) > 5.5
    assert max(scheduled("simulated-0")) < 26 < max(record.scheduled_s for record in records)


def test_workers_differ_and_have_their_places(bench: Path) -> None:
    [router] = (bench / "logs").glob("*/router.json")
    workers = json.loads(router.read_text())["workers"]
    assert [(own["zone"], own["cluster"]) for own in workers] == [("a", "eu"), ("b", ""), ("b", ""), ("", "")]
    blocks = [json.loads((bench / "logs" / f"simulated-{k}.json").read_text())["capacity_blocks"] for k in range(4)]
    assert blocks == [4000, 6000, 6000, 4000]


def test_the_summary_has_an_effect_per_event(bench: Path) -> None:
    events = json.loads((bench / "summary.json").read_text())["events"]
    assert [(own["at_s"], own["event"]) for own in events] == [
        (2, "engine-0 unreachable for 1 s"),
        (4, "engine-1 killed"),
        (5, "engine-1 started"),
        (5.5, "1 worker added"),
        (23, "engine-0 drained"),
    ]


def test_a_report_of_the_finished_run_has_them_too(bench: Path, tmp_path: Path) -> None:
    made = prefixwatch("report", str(bench), "--out", str(tmp_path))
    assert made.code in (0, 3), made.err
    first, again = (json.loads((folder / "summary.json").read_text())["events"] for folder in (bench, tmp_path))
    assert again == first
    assert len(first) == 5


@pytest.mark.parametrize(
    ("more", "arguments", "message"),
    [
        ("", ("--workers", "3"), "--workers: scenario churn lists its workers under fleet"),
        (
            "",
            ("--target", "http://127.0.0.1:9"),
            "scenario churn has events, which happen to engines that a bench starts",
        ),
        ("role", (), "only `prefixwatch simulate` splits a fleet"),
        ("", ("--engine", "vllm"), "profile: vLLM engines are as fast as this machine"),
    ],
)
def test_what_a_bench_can_not_do_is_refused(
    tmp_path: Path, more: str, arguments: tuple[str, ...], message: str
) -> None:
    text = SCENARIO.replace("zone: a,", "zone: a, profile: assumed-gpu,")
    if more:
        text = text.split("events:")[0].replace("zone: a,", "role: prefill,").replace("zone: b,", "role: decode,")
    (tmp_path / "churn.yaml").write_text(text)
    result = prefixwatch("bench", str(tmp_path / "churn.yaml"), *arguments, "--out", str(tmp_path / "out"))
    assert result.code == 2
    assert message in " ".join(result.err.split())
