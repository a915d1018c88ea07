"""The leaderboard of a report, and a report of many policies."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from prefixwatch.loadgen.grading.summary import Summary, build_summary
from prefixwatch.loadgen.grading.wording import number
from prefixwatch.loadgen.report.leaderboard import label_positions, leaderboard_chart
from prefixwatch.loadgen.report.page import console_table, render_report
from tests.loadgen.grading.test_report import FACTS, OBJECTIVES, MakeLog

SIX = ("round_robin", "cache_aware", "loadaware", "flexlb_formula", "affinity", "score")


@pytest.fixture(scope="module")
def six(make_log: MakeLog) -> Summary:
    log = make_log(*SIX, repeats=1)
    for record in log:
        record.reason, record.predicted_tokens, record.prediction_cause = "hit", record.cached_tokens, "exact"
    return build_summary(log, OBJECTIVES, FACTS)


def test_the_leaderboard_marks_every_policy_by_reuse_and_by_balance(six: Summary) -> None:
    chart = leaderboard_chart(six.policies)

    own = six.policies["score"]
    hits = own.value("hit_ratio")
    assert hits is not None
    assert [row[0] for row in chart.rows] == list(SIX)
    assert [trace["name"] for trace in chart.traces] == [*SIX, *SIX]
    assert len({trace["marker"]["symbol"] for trace in chart.traces}) == 6
    by_reuse, by_balance = (trace for trace in chart.traces if trace["name"] == "score")
    assert by_reuse["x"] == [pytest.approx(100 * hits, abs=0.001)]
    assert by_balance["x"] == [pytest.approx(own.value("hotspot_max_over_mean"), abs=0.001)]
    assert by_reuse["y"] == by_balance["y"] == [pytest.approx(own.value("ttft_p95"), rel=1e-5)]


def test_one_policy_alone_makes_no_leaderboard(make_log: MakeLog) -> None:
    alone = build_summary(make_log("score", repeats=1), OBJECTIVES, FACTS)
    assert leaderboard_chart(alone.policies).traces == []


def test_names_of_close_marks_are_written_on_different_sides() -> None:
    assert label_positions(["a", "b", "c"], [(0.5, 0.5), (0.5, 0.51), (0.9, 0.1)]) == [
        "bottom center",
        "top center",
        "top center",
    ]


def test_a_name_stays_inside_the_panel() -> None:
    assert label_positions(["a_rather_long_name"], [(0.98, 0.98)]) == ["bottom left"]


def test_six_policies_fit_a_narrow_terminal_a_row_each(six: Summary) -> None:
    output = StringIO()
    Console(file=output, width=80).print(console_table(six))

    assert "…" not in output.getvalue()
    rows = {line.split()[0]: line for line in output.getvalue().splitlines() if line.strip()}
    for name, own in six.policies.items():
        assert number(own.value("ttft_p95")) in rows[name]


def test_the_report_says_why_requests_went_where_they_went(six: Summary) -> None:
    page = render_report(six, [], OBJECTIVES, {})

    assert '<td class="left">hit</td><td>100 %</td><td>240</td>' in page
    prediction = six.policies["score"].prediction
    assert prediction is not None
    assert f'<td class="left">exact</td><td>100 %</td><td>240</td><td>{prediction.predicted_tokens:,}</td>' in page
