"""Faults in a live stack: engines, router, exporter, Prometheus, Alertmanager. The right alert comes, no wrong one
does, and the diagnosis names the cause. `python -m benchmarks.fault_matrix` prints the same as a matrix."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from prefixwatch.stack.drill.command import as_markdown, run_in_lanes
from prefixwatch.stack.drill.drill import DrillResult
from prefixwatch.stack.drill.faults import FAULTS

LANES = 2

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.timeout(900),
    pytest.mark.alertmanager,
]


@pytest.fixture(scope="module")
def matrix() -> dict[str, DrillResult]:
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:  # pytest's own is too long for sockets
        results = asyncio.run(run_in_lanes(list(FAULTS), Path(folder), LANES))
    print(as_markdown(results))
    return {result.name: result for result in results}


@pytest.mark.parametrize("name", FAULTS)
def test_the_right_alert_comes(matrix: dict[str, DrillResult], name: str) -> None:
    assert matrix[name].missed_alerts == []


@pytest.mark.parametrize("name", FAULTS)
def test_no_wrong_alert_comes(matrix: dict[str, DrillResult], name: str) -> None:
    assert matrix[name].wrong_alerts == []


@pytest.mark.parametrize("name", FAULTS)
def test_the_diagnosis_names_the_cause(matrix: dict[str, DrillResult], name: str) -> None:
    assert (matrix[name].named, matrix[name].unsure) == (FAULTS[name].cause, False)
