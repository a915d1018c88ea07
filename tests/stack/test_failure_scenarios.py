"""Each failure that the field warns of has a shipped scenario: the fault fails as it should, the cure passes.

In virtual time, so the verdicts are exact; `prefixwatch simulate NAME --policy … --view …` shows the same figures.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from prefixwatch.loadgen.scenario.model import SHIPPED_FOLDER
from prefixwatch.stack.bench.simulate import run_simulate
from prefixwatch.stack.simulation.options import SimulateOptions
from tests.stack.summary_figures import value

PASS, FAIL = 0, 1


@cache
def graded(
    scenario: str | Path, policy: str = "score", view: str = "events", repeats: int = 2
) -> tuple[dict[str, Any], int]:
    """The policy's grade, and the exit code."""
    options = SimulateOptions(source=str(scenario), policy=policy, view=view, repeats=repeats)
    summary, exit_code = run_simulate(options, Console(file=io.StringIO()))
    assert summary["validity"]["reasons"] == []
    return summary["policies"][policy], exit_code


def cured(name: str, folder: Path, **changes: Any) -> Path:
    """A shipped scenario with some keys changed; None takes one out."""
    content = {**yaml.safe_load((SHIPPED_FOLDER / f"{name}.yaml").read_text()), **changes}
    content["slo"] = [str(SHIPPED_FOLDER / slo) if slo.endswith(".yaml") else slo for slo in content["slo"]]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return file


def measured(grade: dict[str, Any], objective: str) -> float:
    return next(float(own["measured"]) for own in grade["objectives"] if own["name"] == objective)


@pytest.mark.parametrize("policy", ["prefixaware", "kvaware"])
def test_cache_only_routing_fails_under_a_hot_prefix(policy: str) -> None:
    """vllm-project/production-stack#1035, #884 (RT01)."""
    grade, exit_code = graded("hot-prefix", policy, view="history", repeats=1)
    assert exit_code == FAIL
    assert measured(grade, "goodput") < 0.3
    assert value(grade, "hotspot_max_over_mean") > 1.5


@pytest.mark.parametrize("policy", ["score", "loadaware"])
def test_load_aware_routing_passes_under_a_hot_prefix(policy: str) -> None:
    """The hits cost at most a point."""
    grade, exit_code = graded("hot-prefix", policy, view="history", repeats=1)
    assert exit_code == PASS
    assert value(grade, "hotspot_max_over_mean") < 1.5
    only, _ = graded("hot-prefix", "kvaware", view="history", repeats=1)
    assert value(grade, "hit_ratio") > value(only, "hit_ratio") - 0.015


def test_a_dynamic_field_at_the_front_fails_hit_tokens_and_nothing_else(tmp_path: Path) -> None:
    grade, exit_code = graded("dynamic-first")
    assert exit_code == FAIL
    assert value(grade, "hit_tokens") == 0
    assert measured(grade, "ttft") == 1.0
    moved, exit_code = graded(cured("dynamic-first", tmp_path, dynamic_front=None))
    assert exit_code == PASS
    assert value(moved, "hit_ratio") > 0.85


def test_without_salts_tenants_that_must_share_nothing_fail_isolation(tmp_path: Path) -> None:
    grade, exit_code = graded("no-salt")
    assert exit_code == FAIL
    assert grade["isolation_violations"] > 0
    tenants = [{"name": "acme", "salt": "a-1"}, {"name": "globex", "salt": "g-2"}]
    salted, exit_code = graded(cured("no-salt", tmp_path, tenants=tenants))
    assert exit_code == PASS
    assert salted["isolation_violations"] == 0


def test_an_index_fresher_than_the_caches_sends_requests_after_what_is_gone() -> None:
    """Predicted beyond delivered: the other routers' traffic has evicted it."""
    grade, exit_code = graded("fresh-index", view="history")
    assert exit_code == FAIL
    prediction = grade["prediction"]
    assert prediction["predicted_tokens"] > 1.3 * prediction["delivered_tokens"]
    assert next(iter(prediction["by_cause"])) == "evicted_since"
    told, exit_code = graded("fresh-index", view="events")
    assert exit_code == PASS
    assert told["prediction"]["within_block_ratio"] > 0.97


def test_an_index_staler_than_the_caches_does_not_see_what_is_there() -> None:
    """Delivered beyond predicted: the poll has not come round yet."""
    grade, exit_code = graded("stale-index", view="snapshots")
    assert exit_code == FAIL
    prediction = grade["prediction"]
    assert prediction["predicted_tokens"] < 0.9 * prediction["delivered_tokens"]
    assert next(iter(prediction["by_cause"])) == "under_credited"
    told, exit_code = graded("stale-index", view="events")
    assert exit_code == PASS
    assert told["prediction"]["within_block_ratio"] > 0.97


def test_tool_schemas_in_another_order_fail_hit_tokens(tmp_path: Path) -> None:
    grade, exit_code = graded("tool-order")
    assert exit_code == FAIL
    assert measured(grade, "ttft") > 0.99
    steady, exit_code = graded(cured("tool-order", tmp_path, tools={"count": 12, "tokens": 120}))
    assert exit_code == PASS
    assert value(steady, "hit_ratio") > value(grade, "hit_ratio") + 0.2


def test_a_drifting_template_fails_hit_tokens_although_latency_holds(tmp_path: Path) -> None:
    grade, exit_code = graded("template-drift")
    assert exit_code == FAIL
    assert measured(grade, "ttft") > 0.99
    steady, exit_code = graded(cured("template-drift", tmp_path, rollout=None))
    assert exit_code == PASS
    assert value(grade, "hit_ratio") < value(steady, "hit_ratio") - 0.1
