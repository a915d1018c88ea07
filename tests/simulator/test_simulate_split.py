"""`prefixwatch simulate` with a prefill side of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from prefixwatch.stack.cli.main import app
from prefixwatch.stack.errors import UsageError
from tests.stack.summary_figures import value


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
    assert value(policy, "block_hit_ratio") == 4 / 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--view", "snapshots"], "goes neither with --arrivals serial nor with --view snapshots"),
        (["--arrivals", "serial"], "goes neither with --arrivals serial nor with --view snapshots"),
        (["--prefill-policy", "fastest"], "--prefill-policy: unknown policy 'fastest'"),
        (["--prefill-link", "0"], "--prefill-link 0: give KV tokens a second, more than 0"),
        (["--prefill-profile", "nothing"], "--prefill-profile: "),
        (["--policy", "oracle"], "policy oracle doesn't go with --prefill-workers"),
    ],
)
def test_what_a_split_fleet_cannot_do_is_said(arguments: list[str], message: str) -> None:
    answer = simulate("smoke", "--prefill-workers", "1", *arguments)
    assert isinstance(answer.exception, UsageError)
    assert message in str(answer.exception)


def test_refusals_of_a_split_fleet_are_explained(tmp_path: Path) -> None:
    """Four prompts of 600 tokens at once, whose KV exceeds the one decode engine's."""
    rows = [{"timestamp": k, "input_length": 600, "output_length": 400, "hash_ids": [k, 9 + k]} for k in range(4)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    answer = simulate(
        *(str(trace), "--prefill-workers", "1", "--policy", "flexlb_decode", "--capacity-blocks", "4"),
    )
    notes = json.loads(answer.stdout)["notes"]
    assert any(
        note.startswith("round_robin>flexlb_decode: 1 of 4 requests were refused: 1 × no decode worker has room")
        for note in notes
    ), notes


def test_options_of_a_prefill_side_need_one() -> None:
    answer = simulate("smoke", "--prefill-from-tokens", "100")
    assert isinstance(answer.exception, UsageError)
    assert "belong to a split fleet: add --prefill-workers" in str(answer.exception)


def test_only_long_uncached_prompts_leave_the_answering_engine(tmp_path: Path) -> None:
    lengths = {"short": 512, "long": 5120}
    rows = [
        {
            "timestamp": 2000 * k,
            "input_length": length,
            "output_length": 4,
            "hash_ids": list(range(100 * k, 100 * k + length // 512)),
        }
        for k, length in enumerate([lengths["short"], lengths["long"]])
    ]
    rows.append({**rows[1], "timestamp": 6000})  # cached by now
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    simulate(
        str(trace),
        "--prefill-workers",
        "1",
        "--policy",
        "cache_aware",
        "--prefill-from-tokens",
        "2048",
        "--out",
        str(out),
    )
    reasons = pq.read_table(out / "requests.parquet")["reason"].to_pylist()
    assert reasons == ["local", "remote:prefill-0", "local"]
