"""`prefixwatch bench` on simulated engines, from the command line to the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from prefixwatch.loadgen.grading.summary import read_summary
from prefixwatch.loadgen.request_log.records import RequestRecord, read_requests
from tests.stack.command_line import prefixwatch

POLICIES = ("round_robin", "cache_aware")
EVENTS_SECONDS = 0.2


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the printed summary of one short bench."""
    out = tmp_path_factory.mktemp("bench")
    result = prefixwatch(
        "bench", "smoke", "--policy", ",".join(POLICIES), "--repeats", "2", "--json", "--out", str(out)
    )
    assert result.code in (0, 3), result.err  # 3: a busy machine may spoil so short a run
    assert "Verdict: " in result.err
    return out, json.loads(result.out)


def test_every_file_is_there(bench: tuple[Path, dict[str, Any]]) -> None:
    out, _ = bench
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "summary.json",
        "requests.parquet",
        "fleet.parquet",
        "report.html",
        "junit.xml",
        "config.yaml",
        "summary.md",
    }


def test_the_printed_summary_is_the_written_one(bench: tuple[Path, dict[str, Any]]) -> None:
    out, printed = bench
    assert printed == json.loads((out / "summary.json").read_text())
    assert read_summary(out / "summary.json").engine == "simulated"
    assert tuple(printed["policies"]) == POLICIES


def test_the_log_has_every_request_of_the_plan_under_both_policies(bench: tuple[Path, dict[str, Any]]) -> None:
    out, _ = bench
    records = [r for r in read_requests(out / "requests.parquet") if r.phase == "measured"]
    plans = {
        policy: {(r.repeat, r.index, r.scheduled_s, r.planned_prompt_tokens) for r in records if r.policy == policy}
        for policy in POLICIES
    }
    assert plans["round_robin"] == plans["cache_aware"]
    assert len(records) == 2 * len(plans["round_robin"])
    assert all(record.prompt_tokens == record.planned_prompt_tokens for record in records)


def test_what_the_router_predicts_the_engine_delivers(bench: tuple[Path, dict[str, Any]]) -> None:
    """Requests of a group that overlap in time may each compute what the other is computing; all others agree."""
    out, _ = bench
    records = list(read_requests(out / "requests.parquet"))
    alone = [r for r in records if r.phase == "measured" and not any(overlap(r, other) for other in records)]
    assert len(alone) > 20
    assert [r.id for r in alone if r.predicted_tokens != r.cached_tokens] == []


def overlap(request: RequestRecord, other: RequestRecord) -> bool:
    """Whether the other one, of the same run and group, was still served when this one came, or its KV events on their
    way to the router."""
    if other is request or (other.policy, other.repeat, other.group) != (request.policy, request.repeat, request.group):
        return False
    assert request.sent_s is not None
    assert other.sent_s is not None
    assert other.end_s is not None
    return other.sent_s <= request.sent_s < other.end_s + EVENTS_SECONDS


def test_no_tenant_gets_what_another_sent(bench: tuple[Path, dict[str, Any]]) -> None:
    _, printed = bench
    assert all(policy["isolation_violations"] == 0 for policy in printed["policies"].values())


def test_the_fleet_was_watched(bench: tuple[Path, dict[str, Any]]) -> None:
    out, _ = bench
    table = pq.read_table(out / "fleet.parquet").to_pylist()
    assert {row["worker"] for row in table} == {"simulated-0", "simulated-1"}
    assert all(row["up"] for row in table)
    assert max(row["prefix_query_tokens_total"] for row in table) > 0
    assert max(row["kv_blocks_stored_total"] or 0 for row in table) > 0
    for policy, repeat in ((policy, repeat) for policy in POLICIES for repeat in range(2)):
        own = [row["at_s"] for row in table if (row["policy"], row["repeat"]) == (policy, repeat)]
        assert min(own) < 0
        assert max(own) > 4  # from before the first request to after the last answer


def test_the_engines_own_counters_are_the_runs_and_agree_with_the_answers(bench: tuple[Path, dict[str, Any]]) -> None:
    """vllm-project/vllm#46938 (EM46): the same engines serve all four runs, and each run has its own ratio."""
    out, printed = bench
    records = read_requests(out / "requests.parquet")
    for run in printed["runs"]:
        own = [r for r in records if (r.policy, r.repeat) == (run["policy"], run["repeat"])]
        engine = run["engine"]
        assert engine["hit_tokens"] == sum(r.cached_tokens or 0 for r in own)
        assert engine["query_tokens"] == sum(r.prompt_tokens or 0 for r in own)
        assert engine["reason"] == ""
    assert len({run["engine"]["start_query_tokens"] for run in printed["runs"]}) == 4
    assert not [note for note in printed["notes"] if "the engines counted" in note]


def test_the_configuration_is_enough_to_run_it_again(bench: tuple[Path, dict[str, Any]]) -> None:
    out, _ = bench
    again = yaml.safe_load((out / "config.yaml").read_text())
    assert again["options"]["seed"] == 1
    assert again["scenario"]["name"] == "smoke"
    assert [(run["policy"], run["repeat"]) for run in again["runs"]] == [
        ("round_robin", 0), ("cache_aware", 0), ("cache_aware", 1), ("round_robin", 1),
    ]  # fmt: skip
    assert "prefixwatch" in again["versions"]
