"""What each figure of a policy's grade means, on logs small enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.grading.figures import hotspot_figures
from prefixwatch.loadgen.grading.grade import grade
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.report.rows import latency_rows
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.slo.build import load_objectives
from prefixwatch.slo.objective import Condition, Objective, RequestField

MakeRecord = Callable[..., RequestRecord]

TTFT_95 = Objective(
    name="ttft",
    title="TTFT",
    service="llm",
    target=0.95,
    conditions=(Condition(RequestField.TTFT_SECONDS, "lte", 0.5),),
)


def only(records: list[RequestRecord], *objectives: Objective, workers: int | None = None) -> PolicyGrade:
    [graded] = grade(records, objectives, workers=workers).values()
    return graded


def hotspot(records: list[RequestRecord], *, workers: int) -> tuple[float | None, ...]:
    """(max over mean, overloaded share, top share)"""
    return tuple(figure.value for figure in hotspot_figures(Measured(Columns.of(records), workers=workers)))


def test_ttft_counts_from_the_scheduled_time(make_record: MakeRecord) -> None:
    """A stalled sender, coordinated omission (LT20), or an engine that hides its queue (llm-d-inference-sim#266,
    SL16) can't make a wait vanish."""
    records = [make_record(index=0, scheduled_s=1.0, sent_s=6.0, first_token_s=6.1)]

    assert only(records).value("ttft_p50") == pytest.approx(5100)


def test_one_stall_shows_in_the_share_of_requests_that_were_due_in_it(make_record: MakeRecord) -> None:
    """LT20: 100 requests/s for 60 s, answers in 10 ms, one stall of 10 s: one in six waits, p90 is 4.01 s."""
    stall_ends = 10.0
    records = [
        make_record(index=i, scheduled_s=i / 100, sent_s=i / 100, first_token_s=max(i / 100, stall_ends) + 0.01)
        for i in range(6000)
    ]

    graded = only(records)

    assert graded.value("ttft_p50") == pytest.approx(10)
    assert graded.value("ttft_p95") == pytest.approx(7010, abs=11)
    assert graded.value("ttft_p99") == pytest.approx(9410, abs=11)


def test_refusals_are_bad_and_stand_beside_the_latency_of_the_others(make_record: MakeRecord) -> None:
    """SL20: 86 answers with TTFT 0.4 s and 14 × 503 after 5 ms: goodput 0.86, no 5 ms in the latencies."""
    records = [make_record(index=i, scheduled_s=i / 10, first_token_s=i / 10 + 0.4) for i in range(86)] + [
        make_record(
            index=i,
            scheduled_s=i / 10,
            first_token_s=None,
            end_s=i / 10 + 0.005,
            outcome=Outcome.REFUSED,
            status=503,
            output_tokens=None,
            cached_tokens=None,
            prompt_tokens=None,
        )
        for i in range(86, 100)
    ]

    graded = only(records, TTFT_95)

    assert (graded.requests.completed, graded.requests.refused, graded.requests.scheduled) == (86, 14, 100)
    assert graded.value("goodput_ratio") == 0.86
    assert graded.value("goodput_rps") == pytest.approx(8.6)
    assert graded.count("ttft_p50") == 86
    assert graded.value("ttft_p50") == pytest.approx(400)
    assert graded.value("ttft_p99") == pytest.approx(400)
    assert (graded.objectives[0].measured, graded.objectives[0].ok) == (0.86, False)
    assert graded.limits("goodput_ratio") == pytest.approx((0.7786, 0.9147), abs=1e-4)


def test_what_a_stopped_run_never_sent_has_not_waited(make_record: MakeRecord) -> None:
    """Stopped at 5 s: of the rest of the plan only what was due by then has waited; none of it is dropped."""
    records = [make_record(index=i, scheduled_s=i / 2, first_token_s=i / 2 + 0.1, end_s=i / 2 + 0.5) for i in range(10)]
    unsent = {"sent_s": None, "first_token_s": None, "end_s": None, "outcome": Outcome.NEVER_SENT}
    records += [make_record(index=10 + i, scheduled_s=4.5 + i, **unsent) for i in range(10)]

    graded = only(records, TTFT_95)

    assert (graded.requests.never_sent, graded.count("ttft_p50")) == (10, 11)
    assert graded.value("ttft_p99") == pytest.approx(500, rel=0.11)
    assert graded.objectives[0].measured == pytest.approx(0.5)


def test_requests_cancelled_at_the_end_stay_with_their_wait_so_far(make_record: MakeRecord) -> None:
    """LT17: ten requests of 90 s in a run of 60 s are cancelled, neither dropped nor failed; ≥ 50 s is their TTFT."""
    records = [make_record(index=i, scheduled_s=float(i), first_token_s=i + 0.1, end_s=i + 0.4) for i in range(60)]
    records += [
        make_record(index=60 + i, scheduled_s=9.4, first_token_s=None, end_s=None, outcome=Outcome.CANCELLED)
        for i in range(10)
    ]

    graded = only(records, TTFT_95)

    assert (graded.requests.cancelled, graded.requests.failed, graded.requests.scheduled) == (10, 0, 70)
    assert graded.value("ttft_p99") == pytest.approx(50_000)
    assert graded.objectives[0].measured == pytest.approx(60 / 70)


