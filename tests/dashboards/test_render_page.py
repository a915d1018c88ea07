"""Panels drawn by Grafana's components in a headless Chromium, and the types of @grafana/schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from prefixwatch.alerts.prometheus import Series
from prefixwatch.dashboards.build import RUNBOOKS
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.grafana.classic import classic
from prefixwatch.dashboards.grafana.manifest import manifest
from prefixwatch.dashboards.queries.panel_queries import MISSING
from tests.dashboards.render.frames import Query, frames
from tests.dashboards.render.layout import Place, Placed, opened
from tests.dashboards.render.page_input import Answered, Theme, page_input
from tests.dashboards.render.pictures import PanelShown, browser, draw
from tests.dashboards.render.queries import Window
from tests.dashboards.render.type_check import type_errors

pytestmark = pytest.mark.render

MINUTE = Window(0.0, 60.0, 15.0)
SHARES = [
    Series({"slo": name}, [(at, value) for at in (0.0, 15.0, 30.0, 45.0, 60.0)])
    for name, value in (("ttft", 0.49), ("goodput", 0.26))
]
SHARE_SETTINGS = {"defaults": {"unit": "percentunit", "min": 0, "max": 1, "noValue": "nobody asked"}, "overrides": []}
HORIZONTAL = {"displayMode": "basic", "orientation": "horizontal"}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


def answered(kind: str, series: list[Series], query: Query | None = None, **panel: Any) -> Answered:
    model = {"type": kind, "title": f"A {kind}", "fieldConfig": SHARE_SETTINGS, "options": {}, **panel}
    asked = query or Query("A", "shares", legend="{{slo}}")
    return Answered(Placed(model, Place(0, 0, 12, 8)), frames(asked, series))


def drawn(chromium: Browser, *panels: Answered, theme: Theme = "dark") -> tuple[list[PanelShown], list[str]]:
    shown = draw(chromium, page_input("A page", panels, MINUTE, theme), None)
    return shown.panels, shown.errors


def test_a_stat_shows_the_last_value_in_its_unit(chromium: Browser) -> None:
    (panel,), errors = drawn(chromium, answered("stat", SHARES))

    assert errors == []
    assert panel.state == "drawn"
    assert panel.text.split() == ["ttft", "49%", "goodput", "26%"]


def test_a_time_series_has_a_table_of_its_series_below(chromium: Browser) -> None:
    legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}

    (panel,), errors = drawn(chromium, answered("timeseries", SHARES, options={"legend": legend}), theme="light")

    assert errors == []
    assert panel.text.split() == ["Name", "Last", "*", "Max", "ttft", "49%", "49%", "goodput", "26%", "26%"]


def test_a_bar_gauge_names_and_labels_its_bars(chromium: Browser) -> None:
    (panel,), errors = drawn(chromium, answered("bargauge", SHARES, options=HORIZONTAL))

    assert errors == []
    assert panel.text.split() == ["ttft", "49%", "goodput", "26%"]


def test_a_table_is_transformed_as_its_panel_says(chromium: Browser) -> None:
    organised = {"excludeByName": {"Time": True}, "renameByName": {"Value": "left"}}
    query = Query("A", "shares", instant=True, form="table")
    series = [Series(one.labels, one.points[-1:]) for one in SHARES]

    (panel,), errors = drawn(
        chromium, answered("table", series, query, transformations=[{"id": "organize", "options": organised}])
    )

    assert errors == []
    assert panel.text.split() == ["slo", "left", "ttft", "49%", "goodput", "26%"]


def test_bars_and_columns_beyond_the_edge_are_told(chromium: Browser) -> None:
    many = [Series({"slo": f"slo-{number}"}, [(60.0, 0.5)]) for number in range(30)]
    wide = [Series({f"label-{number}": "x" for number in range(12)}, [(60.0, 0.5)])]
    table = Query("A", "shares", instant=True, form="table")
    panels, errors = drawn(
        chromium,
        answered("bargauge", many, options=HORIZONTAL),
        answered("bargauge", SHARES, options=HORIZONTAL),
        answered("table", wide, table),
        answered("table", SHARES, table),
    )

    assert errors == []
    assert [panel.cut_off for panel in panels] == [True, False, True, False]


def test_a_panel_without_data_says_why(chromium: Browser) -> None:
    panels, errors = drawn(chromium, answered("timeseries", []), answered("stat", []), answered("table", []))

    assert errors == []
    assert [(panel.state, panel.text.strip()) for panel in panels] == [("empty", "nobody asked")] * 3


@pytest.mark.parametrize("name", [name for name in shipped() if name != "exporter-health"])
def test_a_panel_whose_metric_an_engine_lost_says_so_and_names_it(chromium: Browser, name: str) -> None:
    """vllm-project/production-stack#989 (EM07): after a rename in an engine's release a panel is never just blank."""
    labels = {"target": "engine-0", "signal": "prefix_hit_tokens"}

    lost = [Series(labels, [(at, math.nan) for at in (0.0, 30.0, 60.0)])]

    model = classic(shipped()[name], RUNBOOKS)
    panels = [
        Answered(placed, frames(Query(MISSING, target["expr"], legend=target["legendFormat"]), lost))
        for placed in opened(model)
        for target in placed.panel.get("targets", ())
        if target["refId"] == MISSING
    ]

    shown, errors = drawn(chromium, *panels)

    assert errors == []
    for panel in shown:
        assert "engine-0 lost prefix_hit_tokens" in panel.text, f"{panel.title} ({panel.kind}): {panel.text}"


def test_a_visualisation_that_grafana_ui_does_not_export_is_said_not_drawn(chromium: Browser) -> None:
    (panel,), errors = drawn(chromium, answered("heatmap", SHARES))

    assert errors == []
    assert panel.state == "not drawn"
    assert panel.text.startswith("heatmap: 2 series, tested by query only.")


def test_what_goes_wrong_in_the_page_is_an_error(chromium: Browser) -> None:
    unknown = [{"id": "no-such-transformation", "options": {}}]

    panels, errors = drawn(chromium, answered("stat", SHARES, transformations=unknown))

    assert panels == []
    assert any("no-such-transformation" in error for error in errors)


def test_a_picture_is_written(chromium: Browser, tmp_path: Path) -> None:
    draw(chromium, page_input("A page", [answered("stat", SHARES)], MINUTE, "light"), tmp_path / "page.png")

    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def _models() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    models = {name: classic(dashboard, RUNBOOKS) for name, dashboard in shipped().items()}
    return models, {name: manifest(shipped()[name], model) for name, model in models.items()}


def test_the_shipped_dashboards_are_of_grafanas_types() -> None:
    assert type_errors(*_models()) == []


def test_what_grafana_would_not_read_is_a_type_error() -> None:
    models, manifests = _models()
    model = json.loads(json.dumps(models["overview"]))
    stat = next(panel for panel in model["panels"] if panel["type"] == "stat")
    stat["options"]["graphMode"] = "mountain"
    model["refresh"] = 30
    broken = json.loads(json.dumps(manifests["overview"]))
    broken["spec"]["cursorSync"] = "Sometimes"

    errors = "\n".join(type_errors({"overview": model}, {"overview": broken}))

    assert "Type '\"mountain\"' is not assignable to type" in errors
    assert "Type 'number' is not assignable to type 'string'" in errors
    assert "Type '\"Sometimes\"' is not assignable to type" in errors
