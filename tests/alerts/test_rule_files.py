"""The committed rule files are what the model makes of the documents, and the registry is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from prefixwatch.alerts.alertmanager import configuration
from prefixwatch.alerts.build import RULES, build, rendered
from prefixwatch.alerts.catalogue.model import FOLDER, THRESHOLDS, Catalogue, load_catalogue, read_thresholds
from prefixwatch.alerts.scenario import TESTS, load_scenarios
from prefixwatch.alerts.scenario import rendered as rendered_tests
from prefixwatch.documents import DocumentError

FILES = build()
CATALOGUE = load_catalogue()


def committed() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in RULES.glob("*.yaml")}


def test_committed_rules_are_those_that_a_build_writes() -> None:
    assert committed() == rendered(FILES)


def test_committed_promtool_tests_are_made_of_the_scenarios() -> None:
    made = rendered_tests(FILES)

    assert {path.name: path.read_text(encoding="utf-8") for path in TESTS.glob("*.yaml") if path.name in made} == made
    assert {path.name for path in TESTS.glob("*.yaml")} - set(made) == {"field-reports.yaml"}


def test_the_committed_alertmanager_configuration_is_that_of_the_catalogue() -> None:
    assert (FOLDER.parent / "alertmanager.yaml").read_text(encoding="utf-8") == configuration(CATALOGUE)


def test_every_alert_has_a_scenario_and_every_scenario_an_alert() -> None:
    assert set(load_scenarios()) == {alert.name for alert in CATALOGUE.alerts} - {"Watchdog"}


def test_every_scenario_makes_six_tests() -> None:
    """Also where two have the same series and share theirs."""
    titles = {"fires", "quiet", "low traffic", "absent", "counter reset", "replica restart"}
    made: dict[str, list[tuple[str, bool]]] = {name: [] for name in load_scenarios()}
    for text in rendered_tests(FILES).values():
        for case in yaml.safe_load(text)["tests"]:
            names, _, title = case["name"].partition(": ")
            assert set(names.split(", ")) == {asked["alertname"] for asked in case["alert_rule_test"]}
            for name in names.split(", "):
                expected = [asked["exp_alerts"] for asked in case["alert_rule_test"] if asked["alertname"] == name]
                made[name].append((title, any(expected)))
    for name, cases in made.items():
        assert sorted(title for title, _ in cases) == sorted(titles), name
        assert ("fires", True) in cases, name
        assert {title for title, fires in cases if fires} <= {"fires", "absent"}, name


def test_every_threshold_has_an_alert_that_uses_it() -> None:
    alerts = {alert.name for alert in CATALOGUE.alerts if alert.expr is not None} - {"Watchdog"}

    assert set(read_thresholds(THRESHOLDS)) == alerts


def test_what_an_alert_inhibits_exists_and_is_no_page_when_it_is_a_ticket() -> None:
    by_name = {alert.name: alert for alert in CATALOGUE.alerts}

    for alert in CATALOGUE.alerts:
        for name in alert.inhibits:
            assert alert.cause, f"{alert.name} is a symptom and silences {name}"
            assert alert.severity == "page" or by_name[name].severity == "ticket", f"{alert.name} silences {name}"


def test_own_thresholds_replace_the_shipped_ones(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("PrefixHitRateLow: {threshold: 0.3, minimum: 500, for: 1h, why: a small fleet}\n")

    alert = load_catalogue(own).alert("PrefixHitRateLow")

    assert alert.expr is not None
    assert alert.expr.startswith("prefixwatch:prefix_hit:ratio_rate5m < 0.3")
    assert alert.hold == "1h"
    assert "the line is 30 %" in alert.description


def own_thresholds(folder: Path, text: str) -> Catalogue:
    (folder / "own.yaml").write_text(text)
    return load_catalogue(folder / "own.yaml")


def test_ones_own_thresholds_replace_the_shipped_ones_and_keep_their_minimum(tmp_path: Path) -> None:
    """A row without a minimum must not leave a hole in the expression."""
    made = own_thresholds(tmp_path, "PrefixHitRateLow: {threshold: 0.42, for: 5m, why: ours}\n")

    alert = made.alert("PrefixHitRateLow")
    assert alert.expr == (
        "prefixwatch:prefix_hit:ratio_rate5m < 0.42\n"
        "and on (cluster, model) sum by (cluster, model) (\n"
        "  increase(prefixwatch_prefix_query_tokens_total[15m])\n"
        '  or -1.5 * increase(prefixwatch_probe_tokens_total{kind="prompt"}[15m])\n'
        ") >= 20000"
    )
    assert alert.hold == "5m"
    assert made.alert("EvictionChurn") == load_catalogue().alert("EvictionChurn")


COUNTED = "TargetDown:\n  threshold: 1\n  for: 5m\n  minimum: 3\n  why: x\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A: {}\n", "own.yaml:1: A.threshold: missing"),
        ("PrefixHitRatesLow: {threshold: 1, for: 5m, why: x}\n",
         "own.yaml:1: PrefixHitRatesLow: no alert with a threshold has this name: did you mean 'PrefixHitRateLow'?"),
        ("TargetDown: {threshold: low, for: 1m, why: x}\n", "own.yaml:1: TargetDown.threshold: should be"),
        ("TargetDown:\n  threshold: 1\n  for: soon\n  why: x\n", "own.yaml:3: TargetDown.for: "),
        (COUNTED, "own.yaml:4: TargetDown.minimum: TargetDown counts no events: take it out"),
        ("- 1\n", "own.yaml:1: expected a mapping of keys, found a list"),
        ("", "own.yaml:1: expected alerts and their thresholds"),
    ],
)  # fmt: skip
def test_thresholds_that_cannot_be_meant_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=re.escape(message)):
        own_thresholds(tmp_path, text)