def test_a_timed_out_request_keeps_its_wait_in_the_percentiles(make_record: MakeRecord) -> None:
    """vllm-project/vllm#28493: when clients give up, the slower system must not look faster."""
    records = [make_record(index=0, first_token_s=None, end_s=20.0, outcome=Outcome.TIMED_OUT, output_tokens=None)]

    assert only(records).value("ttft_p50") == 20_000


def test_unstreamed_answers_have_no_ttft(make_record: MakeRecord) -> None:
    """kubernetes-sigs/inference-perf#150 (LT27): absent, excluded and shown as excluded."""
    records = [make_record(index=0, first_token_s=None, end_s=4.0), make_record(index=1)]

    graded = only(records, TTFT_95)

    assert (graded.count("ttft_p50"), graded.objectives[0].total, graded.objectives[0].excluded) == (1, 1, 1)
    assert graded.value("goodput_ratio") == 1.0


def test_nothing_is_unknown_not_zero(make_record: MakeRecord) -> None:
    records = [
        make_record(first_token_s=None, outcome=Outcome.FAILED, cached_tokens=None, worker="", decision_us=None),
    ]

    graded = only(records, TTFT_95)

    known = {figure.name: figure.value for figure in graded.figures if figure.value is not None}
    lags = {f"client_lag_{point}": 0.0 for point in ("p50", "p95", "p99")}
    assert known == {"goodput_ratio": 0.0, "not_completed_ratio": 1.0, **lags}
    assert graded.isolation_violations is None
    assert graded.objectives[0].measured == 0.0


def test_only_the_measured_phase_counts(make_record: MakeRecord) -> None:
    """sgl-project/sglang#37359 (LT22): priming is no measurement."""
    graded = only([make_record(index=0, phase="prime", first_token_s=9.0), make_record(index=1)])

    assert graded.requests.scheduled == 1
    assert graded.value("ttft_p99") == pytest.approx(100)


def test_hit_partial_and_miss(make_record: MakeRecord) -> None:
    """Of 100 shared tokens six blocks of 16 are reusable: all is a hit, some partial, none a miss; unknown none."""
    records = [
        make_record(index=i, first_token_s=ttft, cached_tokens=cached)
        for i, (cached, ttft) in enumerate([(96, 0.1), (112, 0.2), (16, 0.3), (0, 0.4), (None, 0.5)])
    ]

    graded = only(records)

    assert graded.value("ttft_hit_p50") == pytest.approx(150)
    assert graded.value("ttft_partial_p50") == pytest.approx(300)
    assert graded.value("ttft_miss_p50") == pytest.approx(400)
    assert graded.count("ttft_p50") == 5


def test_an_engine_always_computes_the_last_token(make_record: MakeRecord) -> None:
    """A prompt of exactly ten blocks that was sent before whole reuses nine, and that is a hit."""
    graded = only([make_record(planned_shared_tokens=160, prompt_tokens=160, cached_tokens=144)])

    assert graded.count("ttft_hit_p50") == 1


def test_hit_ratio_is_of_all_prompt_tokens_that_say_what_was_reused(make_record: MakeRecord) -> None:
    """inference-perf#715 (EM44): 2000 of 4020, not of 2020; a request without cache information is left out."""
    records = [
        make_record(index=0, prompt_tokens=2010, cached_tokens=0),
        make_record(index=1, prompt_tokens=2010, cached_tokens=2000),
        make_record(index=2, prompt_tokens=5000, cached_tokens=None),
    ]

    graded = only(records)

    assert (graded.value("prompt_tokens"), graded.value("hit_tokens")) == (4020, 2000)
    assert graded.value("hit_ratio") == pytest.approx(0.4975, abs=1e-4)
    assert graded.value("block_hit_ratio") == 125 / 250
    assert (graded.value("hit_tokens_p50"), graded.value("hit_tokens_p95")) == (1000, 1900)


def test_the_hit_ratio_is_the_runs_own(make_record: MakeRecord) -> None:
    """vllm-project/vllm#46938 (EM46): from this run's requests, so no lifetime counter can colour it."""
    records = [make_record(index=i, prompt_tokens=1000, cached_tokens=100) for i in range(100)]

    assert only(records).value("hit_ratio") == 0.1


def test_paced_sessions_that_all_go_to_one_worker_are_a_hotspot(make_record: MakeRecord) -> None:
    """AMD-AGI/Infera#103 (RT04): 448 requests one after another, all on one of two workers."""
    records = [
        make_record(index=i, scheduled_s=i * 0.5, first_token_s=i * 0.5 + 0.1, end_s=i * 0.5 + 0.2) for i in range(448)
    ]

    assert hotspot(records, workers=2) == (2.0, 0.5, 1.0)


