"""Every rule under real promtools: lint, and what each alert does to series made up for it.

Prometheus 2 and 3 differ in ranges, bucket spellings and native histograms, so every promtool found here is asked.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from alerts.build import RULES
from alerts.scenario import TESTS
from tests.alerts.promtools import promtools

PROMTOOLS = promtools() or {"none": "promtool"}

every_promtool = pytest.mark.parametrize("promtool", PROMTOOLS.values(), ids=PROMTOOLS)


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.prometheus
@every_promtool
def test_rules_pass_every_lint(promtool: str) -> None:
    files = sorted(map(str, RULES.glob("*.yaml")))

    done = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", *files)

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files) == 22


@pytest.mark.prometheus
@pytest.mark.timeout(1800)  # a minute of CPU, on whatever machine
@every_promtool
def test_each_alert_fires_and_stays_silent_where_it_must(promtool: str) -> None:
    """Fires, quiet, low traffic, absent, counter reset, replica restart of each; and the field reports."""
    done = run(promtool, "test", "rules", *sorted(path.name for path in TESTS.glob("*.yaml")), cwd=TESTS)

    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
