"""What the engines did during the run, drawn on the request log's clock."""

from __future__ import annotations

import pytest

from prefixwatch.loadgen.report.charts import Chart
from prefixwatch.loadgen.report.fleet_charts import fleet_charts
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow


def row(at: float, stored: int | None, *, worker: str = "w0", repeat: int = 0, running: float = 2.0) -> FleetRow:
    return FleetRow(
        unix_s=0.0, policy="p", repeat=repeat, worker=worker, up=True, running=running, waiting=1.0,
        kv_usage_ratio=0.5, prefix_hit_tokens_total=None, prefix_query_tokens_total=None,
        kv_blocks_stored_total=stored, kv_blocks_removed_total=None if stored is None else stored // 2,
        kv_cache_clears_total=None if stored is None else 0, kv_batches_missed_total=None if stored is None else 0,
        at_s=at,
    )  # fmt: skip


def charts_of(rows: list[FleetRow]) -> dict[str, Chart]:
    return {chart.id: chart for chart in fleet_charts(rows)}


def test_totals_become_blocks_a_second_of_all_workers() -> None:
    """Workers add up; repeats are averaged; what was stored before time 0 isn't in the chart."""
    rows = [
        row(at, stored, worker=worker, repeat=repeat)
        for repeat in range(2)
        for worker, per_second in (("w0", 10), ("w1", 30))
        for at, stored in ((-1.0, 0), (0.0, 500), (2.0, 500 + 2 * per_second), (4.0, 500 + 4 * per_second))
    ]

    chart = charts_of(rows)["kv-events"]

    stored, removed = chart.traces
    assert stored["y"] == [pytest.approx(40.0)] * 4
    assert removed["y"] == [pytest.approx(20.0)] * 4
    assert stored["x"] == [0.5, 1.5, 2.5, 3.5]
    assert chart.rows[0][:5] == ["p", "0.5", "40", "20", "30"]


def test_engines_without_events_have_no_chart_of_them() -> None:
    assert list(charts_of([row(0.0, None), row(2.0, None)])) == ["engine-load"]


def test_running_and_waiting_are_the_workers_sums() -> None:
    rows = [row(at, 0, worker=worker, running=3.0) for at in (0.2, 1.2, 2.2) for worker in ("w0", "w1")]

    running, waiting = charts_of(rows)["engine-load"].traces

    assert running["y"] == [6.0, 6.0]
    assert waiting["y"] == [2.0, 2.0]


def test_a_fleet_that_nobody_watched_has_no_charts() -> None:
    assert fleet_charts([]) == []


def test_lost_batches_are_said() -> None:
    rows = [row(0.0, 0), row(2.0, 10)]
    rows[-1].kv_batches_missed_total = 3
    assert "lower bounds" in charts_of(rows)["kv-events"].description
