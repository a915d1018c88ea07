"""Every rule under real promtools: lint, and what each alert does to series made up for it.

Prometheus 2 and 3 differ in ranges, bucket spellings and native histograms, so every promtool found here reads the
rules, and the oldest and the newest evaluate them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixwatch.alerts.build import RULES
from prefixwatch.alerts.scenario import TESTS
from tests.alerts.promtools import ends, promtools

PROMTOOLS = promtools() or {"none": "promtool"}
ENDS = ends() or {"none": "promtool"}

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


@pytest.fixture(scope="session")
def started() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Both at once: each takes minutes of one core."""
    names = sorted(path.name for path in TESTS.glob("*.yaml"))
    processes = {
        promtool: subprocess.Popen(
            [promtool, "test", "rules", *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS
        )
        for promtool in ENDS.values()
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.prometheus
@pytest.mark.timeout(1800)  # minutes of CPU, on whatever machine
@pytest.mark.parametrize("promtool", ENDS.values(), ids=ENDS)
def test_each_alert_fires_and_stays_silent_where_it_must(
    promtool: str, started: dict[str, subprocess.Popen[str]]
) -> None:
    """Fires, quiet, low traffic, absent, counter reset, replica restart of each; and the field reports."""
    output, _ = started[promtool].communicate()

    assert started[promtool].returncode == 0, output[-20_000:]
