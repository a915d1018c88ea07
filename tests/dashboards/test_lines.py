"""Thresholds are found by name; a name that has none to draw is refused with its place."""

from __future__ import annotations

import pytest

from prefixwatch.dashboards.definition import Line, Panel, Query, shipped
from prefixwatch.dashboards.grafana.appearance import Placed
from prefixwatch.dashboards.grafana.panels import classic_panel
from prefixwatch.dashboards.queries.threshold_lines import JUST_ABOVE_NONE, Step, Threshold, steps, threshold
from prefixwatch.documents import DocumentError


@pytest.mark.parametrize(
    ("line", "value", "bad"),
    [
        (Line(alert="PrefixHitRateLow"), 0.6, "below"),
        (Line(alert="EvictionChurn"), 0.2, "above"),
        (Line(slo="router-decision"), 0.012, "above"),
        (Line(slo="ttft"), 0.5, "above"),
        (Line(slo="session-hit-rate", of="target"), 0.85, "below"),
        (Line(alert="ExporterDown"), 0, "below"),
        (Line(alert="TargetDown", bad="above"), 0, "above"),
        (Line(burn="1h"), 14.4, "above"),
        (Line(burn="3d"), 1, "above"),
        (Line(budget="gone"), 0, "below"),
    ],
    ids=str,
)
def test_a_line_is_the_alerts_or_the_objectives(line: Line, value: float, bad: str) -> None:
    found = threshold(line, "here")

    assert (found.value, found.bad) == (value, bad)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (Line(alert="PrefixHitRateLow"), "PrefixHitRateLow: below 60 % for 15m"),
        (Line(alert="RouterDecisionSlow"), "RouterDecisionSlow: above 0.012 s for 10m"),
        (Line(alert="KvTransferNotWorthIt"), "KvTransferNotWorthIt: above 8,192 tokens for 30m"),
        (
            Line(slo="router-decision"),
            'SLO router-decision: 95 % of prefixwatch_router_decision_seconds{step="total"} ≤ 0.012 s',
        ),
    ],
    ids=str,
)
def test_a_line_has_the_unit_of_its_alert_or_objective(line: Line, says: str) -> None:
    assert threshold(line, "here").says == says


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (Line(alert="Nothing"), "here: lines: no alert 'Nothing' has a threshold"),
        (Line(alert="SloBudgetBurnFast"), "here: lines: no alert 'SloBudgetBurnFast' has a threshold"),
        (Line(slo="nothing"), "here: lines: no SLO 'nothing': there are availability"),
        (Line(burn="2h"), "here: lines: no burn rate of '2h' is alerted on: there are 1h, 6h, 1d, 3d"),
        (Line(slo="goodput"), "here: lines: SLO goodput has no single bound .*: use `of: target`"),
    ],
    ids=str,
)
def test_what_has_no_line_is_refused(line: Line, complaint: str) -> None:
    with pytest.raises(DocumentError, match=complaint):
        threshold(line, "here")


def _threshold(value: float, bad: str, *, serious: bool = True) -> Threshold:
    return Threshold(value, "above" if bad == "above" else "below", serious, "")


def test_an_alerts_side_is_red_and_an_objectives_orange() -> None:
    floor = [_threshold(0.8, "below"), _threshold(0.85, "below", serious=False)]
    ceiling = [_threshold(1.0, "above", serious=False), _threshold(2.0, "above")]

    assert steps(floor) == [Step(None, "red"), Step(0.8, "orange"), Step(0.85, "green")]
    assert steps(ceiling) == [Step(None, "green"), Step(1.0, "orange"), Step(2.0, "red")]
    assert steps([_threshold(0, "above")]) == [Step(None, "green"), Step(JUST_ABOVE_NONE, "red")]
    assert steps([_threshold(1, "above"), _threshold(1, "above", serious=False)])[1] == Step(1, "red")
    assert steps([_threshold(0, "below")]) == [Step(None, "red"), Step(JUST_ABOVE_NONE, "green")]
    assert steps([]) == [Step(None, "text")]


def test_a_floor_and_a_ceiling_on_one_panel_are_refused() -> None:
    panel = Panel(
        title="Both",
        kind="timeseries",
        about="x",
        unit="percentunit",
        queries=[Query(expr="up", legend="up")],
        empty="x",
        lines=[Line(alert="PrefixHitRateLow"), Line(alert="EvictionChurn")],
    )

    with pytest.raises(DocumentError, match="On call: Both: lines: one is a floor and one a ceiling"):
        classic_panel(Placed(1, panel, 0, 0), shipped()["overview"])