def test_a_balanced_fleet_is_none(make_record: MakeRecord) -> None:
    records = [make_record(index=i, scheduled_s=i * 0.1, worker=f"w{i % 4}") for i in range(400)]

    max_over_mean, *others = hotspot(records, workers=4)

    assert max_over_mean == pytest.approx(1.0, abs=0.02)
    assert others == [0.0, 0.25]


def test_a_hotspot_that_moves_shows_in_the_windows(make_record: MakeRecord) -> None:
    """Each worker has its half minute: fair over the whole run, never in any window."""
    records = [make_record(index=i, scheduled_s=i * 0.5, worker=f"w{i // 60}") for i in range(240)]

    max_over_mean, _, top_share = hotspot(records, workers=4)

    assert (max_over_mean, top_share) == (4.0, 0.25)


def test_goodput_judges_each_class_by_its_own_objectives(make_record: MakeRecord) -> None:
    chat = Objective(**{f: getattr(TTFT_95, f) for f in TTFT_95.__slots__} | {"request_classes": ("chat",)})
    records = [
        make_record(index=i, scheduled_s=i, first_token_s=i + 2.0, end_s=i + 3.0, request_class=name)
        for i, name in enumerate(["chat", "batch", "batch", "batch"])
    ]

    graded = only(records, chat)

    assert graded.value("goodput_ratio") == 0.75
    assert (graded.objectives[0].total, graded.objectives[0].measured) == (1, 0.0)


def test_policies_keep_their_order(make_record: MakeRecord) -> None:
    records = [make_record(policy=name) for name in ("score", "cache_aware", "score")]

    assert list(grade(records, [])) == ["score", "cache_aware"]


@given(st.lists(st.tuples(st.sampled_from(list(Outcome)), st.floats(0, 30) | st.none()), min_size=1, max_size=40))
def test_no_request_is_ever_lost(rows: list[tuple[Outcome, float | None]]) -> None:
    records = [
        RequestRecord(
            id=str(i),
            policy="p",
            repeat=0,
            index=i,
            phase="measured",
            tenant="t",
            session="s",
            turn=0,
            group="g",
            request_class="chat",
            scheduled_s=float(i),
            first_token_s=None if wait is None else i + wait,
            outcome=outcome,
        )
        for i, (outcome, wait) in enumerate(rows)
    ]

    graded = only(records, *load_objectives(["goodput"]))

    counts = graded.requests
    parts = sum(getattr(counts, outcome.value) for outcome in Outcome)
    assert parts == counts.scheduled == len(records)
    good = graded.value("goodput_ratio")
    assert good is not None
    assert good <= counts.completed / counts.scheduled


def test_a_gap_of_several_tokens_is_no_inter_token_latency(make_record: MakeRecord) -> None:
    """inference-perf printed an ITL median of 0.0 at a true 20 ms when chunks held three tokens."""
    by_token = make_record(index=0, output_tokens=4, chunk_gaps_ms=[20.0, 20.0, 20.0])
    by_three = make_record(index=1, output_tokens=10, chunk_gaps_ms=[60.0, 60.0, 60.0])

    grade = only([by_token, by_three])

    assert [grade.value(f"itl_{point}") for point in ("p50", "p95", "p99")] == [20.0, 20.0, 20.0]
    assert grade.count("itl_p50") == 3
    assert grade.value("chunk_gap_p99") == 60.0
    assert grade.value("tpot_p50") == pytest.approx(20.0)


def test_ttft_counts_from_the_schedule_and_the_client_s_own_part_is_shown(make_record: MakeRecord) -> None:
    record = make_record(scheduled_s=1.0, sent_s=1.02, first_token_s=1.1, end_s=1.4)

    grade = only([record])

    assert grade.value("ttft_p50") == pytest.approx(100.0)
    assert grade.value("ttft_from_send_p50") == pytest.approx(80.0)
    assert grade.value("client_lag_p50") == pytest.approx(20.0)
    assert grade.value("e2e_p50") == pytest.approx(400.0)


def test_the_first_answer_token_is_beside_the_first_token(make_record: MakeRecord) -> None:
    """A model that thinks first: vllm's and sglang's reasoning deltas are tokens, but not the answer."""
    grade = only([make_record(first_token_s=0.1, first_answer_s=2.5)])

    assert [grade.value("ttft_p50"), grade.value("first_answer_p50")] == pytest.approx([100, 2500])
    assert "first answer token" in [row.figure for row in latency_rows(grade)]
    silent = only([make_record(first_token_s=0.1, first_answer_s=0.1)])
    assert "first answer token" not in [row.figure for row in latency_rows(silent)]


def test_answers_without_usage_are_counted(make_record: MakeRecord) -> None:
    grade = only([make_record(index=i, output_tokens=16 if i else None, cached_tokens=None) for i in range(4)])

    assert grade.value("without_output_tokens_ratio") == 0.25
    assert grade.value("without_cached_tokens_ratio") == 1.0
