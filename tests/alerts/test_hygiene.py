"""Every rule names what exists, divides by what isn't 0, and can be false."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser as ast
import pytest

from prefixwatch.alerts.build import build
from prefixwatch.alerts.catalogue.model import load_catalogue
from prefixwatch.alerts.rule import AlertingRule, RecordingRule, Rule, RuleFile
from prefixwatch.alerts.settings import GRAFANA_URL, SCRAPES_A_RANGE, RuleSettings
from prefixwatch.dashboards.definition import shipped
from prefixwatch.documents.durations import seconds
from prefixwatch.slo.promql import walk
from tests.alerts.hygiene import compares, exporter_names, faults, metrics, ranges, template_faults

FILES = build()
ALERTS = [rule for file in FILES for group in file.groups for rule in group.rules if isinstance(rule, AlertingRule)]
RECORDS = [rule for file in FILES for group in file.groups for rule in group.rules if isinstance(rule, RecordingRule)]
NAMES = exporter_names({rule.name: [] for rule in RECORDS} | {"prefixwatch:prefix_hit:ratio_rate5m": []})
BORN_WITH_THEIR_FIRST_EVENT = {"IsolationViolation", "SloZeroToleranceBroken"}
"""A counter that didn't exist before has no increase; these alerts also look at its value."""


def rules() -> Iterator[tuple[RuleFile, Rule]]:
    for file in FILES:
        for group in file.groups:
            for rule in group.rules:
                yield file, rule


def test_every_name_exists_counters_are_rated_and_divisions_are_guarded() -> None:
    found = [
        f"{file.name}: {rule.name}: {fault}"
        for file, rule in rules()
        for fault in faults(rule.expr, NAMES)
        if not (rule.name in BORN_WITH_THEIR_FIRST_EVENT and "is a counter" in fault)
    ]

    assert found == []


def test_every_alert_can_be_false_and_says_how_long_it_must_hold() -> None:
    assert {alert.name for alert in ALERTS if not compares(alert.expr)} == {"Watchdog"}
    assert {alert.name for alert in ALERTS if alert.hold == "0m"} == BORN_WITH_THEIR_FIRST_EVENT | {"Watchdog"}


def test_every_alert_has_all_that_is_needed_at_night() -> None:
    dashboards = {group.dashboard for group in load_catalogue().groups}
    for alert in ALERTS:
        assert alert.labels["severity"] in ({"page", "ticket"} if alert.name != "Watchdog" else {"none"})
        assert alert.labels["cause"] in {"true", "false"}
        assert set(alert.annotations) == {"summary", "description", "exit_condition", "runbook_url", "dashboard"}
        assert "$value" in alert.annotations["description"], f"{alert.name}: without the measured value"
        assert alert.annotations["runbook_url"] == f"http://prefixwatch:9477/runbooks/{alert.name}"
        assert alert.annotations["dashboard"].partition("?")[0].removeprefix(f"{GRAFANA_URL}/d/") in dashboards


def test_an_alerts_dashboard_opens_on_what_the_alert_is_about() -> None:
    links = {alert.name: alert.annotations["dashboard"] for alert in ALERTS}
    variables = {one.uid: {"cluster", "model", *one.variables} for one in shipped().values()}

    assert links["WorkerSlow"] == f"{GRAFANA_URL}/d/prefixwatch-affinity?var-worker={{{{ $labels.target | urlquery }}}}"
    assert (
        links["TenantFlood"] == f"{GRAFANA_URL}/d/prefixwatch-affinity?var-tenant={{{{ $labels.tenant | urlquery }}}}"
    )
    assert links["SloBudgetBurnFast"] == f"{GRAFANA_URL}/d/prefixwatch-slo"
    by_model = {"RequestsRefused", "RequestsFailing", "PrefixHitRateLow", "StickySessionCollisions", "TrafficStopped"}
    assert all(links[name].endswith("?var-model={{ $labels.model | urlquery }}") for name in by_model)
    split = {one.name for one in load_catalogue().alerts if one.by_model}
    of_one_model = [one for one in ALERTS if one.name in split and "scope" not in one.labels]
    assert [one.name for one in of_one_model if "?" not in one.annotations["dashboard"]] == []
    for name, link in links.items():
        uid, _, query = link.removeprefix(f"{GRAFANA_URL}/d/").partition("?")
        assert set(re.findall(r"var-(\w+)=", query)) <= variables[uid], f"{name}: {link}"


def test_templates_use_only_labels_that_the_alert_has() -> None:
    found = []
    for alert in ALERTS:
        labels = _labels_of(alert.expr) | set(alert.labels)
        for text in alert.annotations.values():
            found += [f"{alert.name}: {fault}" for fault in template_faults(text, labels)]
            left = text.replace("{{ $value", "").replace("$labels", "")
            assert "$" not in left, f"{alert.name}: a placeholder wasn't filled in: {text}"

    assert found == []


def test_ranges_hold_four_scrapes() -> None:
    """kubernetes-sigs/linkerd2#9509 and others (SL07): a rate over too short a range is empty."""
    rated = min(length for _, rule in rules() for length in ranges(rule.expr) if "rate(" in rule.expr)
    shortest = min(length for _, rule in rules() for length in ranges(rule.expr))

    assert rated >= SCRAPES_A_RANGE * 60
    assert shortest >= SCRAPES_A_RANGE * RuleSettings().scrape_interval_seconds


def test_a_group_records_what_its_rules_read_before_they_read_it() -> None:
    for file in FILES:
        for group in file.groups:
            own = [rule.name for rule in group.rules if isinstance(rule, RecordingRule)]
            for position, rule in enumerate(group.rules):
                if isinstance(rule, RecordingRule):
                    later = set(own[position:]) - set(own[:position])
                    assert not metrics(rule.expr) & later, f"{file.name}: {rule.name} reads what comes after it"


def test_what_alerts_read_is_fresh() -> None:
    """A recorded series that is written less often than every 5 minutes is stale in between."""
    assert {group.interval for file in FILES for group in file.groups} == {"1m", "2m"}
    assert all(seconds(group.interval) < 300 for file in FILES for group in file.groups)


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("prefixwatch_prefix_hit_token_total", "no series is called prefixwatch_prefix_hit_token_total"),
        ('prefixwatch_target_up{worker="a"}', "prefixwatch_target_up has no label worker"),
        ("sum(prefixwatch_requests_total)", "prefixwatch_requests_total is a counter: take its rate or increase"),
        ("up / sum(up)", "unguarded division by sum(up): compare it with > 0"),
        ("sum(up == 0)", "up == 0 is added up by value: use bool"),
    ],
)
def test_faults_are_found(expr: str, fault: str) -> None:
    assert faults(expr, NAMES) == [fault]


def _labels_of(expr: str) -> set[str]:
    """Labels that aggregations keep, or that the selectors of an expression without any name."""
    kept: set[str] = set()
    for node, _ in walk(ast.parse(expr)):
        if isinstance(node, ast.AggregateExpr) and node.modifier is not None:
            kept |= set(node.modifier.labels)
        if isinstance(node, ast.VectorSelector) and node.name in RECORDED_LABELS:
            kept |= RECORDED_LABELS[str(node.name)]
    return kept


RECORDED_LABELS = {
    rule.name: {
        label
        for node, _ in walk(ast.parse(rule.expr))
        if isinstance(node, ast.AggregateExpr) and node.modifier is not None
        for label in node.modifier.labels
    }
    for rule in RECORDS
}
