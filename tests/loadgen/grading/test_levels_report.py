"""The page of a sweep or a search."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwatch.loadgen.grading.grade import grade_policy
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.rate_search import RateSearch, Share
from prefixwatch.loadgen.report.levels import level_charts, level_sentences, render_levels
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import RequestRecord


def searched() -> dict[str, Any]:
    """A fleet that meets its objective up to 10 requests a second."""
    search = RateSearch(4.0, low=1.0, high=100.0, precision_ratio=0.3, repeats=1)
    while (rate := search.next_rate()) is not None:
        search.note([Share("ttft", 0.95, 1000 if rate <= 10 else 500, 1000)])
    return {"scenario": "s", "mode": "search-rate", "policies": {"score": {**search.as_json(), "invalid": None}}}


def swept(make_record: Any) -> dict[str, Any]:
    def step(users: int, wait: float, verdict: str, reasons: list[str]) -> dict[str, Any]:
        log: list[RequestRecord] = [make_record(index=k, first_token_s=wait) for k in range(10)]
        grade = grade_policy(Measured(Columns.of(log))).model_dump(mode="json")
        return {
            "concurrency": users, "verdict": verdict, "reasons": reasons, "throughput_rps": 2.0 * users, "grade": grade,
        }  # fmt: skip

    steps = [step(1, 0.1, "pass", []), step(4, 0.2, "pass", []), step(16, 0.9, "invalid", ["the client was late"])]
    return {"scenario": "s", "mode": "sweep-concurrency", "policies": {"score": {"steps": steps}}}


def test_a_search_is_drawn_with_its_intervals_and_its_objective() -> None:
    found = searched()

    (chart,) = level_charts(found)

    (trace,) = chart.traces
    assert trace["x"] == sorted(trace["x"])
    assert all(y == (100.0 if x <= 10 else 50.0) for x, y in zip(trace["x"], trace["y"], strict=True))
    assert len(trace["error_y"]["array"]) == len(trace["x"])
    assert [shape["y0"] for shape in chart.layout["shapes"]] == [95.0]
    assert len(chart.rows) == len(found["policies"]["score"]["steps"])
    assert level_sentences(found)[0].startswith("score: 9.51 req/s meets every objective with 95 % confidence")


def test_a_sweep_is_drawn_as_latency_and_throughput(make_record: Any) -> None:
    found = swept(make_record)

    latency, throughput = level_charts(found)

    assert [trace["name"] for trace in latency.traces] == ["score, p50", "score, p95"]
    assert latency.traces[1]["y"] == pytest.approx([100.0, 200.0, 900.0])
    assert throughput.traces[0]["y"] == [2.0, 8.0, 32.0]
    assert throughput.traces[1]["y"] == pytest.approx([2.0, 8.0, 32.0])
    assert level_sentences(found) == [
        "score: 2 of 3 levels meet every objective with 95 % confidence, the highest 4 users; not valid: the "
        "client was late"
    ]


@pytest.mark.parametrize(("code", "mark"), [(0, "✓"), (1, "✗"), (3, "?")])
def test_the_page_says_how_it_ended_and_what_was_run(code: int, mark: str) -> None:
    page = render_levels(searched(), code, {"note": "</script><b>"})

    assert f"{mark} Search for the highest rate" in page
    assert "</script><b>" not in page
    assert page.count('class="chart"') == page.count("<summary>As a table</summary>") == 1


def test_the_page_of_closed_loops_says_so(make_record: Any) -> None:
    assert "closed loops: a server that stalls is sent fewer requests meanwhile" in render_levels(
        swept(make_record), 3, {}
    )
