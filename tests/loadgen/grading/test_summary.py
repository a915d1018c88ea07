"""summary.json: its contract, its verdict, and the sentence people read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwatch.loadgen.grading.comparison import Comparison
from prefixwatch.loadgen.grading.model import Figure
from prefixwatch.loadgen.grading.run_figures import RunFigures
from prefixwatch.loadgen.grading.summary import (
    SCHEMA_FILE,
    RunFacts,
    Summary,
    build_summary,
    exit_code,
    read_summary,
    summary_schema,
    verdict_sentence,
    write_summary,
)
from prefixwatch.loadgen.grading.validity import peak_in_flight
from prefixwatch.loadgen.report.page import console_table
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.slo.build import load_objectives

MakeRecord = Callable[..., RequestRecord]
MakeLog = Callable[..., list[RequestRecord]]

FACTS = RunFacts(scenario="shared-prefix", engine="simulated", workers=4, seeds=[7])
OBJECTIVES = load_objectives(["ttft", "tpot", "goodput", "availability"])


@pytest.fixture(scope="module")
def summary(make_log: MakeLog) -> Summary:
    return build_summary(make_log("round_robin", "cache_aware"), OBJECTIVES, FACTS)


def compared(summary: Summary, metric: str) -> Comparison:
    [found] = [c for c in summary.comparison if c.metric == metric]
    return found


def test_it_has_the_keys_of_the_contract(summary: Summary) -> None:
    content = json.loads(summary.to_json())
    policy = content["policies"]["cache_aware"]

    assert content["schema"] == 2
    assert {
        "started_at", "host", "versions", "scenario", "engine", "profile", "workers", "policies", "comparison",
        "validity", "verdict",
    } <= content.keys()  # fmt: skip
    assert {
        "scheduled", "sent", "completed", "refused", "failed", "timed_out", "cut_off", "cancelled", "never_sent",
    } <= policy["requests"].keys()  # fmt: skip
    assert all(row.keys() == {"name", "unit", "value", "ci95", "n"} for row in policy["figures"])
    figures = {row["name"]: row["unit"] for row in policy["figures"]}
    assert len(figures) == len(policy["figures"])
    assert figures.items() >= {
        "ttft_p50": "ms", "ttft_p95": "ms", "ttft_p99": "ms", "tpot_p95": "ms", "hit_tokens": "tokens",
        "hit_ratio": "ratio", "block_hit_ratio": "ratio", "goodput_rps": "req/s", "hotspot_max_over_mean": "x",
    }.items()  # fmt: skip
    assert {"name", "objective", "measured", "ok", "ci95", "good", "total", "excluded"} <= policy["objectives"][
        0
    ].keys()
    assert {"a", "b", "metric", "difference", "ci95", "p_value"} <= content["comparison"][0].keys()
    assert content["validity"] == {"valid": True, "reasons": []}


def test_the_committed_schema_is_the_models() -> None:
    """On a change: `python -c "from prefixwatch.loadgen.grading.summary import write_schema; write_schema()"`, and
    raise the number if
    a key is renamed, removed or given another meaning."""
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == summary_schema()


def test_a_summary_of_schema_1_is_read(tmp_path: Path) -> None:
    """Written by the release before: every figure is where schema 2 has it."""
    found = read_summary(Path(__file__).parent / "summary_schema_1.json")

    own = found.policies["cache_aware"]
    assert (found.schema_version, found.started_at, found.verdict) == (2, None, "inconclusive")
    assert own.figure("ttft_p95") == Figure(
        name="ttft_p95", unit="ms", value=245.28414708002845, ci95=(239.01251721518912, 250.70761794002996), n=716
    )
    assert own.value("hit_tokens") == 923200
    assert [each.metric for each in found.comparison][:3] == ["ttft_p95", "ttft_p50", "hit_tokens_mean"]
    requests = own.requests
    assert (requests.scheduled, requests.completed, requests.cancelled, requests.never_sent) == (720, 712, 3, 5)


def test_it_survives_the_disk(summary: Summary, tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", summary)

    assert read_summary(tmp_path / "summary.json") == summary


def test_cache_aware_routing_wins_on_shared_prefixes(summary: Summary) -> None:
    hits, ttft = compared(summary, "hit_tokens_mean"), compared(summary, "ttft_p95")

    assert (hits.a, hits.b, hits.pairs) == ("cache_aware", "round_robin", 720)
    assert hits.significant
    assert hits.difference is not None
    assert hits.difference > 500
    assert ttft.significant
    assert ttft.difference is not None
    assert ttft.difference < -40
    assert summary.policies["cache_aware"].value("ttft_p95") == pytest.approx(ttft.a_value)
    assert summary.verdict == "pass"
    assert exit_code(summary) == 0


def test_without_shared_prefixes_no_gain_is_announced(make_log: MakeLog) -> None:
    """Published claims C4: the negative control."""
    summary = build_summary(make_log("round_robin", "cache_aware", shared_tokens=0), OBJECTIVES, FACTS)

    assert not any(c.significant for c in summary.comparison)
    assert "cache_aware vs round_robin: no significant difference" in verdict_sentence(summary)


def test_the_sentence_says_how_much_and_how_surely(summary: Summary) -> None:
    line, *_, verdict = verdict_sentence(summary).splitlines()

    ttft = compared(summary, "ttft_p95")
    assert ttft.ci95 is not None
    assert line.startswith(f"cache_aware vs round_robin: TTFT p95 {ttft.b_value:.0f} → {ttft.a_value:.0f} ms (−")
    assert ", TTFT p50 " in line
    assert ", hit tokens " in line
    assert ", goodput " in line
    assert line.count("95 % CI") == 4
    assert "goodput 14.3 → 14.3 req/s (no significant difference:" in line
    assert verdict == "Verdict: PASS – cache_aware meets 4 of 4 objectives"


def test_a_missed_objective_fails_and_is_named(make_log: MakeLog) -> None:
    slow = [replace(r, first_token_s=r.scheduled_s + 0.9) for r in make_log("score")]

    summary = build_summary(slow, OBJECTIVES, FACTS)

    assert (summary.verdict, exit_code(summary)) == ("fail", 1)
    assert "meets 2 of 4 objectives (ttft missed: 0 % of 95 %; goodput missed" in verdict_sentence(summary)


def test_the_baseline_has_no_say_in_the_verdict(make_log: MakeLog) -> None:
    log = [
        replace(r, first_token_s=r.scheduled_s + 0.9) if r.policy == "round_robin" else r
        for r in make_log("round_robin", "cache_aware")
    ]

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert summary.policies["round_robin"].objectives[0].ok is False
    assert (summary.baseline, summary.verdict) == ("round_robin", "pass")


def test_a_share_that_can_not_be_told_from_the_objective_is_inconclusive(make_log: MakeLog) -> None:
    """Of 240 requests 96 % are in time: the interval holds 95 %."""
    log = [
        replace(r, first_token_s=r.scheduled_s + 0.9) if r.index % 25 == 0 else r for r in make_log("score", repeats=1)
    ]

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert (summary.verdict, exit_code(summary)) == ("inconclusive", 3)
    assert "ttft undecided: 95.8 % of 95 %" in verdict_sentence(summary)


def test_lost_requests_stand_beside_the_latencies(make_log: MakeLog) -> None:
    """SL20: a comparison can't show latency without the share that got none."""
    log = [
        replace(r, outcome=Outcome.REFUSED, first_token_s=None, end_s=None, cached_tokens=None, output_tokens=None)
        if r.policy == "cache_aware" and r.index % 7 == 0
        else r
        for r in make_log("round_robin", "cache_aware")
    ]

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert "; not completed 0 % → 14.6 %" in verdict_sentence(summary)
    assert compared(summary, "goodput_rps").significant
    assert summary.verdict == "fail"


