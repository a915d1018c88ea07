"""When a drawn page fails, and what is said of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from prefixwatch.alerts.prometheus import Series
from tests.dashboards.render.frames import Query, frames
from tests.dashboards.render.layout import Place, Placed
from tests.dashboards.render.page_input import Answered
from tests.dashboards.render.pictures import PanelShown, Shown
from tests.dashboards.render.verdict import PanelVerdict, judge

WITH_DATA = [Series({}, [(1.0, 0.5)])]


def answered(series: list[Series], expr: str = "sum(prefixwatch_target_up)", **panel: Any) -> Answered:
    model = {"title": "Reuse", "type": "stat", "targets": [{"refId": "A", "expr": expr}], **panel}
    return Answered(Placed(model, Place(0, 0, 12, 8)), frames(Query("A", expr), series))


def shown(text: str = "50%", **changes: Any) -> PanelShown:
    usual = {"state": "drawn", "width": 500, "height": 200, "title_cut_off": False, "cut_off": False}
    return PanelShown(title="Reuse", kind="stat", text=text, **{**usual, **changes})


def verdict(given: Answered, panel: PanelShown) -> PanelVerdict:
    (found,) = judge("overview", "dark", [given], Shown([panel], [])).panels
    return found


def test_a_panel_with_a_number_is_drawn() -> None:
    assert verdict(answered(WITH_DATA), shown()).outcome == "drawn"


def test_a_visualisation_that_is_not_exported_is_counted_as_tested_by_query() -> None:
    assert verdict(answered(WITH_DATA), shown(state="not drawn")).outcome == "query only"


def test_a_panel_without_data_fails_with_what_it_says() -> None:
    found = verdict(answered([]), shown(text="nothing was evicted", state="empty"))

    assert (found.outcome, found.why) == ("failed", "no data: it says 'nothing was evicted'")


def test_a_series_of_nan_alone_is_no_data() -> None:
    assert verdict(answered([Series({}, [(1.0, math.nan)])]), shown("metric gone")).outcome == "failed"


def test_a_listed_reason_excuses_an_empty_panel() -> None:
    found = verdict(answered([], "sum(prefixwatch_gpu_utilization_ratio)"), shown("none", state="empty"))

    assert found.outcome == "empty, listed"
    assert found.why == "only with a GPU exporter (DCGM) among the targets"


@pytest.mark.parametrize(
    ("panel", "why"),
    [
        (shown(height=0), "drawn 500 px wide and 0 px high"),
        (shown(" \n"), "is blank"),
        (shown("No data"), "says 'No data' though its queries have answers"),
        (shown("NaN"), "says 'NaN'"),
        (shown("1.7 ×\n∞ ×"), "says '∞'"),
        (shown(title_cut_off=True), "its title is cut off"),
        (shown(cut_off=True), "its bars or columns don't fit"),
    ],
)
def test_what_a_panel_must_not_look_like(panel: PanelShown, why: str) -> None:
    found = verdict(answered(WITH_DATA), panel)

    assert (found.outcome, found.why) == ("failed", why)


def test_errors_of_the_page_and_of_its_layout_fail_it() -> None:
    twice = [answered(WITH_DATA), answered(WITH_DATA, title="Burn")]

    page = judge("overview", "dark", twice, Shown([shown()], ["console: boom"]))

    assert page.failures == [
        "overview (dark): 'Reuse' and 'Burn' overlap",
        "overview (dark): console: boom",
        "overview (dark): 1 of 2 panels are on the page",
    ]
