"""Policies with options on the command line: simulate at one load and at several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.stack.bench.scenario_choice import chosen_policies
from prefixwatch.stack.errors import UsageError
from tests.stack.command_line import prefixwatch


def test_the_chosen_policies_by_label(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text("policies:\n  gentle: {policy: loadaware, options: {beta: 0.5}}\n")
    assert chosen_policies(f"score, loadaware{{beta=2}},{file}") == {
        "score": "score",
        "loadaware{beta=2}": "loadaware{beta=2}",
        "gentle": "gentle:loadaware{beta=0.5}",
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "--policy names no policy"),
        ("score,score", "--policy names 'score' twice"),
        ("score{beta=1}", "--policy: policy score has no option 'beta'; it has prefill_tokens_per_second"),
        ("nope", "--policy: unknown policy 'nope'"),
    ],
)
def test_what_is_wrong_is_a_usage_error(given: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        chosen_policies(given)
    assert said in str(refused.value)


def summary(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(prefixwatch("simulate", *arguments, "--json").out)
    return found


def test_simulate_reports_each_variant_by_itself() -> None:
    found = summary("smoke", "--policy", "loadaware{beta=0},loadaware{beta=5}", "--workers", "2", "--repeats", "1")
    assert list(found["policies"]) == ["loadaware{beta=0}", "loadaware{beta=5}"]


def test_rates_are_swept_for_each_variant(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text("policies:\n  gentle: {policy: loadaware, options: {beta: 0.5}}\n  plain: {policy: score}\n")
    found = summary("smoke", "--policy", str(file), "--workers", "2", "--sweep-rate", "2", "--repeats", "1")
    assert list(found["policies"]) == ["gentle", "plain"]
