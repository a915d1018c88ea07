"""How panels are drawn: thresholds and their colours, tables, axes."""

from __future__ import annotations

import re

import pytest

from prefixwatch.alerts.burn_rate import WORKBOOK
from prefixwatch.alerts.catalogue.model import THRESHOLDS, read_thresholds
from prefixwatch.dashboards.definition import Panel
from prefixwatch.dashboards.grafana.appearance import UNITS
from prefixwatch.dashboards.queries.threshold_lines import objectives, threshold
from prefixwatch.documents.durations import promql
from prefixwatch.slo.rule_model import HistogramIndicator
from tests.dashboards.drawn import PANELS, drawn, models, panels_of


@pytest.mark.parametrize(("name", "panel"), [(n, p) for n, p in PANELS if p.lines])
def test_thresholds_are_the_alerts_and_the_objectives_own(name: str, panel: Panel) -> None:
    alerts, slos = read_thresholds(THRESHOLDS), objectives()
    wanted = set()
    for line in panel.lines:
        if line.alert:
            wanted.add(alerts[line.alert].threshold)
        elif line.burn:
            wanted.add({promql(long_seconds): factor for factor, long_seconds, _ in WORKBOOK}[line.burn])
        elif line.budget:
            wanted.add(0)
        elif line.of == "target":
            wanted.add(slos[line.slo or ""].target)
        else:
            indicator = slos[line.slo or ""].indicator
            bound = indicator.bound if isinstance(indicator, HistogramIndicator) else None
            wanted.add(bound or float(re.findall(r"≤ ([\d.]+) s", slos[line.slo or ""].rule)[0]))
    [drawn] = [p for p in panels_of(models()[name]) if p["title"] == panel.title]

    steps = drawn["fieldConfig"]["defaults"]["thresholds"]["steps"]

    drawn_values = sorted(step["value"] for step in steps if step["value"] is not None)
    assert drawn_values == pytest.approx(sorted(wanted), abs=1e-8)


def test_below_a_floor_is_red_and_above_a_ceiling_is_red() -> None:
    [floor] = [p for p in panels_of(models()["prefix-cache"]) if p["title"] == "How much of the prompts is reused?"]
    [ceiling] = [p for p in panels_of(models()["prefix-cache"]) if p["title"] == "How full are prefix caches?"]

    assert [s["color"] for s in floor["fieldConfig"]["defaults"]["thresholds"]["steps"]] == ["red", "green"]
    assert [s["color"] for s in ceiling["fieldConfig"]["defaults"]["thresholds"]["steps"]] == ["green", "red"]


def test_none_is_not_red_where_more_than_none_is_wrong() -> None:
    """Grafana colours a value that equals a step; no violation must not look like one."""
    [panel] = [p for p in panels_of(models()["overview"]) if p["title"] == "Reuse across tenants"]

    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]

    assert [step["color"] for step in steps if step["value"] is None or step["value"] <= 0] == ["green"]
    assert [step["color"] for step in steps if step["value"] is None or step["value"] <= 1] == ["green", "red"]


@pytest.mark.parametrize(("name", "title"), [("overview", "Error budget left"), ("slo-budgets", "Error budget left")])
def test_an_overspent_budget_is_red_and_one_with_anything_left_is_not(name: str, title: str) -> None:
    steps = drawn(name, title)["fieldConfig"]["defaults"]["thresholds"]["steps"]

    def colour(value: float) -> str:
        return [str(step["color"]) for step in steps if step["value"] is None or step["value"] <= value][-1]

    assert [colour(value) for value in (-1.5, 0.0, 0.001, 1.0)] == ["red", "red", "green", "green"]


def test_burns_are_measured_by_the_budget_so_that_objectives_compare() -> None:
    """1 % bad is a tenth of the pace at 90 %, and ten times it at 99.9 %."""
    burning = [(p, q) for _, p in PANELS for q in p.queries if re.search("burn", p.title, re.IGNORECASE)]

    assert len(burning) == 4
    assert [panel.title for panel, query in burning if "prefixwatch:slo_error_budget:ratio" not in query.expr] == []
    assert {(panel.unit, bool(panel.lines)) for panel, _ in burning} == {("factor", True)}


def test_what_is_down_is_not_grey() -> None:
    for name, title in (("exporter-health", "Exporters up"), ("overview", "Data-quality flags")):
        colours = [s["color"] for s in drawn(name, title)["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert sorted(colours) == ["green", "red"], title


def test_the_answer_to_a_tables_question_is_its_first_row() -> None:
    for name, panel in [(n, p) for n, p in PANELS if p.kind == "table" and p.sort]:
        assert panel.sort is not None
        table = drawn(name, panel.title)
        organised = table["transformations"][-1]["options"]
        columns = sorted(organised["indexByName"], key=organised["indexByName"].get)
        shown = [organised["renameByName"].get(column, column) for column in columns]
        assert table["options"]["sortBy"] == [{"displayName": panel.sort.column, "desc": panel.sort.descending}]
        assert panel.sort.column in shown, panel.title
    firsts = {p.title: p.sort.column for _, p in PANELS if p.sort}
    assert firsts["Which budget is used up first?"] == "budget left"
    assert firsts["Which targets are down?"] == "last seen"


def test_a_query_of_another_unit_has_an_axis_or_a_column_of_its_own() -> None:
    for name, panel in PANELS:
        for number, query in enumerate(panel.queries):
            if query.unit is not None and panel.kind != "heatmap":
                names = {"byFrameRefID": chr(ord("A") + number), "byName": query.legend}
                overrides = drawn(name, panel.title)["fieldConfig"]["overrides"]
                unit: dict[str, object] = {"id": "unit", "value": UNITS[query.unit]}
                kind = "byName" if panel.kind == "table" else "byFrameRefID"
                bounded = panel.kind == "timeseries" and panel.maximum is not None
                own: list[dict[str, object]] = (
                    [unit, {"id": "max"}] if bounded else [unit]
                )  # the panel's maximum is of the panel's unit
                if panel.kind == "timeseries" and query.unit == "percentunit":
                    own.append({"id": "custom.axisSoftMax", "value": 0.1})  # shares that are all 0
                assert {"matcher": {"id": kind, "options": names[kind]}, "properties": own} in overrides


def test_a_stacked_area_begins_at_0() -> None:
    stacked = [drawn(name, panel.title) for name, panel in PANELS if panel.stacked]

    assert stacked
    assert {panel["fieldConfig"]["defaults"]["min"] for panel in stacked} == {0}


def test_a_line_at_0_lies_within_its_axis() -> None:
    """Grafana draws one beyond the axis over the times below it."""
    for name, panel in PANELS:
        at_0 = any(threshold(line, "").value == 0 for line in panel.lines)
        if panel.kind == "timeseries" and at_0:
            assert drawn(name, panel.title)["fieldConfig"]["defaults"]["custom"]["axisSoftMin"] == 0, panel.title
