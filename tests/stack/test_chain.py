"""Every quantity that must be measured goes all the way: series → panel → alert with a threshold → runbook page."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from prefixwatch.alerts.catalogue.model import THRESHOLDS, Alert, load_catalogue, read_thresholds
from prefixwatch.dashboards.definition import Dashboard, shipped
from prefixwatch.dashboards.queries.expressions import metrics_of, recording_rules, series_labels
from prefixwatch.dashboards.queries.inventory import everything_asked
from prefixwatch.documents import load
from prefixwatch.runbooks.page import shipped_runbooks
from tests.alerts.hygiene import metrics

CATALOGUE = load_catalogue()
MADE_FOR_EACH_SLO = {alert.name for alert in CATALOGUE.alerts if alert.expr is None}
"""Their thresholds are the objectives' targets and the burn rates of their windows."""


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    series: list[str] = Field(min_length=1, description="what carries the quantity")
    alerts: list[str] = Field(default=[], description="alerts on it")
    no_alert: str = Field(default="", description="why nothing alerts on it")

    @model_validator(mode="after")
    def _alerted_or_not(self) -> Self:
        if bool(self.alerts) == bool(self.no_alert):
            raise ValueError("give alerts, or no_alert with the reason")
        return self


class Chain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: dict[str, Row]


ROWS = load(Path("tests/stack/chain.yaml"), Chain).rows
ALERTED = [(name, alert) for name, row in ROWS.items() for alert in row.alerts]


@cache
def shown() -> set[str]:
    """Series on panels, and those that are recorded from nothing but such."""
    read = {metric for asked in everything_asked() for metric in metrics_of(asked.expr)}
    families = {_family(name) for name in read}
    return read | {
        rule.name for rule in recording_rules() if {_family(each) for each in metrics(rule.expr)} <= families
    }


@pytest.mark.parametrize(("name", "row"), ROWS.items(), ids=list(ROWS))
def test_each_series_exists_and_is_on_a_panel(name: str, row: Row) -> None:
    assert [series for series in row.series if series not in series_labels()] == []
    assert [series for series in row.series if series not in shown()] == []


@pytest.mark.parametrize(("name", "alert"), ALERTED)
def test_each_alert_is_about_the_row_and_has_a_threshold(name: str, alert: str) -> None:
    found = CATALOGUE.alert(alert)
    assert name in found.rows
    assert alert in read_thresholds(THRESHOLDS) or alert in MADE_FOR_EACH_SLO


def _with_rules(read: set[str]) -> set[str]:
    """Families behind these series: of a rule's series also what the rule reads; suffixes and SLO windows left out."""
    rules = {rule.name: rule.expr for rule in recording_rules()}
    return {_family(each) for name in read for each in {name} | (metrics(rules[name]) if name in rules else set())}


def _leads_to(dashboard: Dashboard, alert: str) -> Iterable[str]:
    """Titles of the panels that an alert's page is linked from."""
    for panel in dashboard.panels:
        if alert in panel.runbooks or alert in {line.alert for line in panel.lines}:
            yield panel.title


@pytest.mark.parametrize(
    "alert", [one for one in CATALOGUE.alerts if one.name != "Watchdog"], ids=lambda alert: alert.name
)
def test_an_alerts_link_opens_a_dashboard_with_a_panel_on_what_it_reads(alert: Alert) -> None:
    """At night the link of the notification is all that is followed."""
    [(name, dashboard)] = [(n, d) for n, d in shipped().items() if d.uid == alert.dashboard]
    titles = set(_leads_to(dashboard, alert.name))

    assert titles, f"no panel of {name} links to {alert.name}"
    read = {
        metric
        for asked in everything_asked()
        if asked.dashboard == name and asked.panel in titles
        for metric in metrics_of(asked.expr)
    }
    assert _with_rules(read) & _with_rules(
        metrics(alert.expr) if alert.expr else {"prefixwatch:slo_bad_ratio:increase1h"}
    )


def _family(metric: str) -> str:
    for suffix in ("_bucket", "_count", "_sum"):
        metric = metric.removesuffix(suffix)
    return "slo" if metric.startswith("prefixwatch:slo_") else metric


@pytest.mark.parametrize("alert", CATALOGUE.alerts, ids=lambda alert: alert.name)
def test_each_alert_has_a_page_with_steps_that_can_be_run(alert: Alert) -> None:
    assert shipped_runbooks().steps_of(alert.name)


def test_each_row_of_the_registry_is_in_the_table() -> None:
    registered = {row for alert in CATALOGUE.alerts for row in alert.rows}
    registered |= {row for record in CATALOGUE.records for row in record.rows}

    assert sorted(registered - set(ROWS)) == []


def test_each_row_with_alerts_names_all_that_the_registry_has() -> None:
    for name, row in ROWS.items():
        unnamed = {alert.name for alert in CATALOGUE.alerts if name in alert.rows} - {*row.alerts, "Watchdog"}
        assert unnamed <= MADE_FOR_EACH_SLO, name
