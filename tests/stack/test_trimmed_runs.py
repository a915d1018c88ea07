"""Warm-up and cool-down of whole runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from prefixwatch.stack.bench.scenario_choice import chosen_scenario
from prefixwatch.stack.bench.simulate import run_simulate
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.simulation.options import SimulateOptions

SCENARIO = """\
name: trimmed
duration_seconds: 30
warm_up_seconds: 10
cool_down_seconds: 5
arrivals: {kind: constant, rate_per_second: 4}
groups: {count: 2, shared_tokens: 64, unique_tokens: 16, output_tokens: 4}
"""


def test_a_scenarios_warm_up_is_simulated_and_not_graded(tmp_path: Path) -> None:
    (tmp_path / "trimmed.yaml").write_text(SCENARIO)
    options = SimulateOptions(
        source=str(tmp_path / "trimmed.yaml"), workers=2, policy="round_robin", arrivals="trace", repeats=1
    )

    summary, _ = run_simulate(options, Console(file=io.StringIO()))

    requests = summary["policies"]["round_robin"]["requests"]
    assert (requests["warm_up"], requests["scheduled"], requests["cool_down"]) == (40, 60, 20)


def test_a_duration_that_leaves_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trimmed.yaml").write_text(SCENARIO)
    with pytest.raises(UsageError, match="--duration 15: the scenario's warm-up and cool-down take 15 s of it"):
        chosen_scenario(str(tmp_path / "trimmed.yaml"), duration_seconds=15.0)
