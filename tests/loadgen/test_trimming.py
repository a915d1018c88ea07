"""Warm-up and cool-down by rule: sent and logged, and left out of every grade."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prefixwatch.documents import DocumentError, parse
from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.grading.grade import grade_policy
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.summary import RunFacts, build_summary, verdict_sentence
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.plan.request import Plan, PlannedRequest, Trimming
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, read_requests, write_requests
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.loadgen.sending.open_loop import OpenLoop, RequestOptions
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]

SCENARIO = """\
name: t
duration_seconds: 20
arrivals: {rate_per_second: 5}
groups: {count: 3, shared_tokens: 64, unique_tokens: 16, output_tokens: 4}
"""


def scenario_of(more: str) -> Scenario:
    return parse(SCENARIO + more, Scenario, name="t.yaml")


def answer(server: Connection, sent: bytes) -> None:
    server.start_stream()
    server.content(" a")
    server.end_stream()


def request(index: int, at: float, phase: str = "measured") -> PlannedRequest:
    return PlannedRequest(
        index=index, phase=phase, scheduled_s=at, tenant="-", session=f"s{index}", turn=0, group="g",
        request_class="c", messages=[{"role": "user", "content": "x"}], max_tokens=1, prompt_tokens=1, shared_tokens=0,
    )  # fmt: skip


def sent(server: FakeServer, plan: list[PlannedRequest], trimming: Trimming, users: int | None = None) -> OpenLoop:
    client = HttpClient(Target.parse(server.url), load_scenario("smoke").timeouts)
    whole = Plan("t", 0, "n", "m", plan, concurrency=users, trimming=trimming)
    loop = OpenLoop(whole, client, RequestOptions(model="m", policy="p"))
    loop.prime()
    loop.measure(5.0)
    client.close()
    return loop


def record(index: int, phase: str, policy: str = "p", wait: float = 0.1) -> RequestRecord:
    return RequestRecord(
        id=f"r{index}", policy=policy, repeat=0, index=index, phase=phase, tenant="-", session=f"s{index}", turn=0,
        group="g", request_class="c", scheduled_s=float(index), sent_s=float(index), first_token_s=index + wait,
        end_s=index + wait, outcome=Outcome.COMPLETED, status=200,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scheduled_s", "phase"),
    [(-1.0, "warm_up"), (1.9, "warm_up"), (2.0, "measured"), (8.9, "measured"), (9.0, "cool_down")],
)
def test_the_time_when_a_request_is_due_decides(scheduled_s: float, phase: str) -> None:
    assert Trimming(2.0, 9.0).phase_at(scheduled_s) == phase


def test_a_scenario_trims_both_ends_and_sends_the_same_requests(writer: PromptWriter) -> None:
    plain, trimmed = (
        make_plan(scenario_of(more), writer, seed=1, nonce="a", model="m")
        for more in ("", "warm_up_seconds: 4\ncool_down_seconds: 2\n")
    )
    assert trimmed.requests == plain.requests
    assert plain.trimming == Trimming()
    assert trimmed.trimming == Trimming(4.0, 18.0)


def test_what_is_trimmed_is_sent_and_logged(serve: Serve) -> None:
    plan = [request(0, 0, "prime"), request(1, 0.0), request(2, 0.05), request(3, 0.1), request(4, 0.15)]
    server = serve(answer)

    loop = sent(server, plan, Trimming(0.05, 0.15))

    assert [r.phase for r in loop.records] == ["prime", "warm_up", "measured", "measured", "cool_down"]
    assert {r.outcome for r in loop.records} == {Outcome.COMPLETED}
    assert len(server.requests) == 5


def test_a_closed_loop_is_trimmed_by_when_it_sent(serve: Serve) -> None:
    def slow(server: Connection, sent: bytes) -> None:
        time.sleep(0.03)
        answer(server, sent)

    loop = sent(serve(slow), [request(k, 0.0) for k in range(6)], Trimming(0.08), users=1)

    assert [r.phase for r in loop.records] == ["warm_up" if r.scheduled_s < 0.08 else "measured" for r in loop.records]
    assert {r.phase for r in loop.records} == {"warm_up", "measured"}


def test_the_grade_leaves_them_out_and_says_how_many(tmp_path: Path) -> None:
    phases = ["prime", *["warm_up"] * 3, *["measured"] * 5, *["cool_down"] * 2]
    log = [record(k, phase, wait=0.1 if phase == "measured" else 9.0) for k, phase in enumerate(phases)]
    write_requests(tmp_path / "requests.parquet", log)

    own = grade_policy(Measured(Columns.of(read_requests(tmp_path / "requests.parquet"))))

    assert (own.requests.scheduled, own.requests.warm_up, own.requests.cool_down) == (5, 3, 2)
    assert own.value("ttft_p99") == pytest.approx(100.0)


def test_the_summary_says_it_in_words() -> None:
    log = [record(k, "warm_up" if k < 3 else "measured", policy) for policy in ("a", "b") for k in range(60)]

    summary = build_summary(log, [], RunFacts(scenario="t", engine="simulated", workers=1))

    sentence = "requests of each policy sent and logged but not graded: 3 due in the warm-up, 0 in the cool-down"
    assert sentence in summary.notes
    assert f"Note: {sentence}" in verdict_sentence(summary)


def test_policies_of_a_closed_loop_may_trim_different_requests() -> None:
    log = [
        record(k, "warm_up" if k < cut else "measured", policy)
        for policy, cut in (("a", 3), ("b", 7))
        for k in range(60)
    ]

    summary = build_summary(log, [], RunFacts(scenario="t", engine="simulated", workers=1))

    assert summary.validity.reasons == []
    assert "a: 3 due in the warm-up, 0 in the cool-down; b: 7 due" in summary.notes[0]
    assert {c.pairs for c in summary.comparison} == {53}


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("warm_up_seconds: 15\ncool_down_seconds: 5\n", "leave nothing to measure"),
        ("warm_up_seconds: -1\n", "warm_up_seconds"),
    ],
)
def test_a_run_that_is_all_trimmed_is_refused(more: str, complaint: str) -> None:
    with pytest.raises(DocumentError, match=complaint):
        scenario_of(more)


def test_a_closed_loop_has_no_planned_end_to_trim() -> None:
    text = SCENARIO.replace("{rate_per_second: 5}", "{kind: closed, concurrency: 2}") + "cool_down_seconds: 1\n"
    with pytest.raises(DocumentError, match="cool_down_seconds needs an open loop"):
        parse(text, Scenario, name="t.yaml")
    assert scenario_of("warm_up_seconds: 3\ncool_down_seconds: 1\n").at_concurrency(4).trimming == Trimming(3.0)


def test_rows_of_the_columns_keep_their_own_gaps() -> None:
    log = [record(k, "measured") for k in range(3)]
    for k, own in enumerate(log):
        own.chunk_gaps_ms, own.output_tokens = [float(10 * k + i) for i in range(k + 1)], k + 2

    last_two = Columns.of(log).where(np.array([False, True, True]))

    assert last_two.gaps_ms.tolist() == [10.0, 11.0, 20.0, 21.0, 22.0]
    assert last_two.index.tolist() == [1, 2]
    assert last_two.gap_is_token.all()