def test_reuse_across_tenants_fails_the_run(make_log: MakeLog) -> None:
    log = [replace(r, group="shared", tenant=f"t{r.index % 2}") for r in make_log("score")]
    log[5] = replace(log[5], planned_shared_tokens=0, cached_tokens=1600)

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert summary.verdict == "fail"
    assert "1 requests reused another tenant's cache entries" in verdict_sentence(summary)


@pytest.mark.parametrize(
    ("change", "facts", "reason"),
    [
        (
            lambda r: replace(r, sent_s=r.scheduled_s + 0.03),
            FACTS,
            r"the client sent late, p99 30\.0 ms, over 25\.0 ms",
        ),
        (lambda r: replace(r, planned_shared_tokens=0), FACTS, "hit more tokens than this run had sent"),
        (lambda r: replace(r, prompt_tokens=r.planned_prompt_tokens + 3), FACTS, "report a different prompt length"),
        (lambda r: r, replace(FACTS, requested_in_flight=256), r"256 requests in flight were requested, \d+ reached"),
        (lambda r: r, replace(FACTS, client_reasons=["the client's event loop stalled"]), "event loop stalled"),
        (lambda r: replace(r, phase="measured" if r.index < 9 else "prime"), FACTS, r"too few requests \(27"),
    ],
    ids=["client lag", "warm cache", "token counts", "in flight", "self-check", "too few"],
)
def test_a_spoiled_run_is_inconclusive_and_says_why(
    make_log: MakeLog, change: Callable[[RequestRecord], RequestRecord], facts: RunFacts, reason: str
) -> None:
    """A slow client is not a slow engine (aiperf#1424, LT10); a connection pool is not a fleet (vllm#7241, LT21)."""
    summary = build_summary([change(r) for r in make_log("score")], OBJECTIVES, facts)

    assert not summary.validity.valid
    assert exit_code(summary) == 3
    assert any(re.search(reason, found) for found in summary.validity.reasons), summary.validity.reasons


