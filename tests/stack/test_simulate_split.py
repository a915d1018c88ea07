"""`prefixwatch simulate` with a prefill side of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stack.cli import app
from stack.errors import UsageError


def simulate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments, "--json"])


def test_a_scenario_on_a_split_fleet_compares_decode_policies() -> None:
    answer = simulate(
        *("smoke", "--repeats", "1", "--prefill-workers", "2", "--workers", "2"),
        *("--prefill-policy", "least_load", "--policy", "round_robin,flexlb_decode"),
    )
    policies = json.loads(answer.stdout)["policies"]
    assert list(policies) == ["least_load>round_robin", "least_load>flexlb_decode"]


def test_a_trace_on_a_split_fleet(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * k, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]} for k in range(3)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    answer = simulate(str(trace), "--prefill-workers", "1", "--policy", "round_robin")
    (policy,) = json.loads(answer.stdout)["policies"].values()
    assert policy["prefix"]["block_hit_ratio"] == 4 / 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--view", "snapshots"], "goes neither with --arrivals serial nor with --view snapshots"),
        (["--arrivals", "serial"], "goes neither with --arrivals serial nor with --view snapshots"),
        (["--prefill-policy", "fastest"], "--prefill-policy: unknown policy 'fastest'"),
        (["--policy", "oracle"], "policy oracle doesn't go with --prefill-workers"),
    ],
)
def test_what_a_split_fleet_cannot_do_is_said(arguments: list[str], message: str) -> None:
    answer = simulate("smoke", "--prefill-workers", "1", *arguments)
    assert isinstance(answer.exception, UsageError)
    assert message in str(answer.exception)
