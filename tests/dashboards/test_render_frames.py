"""Answers of Prometheus as the data frames that Grafana's data source makes of them."""

from __future__ import annotations

import math

from prefixwatch.alerts.prometheus import Series
from tests.dashboards.render.frames import Query, frames, series_name

WORKER = {"__name__": "up", "target": "engine-0"}


def test_a_range_is_a_frame_a_series_named_by_its_legend() -> None:
    query = Query("A", "up", legend="{{target}} of {{ cluster }}", step_seconds=15.0)

    (frame,) = frames(query, [Series(WORKER, [(10.0, 1.0), (25.0, 0.0)])])

    time, value = frame["fields"]
    assert time["values"] == [10_000, 25_000]
    assert time["config"] == {"interval": 15_000}, "a longer distance is drawn as a gap"
    assert value["values"] == [1.0, 0.0]
    assert value["labels"] == {"target": "engine-0"}
    assert value["config"]["displayNameFromDS"] == "engine-0 of ", "a label that is absent is nothing"


def test_a_table_has_a_column_a_label_in_alphabetical_order() -> None:
    query = Query("B", "x", instant=True, form="table", alone=False)
    series = [Series({"zone": "a", "node": "n"}, [(5.0, 1.5)]), Series({"zone": "b"}, [(5.0, 2.0)])]

    (frame,) = frames(query, series)

    assert [(field["name"], field["values"]) for field in frame["fields"]] == [
        ("Time", [5000, 5000]),
        ("node", ["n", ""]),
        ("zone", ["a", "b"]),
        ("Value #B", [1.5, 2.0]),
    ]


def test_the_only_query_of_a_table_gives_value() -> None:
    (frame,) = frames(Query("A", "x", form="table"), [Series({}, [(5.0, 1.0)])])

    assert [field["name"] for field in frame["fields"]] == ["Time", "Value"]


def test_no_series_is_no_frame() -> None:
    assert frames(Query("A", "x", form="table"), []) == []
    assert frames(Query("A", "x"), []) == []


def test_a_lost_metric_stays_nan_for_its_mapping() -> None:
    (frame,) = frames(Query("missing", "x * NaN"), [Series({}, [(5.0, math.nan)])])

    assert math.isnan(frame["fields"][1]["values"][0])


def test_without_a_legend_a_series_is_called_as_in_promql() -> None:
    assert series_name(WORKER, "", "up") == 'up{target="engine-0"}'
    assert series_name({}, "", "sum(up)") == "sum(up)"
