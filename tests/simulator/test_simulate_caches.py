"""`prefixwatch simulate --cache`: architectures side by side, in the summary, on the page, and what isn't possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefixwatch.loadgen.grading.summary import read_summary
from prefixwatch.stack.cli.main import app
from prefixwatch.stack.errors import UsageError


def simulate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


SMALL = """
name: small
duration_seconds: 30
arrivals: {kind: poisson, rate_per_second: 4}
groups: {count: 8, shared_tokens: 2000, unique_tokens: 40, output_tokens: 4}
engine: {workers: 2, capacity_blocks: 400, profile: h100-llama-8b}
events: [{at: 12, kill: engine-1}, {at: 15, start: engine-1}]
cache: {latency_ms: 1, link_gbit_per_second: 400}
slo: [ttft]
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return str(file)


def test_each_policy_runs_under_each_cache_and_all_files_say_what_moved(scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = simulate(
        *(scenario, "--policy", "round_robin", "--repeats", "1", "--out", str(out)),
        *("--cache", "sticky,shared,slow:shared{link_gbit_per_second=0.1},tiers{cpu_blocks=0}"),
    )
    assert answer.exit_code == 0, answer.output
    assert "Caches: where reused tokens were" in answer.output
    assert "round_robin@shared: break-even prefix in tokens" in answer.output
    assert "break-even tokens, model / measured" in (out / "summary.md").read_text()
    summary = read_summary(out / "summary.json")
    labels = [f"round_robin@{name}" for name in ("sticky", "shared", "slow", "tiers{cpu_blocks=0}")]
    assert list(summary.policies) == labels
    assert [(own.policy, own.window) for own in summary.caches] == [
        (label, window) for label in labels for window in ("run", "before", "after")
    ]
    found = {own.policy: own for own in summary.caches if own.window == "run"}
    sticky, shared, slow, tiers = (found[label] for label in labels)
    assert shared.logical_hit_tokens > sticky.logical_hit_tokens == sticky.physical_hit_tokens
    assert shared.recomputed_tokens < sticky.recomputed_tokens
    assert shared.tiers["store"].pulled_bytes == shared.tiers["store"].hit_tokens * 131_072
    assert slow.pulls == 0
    assert slow.tiers["store"].break_even_model_tokens is None
    assert tiers.tiers["remote"].hit_tokens > 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert 'id="caches"' in page
    assert "60 s after the restart" in page
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert 'id="caches"' in (out / "report.html").read_text(encoding="utf-8")


def test_one_cache_keeps_the_policys_name_and_sticky_is_as_without(scenario: str) -> None:
    arguments = (scenario, "--policy", "score", "--repeats", "1", "--json")
    without = json.loads(simulate(*arguments).stdout)  # the scenario's own is sticky
    sticky = json.loads(simulate(*arguments, "--cache", "sticky").stdout)
    assert list(sticky["policies"]) == ["score"]
    assert sticky["policies"] == without["policies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "share"], "--cache share: choose of sticky, shared, transfer, tiers"),
        (["--cache", "shared,shared"], "--cache names 'shared' twice"),
        (["--cache", "shared{link=3}"], "'link' is not a key of it; it has link_gbit_per_second"),
        (["--cache", "shared{compression=0.5}"], "compression: Input should be greater than or equal to 1"),
        (["--cache", "shared{architecture=tiers}"], "the name is the architecture"),
        (["--cache", ","], "--cache names none"),
        (["--cache", "shared", "--arrivals", "serial"], "leave out --arrivals serial and --prefill-workers"),
        (["--cache", "sticky,shared", "--sweep-rate", "1,2"], "a sweep, a search and --tune take one"),
    ],
)
def test_what_does_not_go_together_is_said(arguments: list[str], message: str) -> None:
    answer = simulate("smoke", *arguments)
    assert isinstance(answer.exception, UsageError)
    assert message in str(answer.exception)


def test_a_bench_refuses_what_only_a_simulation_has(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL.replace("cache: {", "cache: {architecture: shared, "))
    answer = CliRunner().invoke(app, ["bench", str(file), "--out", str(tmp_path / "out")])
    assert isinstance(answer.exception, UsageError)
    assert "cache.architecture shared: engines of a bench keep KV as they are set up to" in str(answer.exception)

    answer = CliRunner().invoke(app, ["bench", "smoke", "--cache", "sticky,tiers", "--out", str(tmp_path / "out")])
    assert isinstance(answer.exception, UsageError)
    assert "--cache tiers: engines of a bench keep KV as they are set up to" in str(answer.exception)
    assert "`prefixwatch simulate --cache`" in str(answer.exception)


def test_sticky_has_the_gpus_that_the_section_says(scenario: str, tmp_path: Path) -> None:
    """Else sticky would be compared at another size than the other architectures."""

    def policies(*given: str) -> Any:
        fixed = ("--policy", "round_robin", "--repeats", "1", "--json")
        return json.loads(simulate(scenario, *fixed, *given).stdout)["policies"]

    small = policies("--cache", "sticky{gpu_blocks=200}")
    assert small == policies("--capacity-blocks", "200")
    assert small != policies()
