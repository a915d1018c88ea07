"""A breakdown by request class, where a run has several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefixwatch.loadgen.grading.grade import grade_policy
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.grading.summary import RunFacts, build_summary
from prefixwatch.loadgen.report.junit import junit_tree
from prefixwatch.loadgen.report.page import markdown_summary, render_report
from prefixwatch.loadgen.report.rows import class_rows
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.slo.build import load_objectives

MakeRecord = Callable[..., RequestRecord]

OBJECTIVES = load_objectives(["ttft"])
FACTS = RunFacts(scenario="two-classes", engine="simulated", workers=1)


@pytest.fixture(scope="module")
def log(make_record: MakeRecord) -> list[RequestRecord]:
    """90 quick interactive requests, 10 slow ones of a batch class; one of the batch was refused."""
    quick = [make_record(index=k, scheduled_s=k / 10, sent_s=k / 10, first_token_s=k / 10 + 0.1) for k in range(90)]
    slow = [
        replace(quick[0], index=k, request_class="batch", scheduled_s=k / 10, sent_s=k / 10, first_token_s=k / 10 + 2)
        for k in range(90, 100)
    ]
    slow[-1] = replace(slow[-1], outcome=Outcome.REFUSED, first_token_s=None)
    return [*quick, *slow]


def graded(log: list[RequestRecord]) -> PolicyGrade:
    return grade_policy(Measured(Columns.of(log), OBJECTIVES))


def test_each_class_has_figures_of_its_own(log: list[RequestRecord]) -> None:
    classes = graded(log).classes

    assert list(classes) == ["interactive", "batch"]
    assert (classes["interactive"].requests.scheduled, classes["batch"].requests.scheduled) == (90, 10)
    assert classes["interactive"].value("ttft_p95") == pytest.approx(100.0)
    assert classes["batch"].value("ttft_p95") == pytest.approx(2000.0)
    assert (classes["interactive"].value("goodput_ratio"), classes["batch"].requests.refused) == (1.0, 1)


def test_only_objectives_that_cover_a_class_are_graded_for_it(log: list[RequestRecord]) -> None:
    for name, own in graded(log).classes.items():
        assert [o.name for o in own.objectives] == [o.name for o in OBJECTIVES if o.covers(name)]
        assert sum(o.total for o in own.objectives) <= own.requests.scheduled * len(OBJECTIVES)


def test_one_class_alone_is_no_breakdown(make_record: MakeRecord) -> None:
    assert graded([make_record(index=k) for k in range(3)]).classes == {}


def test_reports_show_the_classes(log: list[RequestRecord]) -> None:
    summary = build_summary(log, OBJECTIVES, FACTS)
    row = class_rows("round_robin", summary.policies["round_robin"])[1]

    assert row[:4] == ["round_robin", "batch", "10", "10 %"]
    assert "| round_robin | batch | 10 | 10 % | 2,000 |" in markdown_summary(summary)
    page = render_report(summary, log, OBJECTIVES, {})
    assert '<h2 id="classes">By request class</h2>' in page
    assert '<td class="left">batch</td><td>10</td><td>10 %</td><td>2,000</td>' in page


def test_junit_has_them_as_properties_and_no_cases(log: list[RequestRecord]) -> None:
    suite = junit_tree(build_summary(log, OBJECTIVES, FACTS)).find("testsuite")

    assert suite is not None
    properties = {each.get("name"): each.get("value") for each in suite.findall("properties/property")}
    assert properties["batch.ttft_p95_ms"] == "2,000"
    assert properties["interactive.goodput"] == "100 %"
    assert suite.get("tests") == "2"