def test_a_fleet_that_falls_behind_never_passes(make_log: MakeLog) -> None:
    """200 requests a second offered, 15 done: whatever its objectives say, that is not a pass."""
    log = [replace(r, end_s=13 * r.scheduled_s + 1) for r in make_log("score")]
    only_availability = load_objectives(["availability"])

    summary = build_summary(log, only_availability, FACTS)

    own = summary.policies["score"]
    offered, achieved = own.value("offered_rps"), own.value("achieved_rps")
    assert offered is not None
    assert achieved == pytest.approx(offered / 13)
    assert own.objectives[0].measured == 1.0
    assert (summary.verdict, exit_code(summary)) == ("inconclusive", 3)
    assert "but completed 1.1 of 14.3 req/s offered" in verdict_sentence(summary)
    kept_up = build_summary(make_log("score"), only_availability, FACTS)
    assert kept_up.policies["score"].value("achieved_rps") == pytest.approx(offered, rel=0.03)
    assert kept_up.verdict == "pass"


def test_cached_tokens_that_nobody_sent_make_the_run_invalid_and_accuse_nobody(make_log: MakeLog) -> None:
    """vllm-project/vllm#43370 (N21): a false accusation of a leak between tenants failed CI."""
    log = [replace(r, tenant=f"t{r.index % 2}", cached_tokens=(r.prompt_tokens or 0) - 1) for r in make_log("score")]

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert summary.policies["score"].isolation_violations is None
    assert (summary.verdict, exit_code(summary)) == ("inconclusive", 3)
    assert "counts transferred or computed tokens as cached (prefill/decode split?)" in summary.validity.reasons[0]


def test_a_client_that_is_late_by_a_tenth_of_what_it_measured_is_invalid(make_log: MakeLog) -> None:
    """TTFT of 20 ms with a client lag of 3 ms, far below the objective of 0.5 s."""
    late = [replace(r, sent_s=r.scheduled_s + 0.003, first_token_s=r.scheduled_s + 0.02) for r in make_log("score")]

    reasons = build_summary(late, OBJECTIVES, FACTS).validity.reasons

    assert reasons == [
        "score: the client sent late, p50 3 ms, over 10% of the TTFT p50 (20 ms): a large part of the measured TTFT is "
        "the client's; free the machine"
    ]


def test_figures_that_rest_on_a_part_of_the_answers_say_so(make_log: MakeLog) -> None:
    log = [replace(r, cached_tokens=None) if r.index % 4 == 0 else r for r in make_log("score")]

    notes = build_summary(log, OBJECTIVES, FACTS).notes

    assert "score: 25 % of the answers report no cached tokens: reuse figures rest on the others" in notes


def test_a_serial_replay_is_labelled(make_log: MakeLog) -> None:
    facts = replace(FACTS, runs=[RunFigures(policy="score", repeat=0, loop="serial")])

    summary = build_summary(make_log("score"), [], facts)

    assert summary.notes[0].startswith("serial replay: ")
    assert console_table(summary).title == "shared-prefix on 4 × simulated, serial replay"


def test_logs_of_different_plans_are_refused(make_log: MakeLog) -> None:
    log = [r for r in make_log("round_robin", "cache_aware") if r.policy == "round_robin" or r.index % 10]

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert summary.validity.reasons == [
        "cache_aware: 72 requests of the plan are not in its log: run all policies on one plan"
    ]


def test_a_handful_of_requests_with_nothing_to_decide_is_not_graded(make_log: MakeLog) -> None:
    """A short trace replayed under one policy, without objectives: its figures are exact, not samples."""
    summary = build_summary(make_log("score", repeats=1, requests=8), [], FACTS)

    assert (summary.validity.valid, summary.verdict, exit_code(summary)) == (True, "not_graded", 0)


def test_an_empty_log_is_inconclusive() -> None:
    summary = build_summary([], OBJECTIVES, FACTS)

    assert (summary.verdict, summary.policies) == ("inconclusive", {})
    assert "the request log is empty" in verdict_sentence(summary)


def test_policies_are_shown_in_the_order_asked_for(make_log: MakeLog) -> None:
    log = make_log("cache_aware", "round_robin", repeats=1)

    summary = build_summary(log, [], replace(FACTS, policies=["round_robin", "cache_aware"]))

    assert list(summary.policies) == ["round_robin", "cache_aware"]
    assert summary.baseline == "round_robin"


def test_peak_in_flight(make_record: MakeRecord) -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0), (1.5, None)]
    records = [make_record(index=i, scheduled_s=a, sent_s=a, end_s=b) for i, (a, b) in enumerate(spans)]

    assert peak_in_flight(Columns.of(records)) == 3


def test_a_run_without_objectives_is_not_said_to_have_met_any(make_log: MakeLog) -> None:
    summary = build_summary(make_log("score", repeats=1), [], FACTS)
    assert verdict_sentence(summary).endswith("Verdict: NOT GRADED – score has no objectives")
    assert "shared-prefix on 4 × simulated" in str(console_table(summary).title)


def test_a_target_of_unknown_size_is_not_counted(make_log: MakeLog) -> None:
    summary = build_summary(make_log("target", repeats=1), [], replace(FACTS, engine="target", workers=None))
    assert json.loads(summary.to_json())["workers"] is None
    assert console_table(summary).title == "shared-prefix on target"
