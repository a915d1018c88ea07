"""What makes a drill pass, and how drills are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from prefixwatch.alerts.catalogue.model import load_catalogue
from prefixwatch.runbooks.diagnosis import Diagnosis, RankedCause
from prefixwatch.runbooks.page import shipped_runbooks
from prefixwatch.stack.cli.main import app
from prefixwatch.stack.drill.command import as_document, as_markdown
from prefixwatch.stack.drill.drill import DrillResult, drill_runbooks
from prefixwatch.stack.drill.faults import FAULTS
from prefixwatch.stack.drill.stack import Notice

BURN = "SloBudgetBurnFast"


def _result(name: str, alerts: dict[str, float], named: str | None) -> DrillResult:
    causes = (RankedCause(named, shipped_runbooks().causes[named], 5, None, (), (), ()),) if named else ()
    diagnosis = Diagnosis("cause found" if named else "nothing wrong", (), causes)
    notices = [Notice(alert, {"alertname": alert}, 100.0 + seconds) for alert, seconds in alerts.items()]
    return DrillResult(name, FAULTS[name], notices, 100.0, sorted(alerts), diagnosis, diagnosis, {"200": 10})


def test_the_right_alert_a_known_symptom_and_the_right_cause_pass() -> None:
    result = _result("engine-gone", {"TargetDown": 4.2, "ScrapeFaults": 8.0}, "target_unreachable")
    assert (result.passed, result.wrong_alerts, result.missed_alerts) == (True, [], [])


@pytest.mark.parametrize(
    ("alerts", "named"),
    [
        ({"TargetDown": 4.0, "RouterBlind": 9.0}, "target_unreachable"),
        ({}, "target_unreachable"),
        ({"TargetDown": 4.0}, "engine_restarted"),
        ({"TargetDown": 4.0}, None),
    ],
    ids=["a wrong alert", "no alert", "another cause", "no cause"],
)
def test_anything_else_does_not(alerts: dict[str, float], named: str | None) -> None:
    assert not _result("engine-gone", alerts, named).passed


def test_where_nothing_is_wrong_silence_passes() -> None:
    quiet = _result("none", {}, None)
    assert quiet.passed
    sign = RankedCause("hot_prefix", shipped_runbooks().causes["hot_prefix"], 3, None, (), (), ())
    unsure = replace(quiet, diagnosis=replace(quiet.diagnosis, verdict="inconclusive", possible=(sign,)))
    assert (unsure.passed, as_document(unsure)["verdict"]) == (False, "inconclusive")
    assert "inconclusive (sign of hot_prefix)" in as_markdown([unsure])
    unchecked = replace(unsure, diagnosis=replace(unsure.diagnosis, possible=(), unchecked=(sign,)))
    assert unchecked.passed
    assert "inconclusive (not checked: hot_prefix)" in as_markdown([unchecked])
    assert not _result("none", {"WorkerHotspot": 3.0}, None).passed


@pytest.mark.parametrize(("slo", "wrong"), [("ttft", []), ("router-decision", []), ("availability", [BURN])])
def test_a_slow_machine_is_no_finding(slo: str, wrong: list[str]) -> None:
    """Objectives on times are kept or not by the machine that the drill runs on; refusals are of the fault."""
    quiet = _result("none", {}, None)
    burning = replace(quiet, notices=[Notice(BURN, {"alertname": BURN, "slo": slo}, 105.0)])

    assert burning.wrong_alerts == wrong


def test_the_drills_diagnosis_does_not_ask_how_fast_its_machine_is() -> None:
    asked = drill_runbooks().steps

    assert not {"decision-p95", "walk-p99", "tokenize-p95"} & set(asked)
    assert len(asked) == len(shipped_runbooks().steps) - 3
    assert set(shipped_runbooks().causes) - set(drill_runbooks().causes) == {"slow_decisions"}


def test_an_alert_counts_from_its_first_notice() -> None:
    result = _result("engine-gone", {"TargetDown": 4.2}, None)
    later = Notice("TargetDown", {}, 130.0)
    assert as_document(result)["notified"] == {"TargetDown": 4.2}
    assert DrillResult(
        "engine-gone", result.fault, [*result.notices, later], 100.0, [], result.diagnosis, result.diagnosis, {}
    ).notified == {"TargetDown": 4.2}


def test_the_matrix_has_the_named_cause_in_the_column_of_its_fault() -> None:
    results = [
        _result("none", {}, None),
        _result("slow-worker", {"WorkerSlow": 3.0}, "hot_prefix"),
        _result("hot-prefix", {"WorkerHotspot": 12.0}, "hot_prefix"),
    ]
    lines = as_markdown(results).splitlines()
    assert "Named first: 1 nothing, 2 slow_worker, 3 hot_prefix." in lines
    assert lines[-3:] == ["| none | 1 |  |  |", "| slow-worker |  |  | 1 |", "| hot-prefix |  |  | 1 |"]


def test_faults_speak_of_alerts_and_causes_that_exist() -> None:
    alerts = {alert.name for alert in load_catalogue().alerts}
    for fault in FAULTS.values():
        assert fault.alerts | fault.symptoms <= alerts
        assert fault.cause is None or fault.cause in shipped_runbooks().causes


def test_at_least_twelve_faults_are_practised() -> None:
    assert len([fault for fault in FAULTS.values() if fault.cause]) >= 12


def test_an_unknown_fault_is_refused_with_those_there_are() -> None:
    result = CliRunner().invoke(app, ["drill", "gremlins"])
    assert "no fault 'gremlins': use one of none, hot-prefix" in str(result.exception)
