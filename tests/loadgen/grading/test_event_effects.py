"""The effect of an event, from a request log: reuse before, at its lowest and when it is back; sessions; losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.loadgen.grading.summary import RunFacts, build_summary
from prefixwatch.loadgen.report.event_section import event_row, event_table
from prefixwatch.loadgen.report.page import render_report
from prefixwatch.loadgen.request_log.event_effects import EventEffect, event_effects
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, table_of
from prefixwatch.loadgen.scenario.fleet_section import Event, EventPlan, event_plan

MakeRecord = Callable[..., RequestRecord]

PLAN: EventPlan = event_plan([Event(at=50.0, kill="engine-0")], 4)


@pytest.fixture
def log(make_record: MakeRecord) -> list[RequestRecord]:
    """Two requests a second for 100 s, 20 sessions on four workers; a quarter of the cache is gone for 10 s at 50 s,
    and two requests fail then."""
    records = []
    for k in range(200):
        at, session = k / 2, k % 20
        worker = session % 4
        cached = 80 if not 50 <= at < 60 else 20
        if at >= 50 and worker == 0:
            worker = 1 + session // 4 % 3
        records.append(
            make_record(
                id=f"r{k}",
                index=k,
                scheduled_s=at,
                sent_s=at,
                first_token_s=at + (0.1 if cached == 80 else 0.4),
                end_s=at + 0.4,
                cached_tokens=cached,
                session=f"s{session}",
                worker=f"w{worker}",
                group=f"g{session % 2}",
            )
        )
    for k, first in ((100, None), (101, 50.6)):
        records[k].outcome, records[k].first_token_s, records[k].end_s = Outcome.CUT_OFF, first, 51.0
        records[k].cached_tokens = records[k].prompt_tokens = None
    return records


def effect(log: list[RequestRecord], plan: EventPlan = PLAN) -> EventEffect:
    [found] = event_effects(table_of(log), ["round_robin"], plan)
    return found


def test_the_figures_of_an_event(log: list[RequestRecord]) -> None:
    own = effect(log)
    assert (own.event, own.at_s, own.hit_ratio_before) == ("engine-0 killed", 50, 0.5)
    assert own.hit_ratio_lowest == pytest.approx((18 * 20 + 2 * 80) / (20 * 160))  # 20 requests, two without figures
    assert own.seconds_to_recover == pytest.approx(19, abs=1)  # the first window of 20 requests without a cold one
    assert own.ttft_p95_before_ms == pytest.approx(100)
    assert own.ttft_p95_after_ms == pytest.approx(400)
    assert (own.sessions, own.moved_share, own.fair_share) == (20, 0.25, 0.25)
    assert (own.copies_before, own.copies_after) == (2, 2.5)
    assert (own.lost_before_first_token, own.lost_streaming) == (1, 1)


def test_reuse_that_does_not_come_back_is_not_back(log: list[RequestRecord]) -> None:
    for record in log:
        if record.scheduled_s >= 60:
            record.cached_tokens = 70  # 87.5 % of before
    assert effect(log).seconds_to_recover is None


def test_reuse_that_never_fell_takes_no_time(log: list[RequestRecord]) -> None:
    for record in log:
        record.cached_tokens = 80
    assert effect(log).seconds_to_recover == 0


def test_another_event_ends_the_look(log: list[RequestRecord]) -> None:
    plan = event_plan([Event(at=50.0, kill="engine-0"), Event(at=55.0, add=4)], 4)
    first, second = event_effects(table_of(log), ["round_robin"], plan)
    assert first.seconds_to_recover is None
    assert first.hit_ratio_lowest is None  # eight requests are no window
    assert (second.event, second.fair_share) == ("4 workers added", 4 / 7)


def test_the_report_shows_them_and_a_run_without_events_has_none(log: list[RequestRecord]) -> None:
    facts = RunFacts(scenario="churn", engine="simulated", workers=4, seeds=[1], events=PLAN)
    summary = build_summary(log, [], facts)
    [own] = summary.events
    assert event_row(own)[:4] == ["engine-0 killed, 50 s", "round_robin", "50 % → 16.2 %", "back at 95 % after 19.0 s"]
    assert event_table(summary.events).row_count == 1
    page = render_report(summary, log, [], {})
    assert "engine-0 killed, 50 s" in page
    assert 'id="event-hits"' in page

    without = build_summary(log, [], RunFacts(scenario="churn", engine="simulated", workers=4, seeds=[1]))
    assert without.events == []
    assert 'id="event-hits"' not in render_report(without, log, [], {})
