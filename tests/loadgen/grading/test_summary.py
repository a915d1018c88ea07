"""summary.json: its contract, its verdict, and the sentence people read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.columns import Columns
from loadgen.comparison import Comparison
from loadgen.records import Outcome, RequestRecord
from loadgen.report import console_table
from loadgen.summary import (
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
from loadgen.validity import peak_in_flight
from slo.document import load_objectives

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

    assert content["schema"] == 1
    assert {"scenario", "engine", "workers", "policies", "comparison", "validity", "verdict"} <= content.keys()
    assert {"sent", "completed", "refused", "failed", "timed_out"} <= policy["requests"].keys()
    for latency in ("ttft_ms", "ttft_hit_ms", "ttft_miss_ms", "tpot_ms", "router_decision_us"):
        assert policy[latency].keys() == {"p50", "p95", "p99"}
    assert policy["prefix"].keys() == {
        "prompt_tokens",
        "hit_tokens",
        "hit_ratio",
        "hit_ratio_ci95",
        "block_hit_ratio",
        "block_hit_ratio_ci95",
        "hit_tokens_mean",
        "hit_tokens_mean_ci95",
        "hit_tokens_p50",
        "hit_tokens_p50_ci95",
        "hit_tokens_p95",
        "hit_tokens_p95_ci95",
        "expected_hit_tokens",
    }
    assert policy["hotspot"].keys() == {"max_over_mean", "overloaded_share", "top_share"}
    assert {"goodput_rps", "isolation_violations"} <= policy.keys()
    assert {"name", "objective", "measured", "ok"} <= policy["objectives"][0].keys()
    assert {"a", "b", "metric", "difference", "ci95", "p_value"} <= content["comparison"][0].keys()
    assert content["validity"] == {"valid": True, "reasons": []}


def test_the_committed_schema_is_the_models() -> None:
    """On a change: `python -c "from loadgen.summary import write_schema; write_schema()"`, and raise the number if
    a key is renamed, removed or given another meaning."""
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == summary_schema()


def test_it_survives_the_disk(summary: Summary, tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", summary)

    assert read_summary(tmp_path / "summary.json") == summary


def test_cache_aware_routing_wins_on_shared_prefixes(summary: Summary) -> None:
    hits, ttft = compared(summary, "hit_tokens_mean"), compared(summary, "ttft_p95_ms")

    assert (hits.a, hits.b, hits.pairs) == ("cache_aware", "round_robin", 720)
    assert hits.significant
    assert hits.difference is not None
    assert hits.difference > 500
    assert ttft.significant
    assert ttft.difference is not None
    assert ttft.difference < -40
    assert summary.policies["cache_aware"].ttft_ms.p95 == pytest.approx(ttft.a_value)
    assert summary.verdict == "pass"
    assert exit_code(summary) == 0


def test_without_shared_prefixes_no_gain_is_announced(make_log: MakeLog) -> None:
    """Published claims C4: the negative control."""
    summary = build_summary(make_log("round_robin", "cache_aware", shared_tokens=0), OBJECTIVES, FACTS)

    assert not any(c.significant for c in summary.comparison)
    assert "cache_aware vs round_robin: no significant difference" in verdict_sentence(summary)


def test_the_sentence_says_how_much_and_how_surely(summary: Summary) -> None:
    line, *_, verdict = verdict_sentence(summary).splitlines()

    ttft = compared(summary, "ttft_p95_ms")
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
        (lambda r: replace(r, planned_shared_tokens=0), FACTS, "hit more than this run had ever sent"),
        (lambda r: replace(r, prompt_tokens=r.planned_prompt_tokens + 3), FACTS, "report another prompt length"),
        (lambda r: r, replace(FACTS, requested_in_flight=256), r"256 requests in flight were asked for, \d+ reached"),
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


def test_logs_of_different_plans_are_refused(make_log: MakeLog) -> None:
    log = [r for r in make_log("round_robin", "cache_aware") if r.policy == "round_robin" or r.index % 10]

    summary = build_summary(log, OBJECTIVES, FACTS)

    assert summary.validity.reasons == [
        "cache_aware: 72 requests of the plan are not in its log: run all policies on one plan"
    ]


def test_a_handful_of_requests_with_nothing_to_decide_is_no_failure(make_log: MakeLog) -> None:
    """A short trace replayed under one policy, without objectives: its figures are exact, not samples."""
    summary = build_summary(make_log("score", repeats=1, requests=8), [], FACTS)

    assert (summary.validity.valid, summary.verdict) == (True, "pass")


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
    assert verdict_sentence(summary).endswith("Verdict: PASS – score had no objectives to meet")
    assert "shared-prefix on 4 × simulated" in str(console_table(summary).title)


def test_a_target_of_unknown_size_is_not_counted(make_log: MakeLog) -> None:
    summary = build_summary(make_log("target", repeats=1), [], replace(FACTS, engine="target", workers=None))
    assert json.loads(summary.to_json())["workers"] is None
    assert console_table(summary).title == "shared-prefix on target"
