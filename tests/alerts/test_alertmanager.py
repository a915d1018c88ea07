"""The Alertmanager configuration under amtool and amlint, and what inhibits what."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from prefixwatch.alerts.catalogue.model import FOLDER, load_catalogue

CONFIGURATION = FOLDER.parent / "alertmanager.yaml"
CONTENT = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.alertmanager
def test_amtool_takes_it() -> None:
    done = run("amtool", "check-config", str(CONFIGURATION))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.alertmanager
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (["alertname=SloBudgetBurnFast", "severity=page", "slo=ttft"], "pages"),
        (["alertname=EvictionChurn", "severity=ticket", "target=w1"], "tickets"),
        (["alertname=SomebodyElses"], "tickets"),
    ],
)
def test_pages_and_tickets_go_where_they_should(labels: list[str], receiver: str) -> None:
    command = ["amtool", "config", "routes", "test", f"--config.file={CONFIGURATION}"]

    assert run(*command, f"--verify.receivers={receiver}", *labels).returncode == 0
    assert run(*command, "--verify.receivers=nobody", *labels).returncode != 0


def test_amlint_finds_nothing() -> None:
    done = run(str(Path(sys.executable).with_name("amlint")), "check", str(CONFIGURATION))

    assert done.returncode == 0, done.stdout
    # A fleet-wide cause silences the same alert of single workers; `scope` tells them apart (test_inhibition).
    assert set(re.findall(r"\[([a-z-]+)\]", done.stdout)) <= {"inhibit-same-match"}


def test_every_cause_with_symptoms_has_its_rule() -> None:
    sources = {rule["source_matchers"][0] for rule in CONTENT["inhibit_rules"]}

    expected = {f'alertname="{alert.name}"' for alert in load_catalogue().alerts if alert.inhibits}
    assert expected <= sources


def test_one_fleet_never_silences_another() -> None:
    assert all("fleet" in rule["equal"] for rule in CONTENT["inhibit_rules"])


def test_no_secret_stands_in_it() -> None:
    for receiver in CONTENT["receivers"]:
        for webhook in receiver["webhook_configs"]:
            assert set(webhook["http_config"]["authorization"]) == {"credentials_file"}
