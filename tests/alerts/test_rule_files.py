"""The committed rule files are what the model makes of the documents, and the registry is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from alerts.alertmanager import configuration
from alerts.build import RULES, build, rendered
from alerts.catalogue import FOLDER, THRESHOLDS, load_catalogue, read_thresholds
from alerts.scenario import TESTS, load_scenarios
from alerts.scenario import rendered as rendered_tests
from documents import DocumentError

FILES = build()
CATALOGUE = load_catalogue()


def committed() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in RULES.glob("*.yaml")}


def test_committed_rules_are_those_that_a_build_writes() -> None:
    assert committed() == rendered(FILES)


def test_committed_promtool_tests_are_made_of_the_scenarios() -> None:
    made = rendered_tests(FILES)

    assert {name: (TESTS / name).read_text(encoding="utf-8") for name in made} == made


def test_the_committed_alertmanager_configuration_is_that_of_the_catalogue() -> None:
    assert (FOLDER.parent / "alertmanager.yaml").read_text(encoding="utf-8") == configuration(CATALOGUE)


def test_every_alert_has_a_scenario_and_every_scenario_an_alert() -> None:
    assert set(load_scenarios()) == {alert.name for alert in CATALOGUE.alerts}


def test_every_scenario_makes_six_tests() -> None:
    titles = {"fires", "quiet", "low traffic", "absent", "counter reset", "replica restart"}
    for name, text in rendered_tests(FILES).items():
        assert {case["name"].partition(": ")[2] for case in yaml.safe_load(text)["tests"]} == titles, name


def test_every_threshold_has_an_alert_that_uses_it() -> None:
    alerts = {alert.name for alert in CATALOGUE.alerts if alert.expr is not None}

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
    assert alert.expr.startswith("prefix_hit_rate_total < 0.3")
    assert alert.hold == "1h"
    assert "the line is 30 %" in alert.description


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PrefixHitRate: {threshold: 1, for: 1m, why: x}", "PrefixHitRate: no alert with a threshold has this name"),
        ("PrefixHitRateLow: {threshold: low, for: 1m, why: x}", "PrefixHitRateLow.threshold: Input should be a valid"),
        ("PrefixHitRateLow: {threshold: 1, for: soon, why: x}", "PrefixHitRateLow.for: String should match"),
        ("- 1", "expected alerts and their thresholds"),
    ],
)
def test_wrong_thresholds_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)

    with pytest.raises(DocumentError, match=message):
        load_catalogue(own)
