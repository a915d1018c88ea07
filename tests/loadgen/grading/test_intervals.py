"""Every graded figure stands with what it could have been: intervals of one run, and of the difference of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prefixwatch.loadgen.grading.comparison import compare_policies
from prefixwatch.loadgen.grading.figures import COMPARED, MEASURES
from prefixwatch.loadgen.grading.grade import grade_policy
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.grading.resampling import Sample, Statistic, tally_of
from prefixwatch.loadgen.grading.statistics import mean_interval, quantile_intervals, share_interval
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.slo.wilson import wilson

MakeRecord = Callable[..., RequestRecord]
MakeLog = Callable[..., list[RequestRecord]]

RUNS, REQUESTS = 200, 900
REPEATS = np.repeat(np.arange(3), REQUESTS // 3)


@pytest.fixture(scope="module")
def log(make_log: MakeLog) -> list[RequestRecord]:
    """Two policies; every answer came token by token, and one request in forty was refused."""
    rows = make_log("round_robin", "cache_aware")
    gaps = np.random.default_rng(1).uniform(10, 30, (len(rows), 27))
    return [
        replace(row, outcome=Outcome.REFUSED, first_token_s=None, cached_tokens=None, output_tokens=None)
        if row.index % 40 == 7
        else replace(row, chunk_gaps_ms=gaps[i].tolist())
        for i, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def graded(log: list[RequestRecord]) -> PolicyGrade:
    return grade_policy(Measured(Columns.of([row for row in log if row.policy == "cache_aware"])))


def test_every_latency_stands_with_intervals_that_hold_it(graded: PolicyGrade) -> None:
    latencies = [
        name
        for measure in MEASURES
        if measure.quantiles and measure.unit in ("ms", "us") and measure.interval == "blocks"
        for name, *_ in measure.statistics()
    ]
    assert len(latencies) == 33
    for name in latencies:
        value, limits = graded.value(name), graded.limits(name)
        if value is None:
            assert name.startswith(("ttft_partial", "first_answer"))
            continue
        assert limits is not None
        assert limits[0] <= value <= limits[1]
        assert limits[0] < limits[1]


def test_every_other_figure_stands_with_an_interval_that_holds_it(graded: PolicyGrade) -> None:
    for name in (
        "goodput_rps",
        "not_completed_ratio",
        "output_tokens_per_second",
        "hit_ratio",
        "block_hit_ratio",
        "hit_tokens_mean",
    ):
        value, limits = graded.value(name), graded.limits(name)
        assert value is not None
        assert limits is not None
        assert limits[0] < value < limits[1]
    assert graded.limits("hit_tokens_p50") == (1600, 1600)  # most requests reuse the whole prefix
    assert graded.limits("hit_tokens_p95") == (1600, 1600)


def test_a_comparison_has_every_metric_with_its_interval(log: list[RequestRecord]) -> None:
    both = {
        name: Measured(Columns.of([row for row in log if row.policy == name]))
        for name in ("round_robin", "cache_aware")
    }
    found = compare_policies(both)
    assert [c.metric for c in found] == list(COMPARED)
    for c in found:
        assert c.ci95 is not None
        assert c.difference is not None
        assert c.ci95[0] <= c.difference <= c.ci95[1]
    better = {c.metric for c in found if c.significant}
    assert {"ttft_p95", "hit_ratio", "e2e_p95"} <= better
    assert not {"itl_p95", "not_completed_ratio"} & better  # gaps are drawn alike, and the same requests are refused


def test_too_few_requests_have_figures_and_no_intervals(make_record: MakeRecord) -> None:
    graded = grade_policy(Measured(Columns.of([make_record(index=i, scheduled_s=float(i)) for i in range(20)])))
    assert graded.value("hit_ratio") == 0.6
    assert graded.limits("hit_ratio") is graded.limits("not_completed_ratio") is graded.limits("goodput_rps") is None
    assert graded.value("output_tokens_per_second") is not None
    assert graded.limits("output_tokens_per_second") is None


def test_output_is_what_came_while_the_plan_ran(make_record: MakeRecord) -> None:
    """Ten requests, one a second: the plan is 10 s long. The last answer goes on for half of its time beyond that."""
    times = {"first_token_s": 9.5, "end_s": 10.5}
    rows = [make_record(index=i, scheduled_s=float(i), first_token_s=i + 0.1, end_s=i + 0.4) for i in range(9)]
    rows.append(make_record(index=9, scheduled_s=9.0, **times))
    columns = Columns.of(rows)
    assert Measured(columns).output_rate.mean() == pytest.approx((9 * 16 + 8) / 10)
    lost = [replace(row, outcome=Outcome.FAILED, output_tokens=None) if row.index == 3 else row for row in rows]
    assert Measured(Columns.of(lost)).output_rate.mean() == pytest.approx((8 * 16 + 8) / 10)
    silent = Columns.of([replace(row, output_tokens=None) for row in rows])
    assert np.isnan(Measured(silent).output_rate).all()


def test_intervals_of_a_ratio_of_sums_cover_it_about_as_often_as_they_say() -> None:
    """Hit tokens of prompt tokens, where cold stretches of a run follow one another and long prompts hit less."""
    rng = np.random.default_rng(5)
    covered = []
    for _ in range(RUNS):
        warmth = np.repeat(rng.normal(0, 0.15, REQUESTS // 10), 10)
        prompts = rng.integers(100, 2000, REQUESTS).astype(np.float64)
        hits = prompts * np.clip(0.8 - prompts / 4000 + warmth, 0, 1)
        limits = mean_interval(Sample(hits, weights=prompts), REPEATS, resamples=200)
        covered.append(limits is not None and limits[0] <= _TRUE_RATIO <= limits[1])
    assert 0.88 <= np.mean(covered) <= 0.99


def _true_ratio() -> float:
    rng = np.random.default_rng(6)
    prompts = rng.integers(100, 2000, 400_000).astype(np.float64)
    hits = prompts * np.clip(0.8 - prompts / 4000 + rng.normal(0, 0.15, 400_000), 0, 1)
    return float(hits.sum() / prompts.sum())


_TRUE_RATIO = _true_ratio()


def test_gaps_of_one_answer_are_drawn_together() -> None:
    """Slow answers are slow in all of their gaps: single gaps drawn anew would make the interval far too narrow."""
    rng = np.random.default_rng(7)
    counts = rng.integers(0, 60, REQUESTS)
    gaps = np.repeat(rng.exponential(20, REQUESTS), counts)
    [limits] = quantile_intervals(Sample(gaps, counts), REPEATS, [0.5])
    [naive] = quantile_intervals(rng.permutation(gaps), np.zeros(len(gaps), dtype=np.int64), [0.5])
    assert limits is not None
    assert naive is not None
    assert limits[0] < np.median(gaps) < limits[1]
    assert limits[1] - limits[0] > 3 * (naive[1] - naive[0])


def test_a_sample_takes_the_gaps_of_the_requests_that_are_asked_for() -> None:
    sample = Sample(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([2, 0, 3]))
    assert sample.take([2, 1, 0]).values.tolist() == [3, 4, 5, 1, 2]
    assert sample.take([2]).counts is not None
    assert sample.cells(np.array([7, 8, 9])).tolist() == [7, 7, 9, 9, 9]
    assert len(sample) == 3


def test_a_tally_counts_gaps_by_the_blocks_of_their_requests() -> None:
    sample = Sample(np.arange(10.0), np.array([4, 1, 5]))
    tally = tally_of([(sample, np.array([0, 0, 1]))], 2, Statistic(0.5))
    drawn = np.array([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    assert tally.values(drawn).tolist() == [4.5, 2.0, 7.0]


def test_only_answers_that_came_token_by_token_have_token_gaps(make_record: MakeRecord) -> None:
    rows = [
        make_record(index=0, output_tokens=3, chunk_gaps_ms=[1.0, 2.0]),
        make_record(index=1, output_tokens=9, chunk_gaps_ms=[50.0]),
        make_record(index=2, output_tokens=2, chunk_gaps_ms=[3.0]),
    ]
    gaps = Measured(Columns.of(rows)).token_gaps
    assert gaps.counts is not None
    assert (gaps.values.tolist(), gaps.counts.tolist()) == ([1, 2, 3], [2, 0, 1])


def test_the_interval_of_a_share_is_the_wider_of_what_numbers_and_blocks_say() -> None:
    none = share_interval(np.zeros(REQUESTS), REPEATS)
    assert none == wilson(0, REQUESTS)
    burst = np.zeros(REQUESTS)
    burst[400:500] = 1.0  # one outage of a hundred requests
    wide, alone = share_interval(burst, REPEATS), wilson(100, REQUESTS)
    assert wide is not None
    assert alone is not None
    assert wide[0] < alone[0] < alone[1] < wide[1]
