"""`prefixwatch plan`: the answer is checked by simulating step by step, at it and one engine below."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefixwatch.documents.errors import InputError
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.loadgen.grading.grade import grade
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.traffic.trace import read_trace
from prefixwatch.slo.build import load_objectives
from prefixwatch.stack.bench.recording_options import RecordingOptions
from prefixwatch.stack.planning.page import pareto_front, plan_charts
from prefixwatch.stack.planning.plan import app
from prefixwatch.stack.planning.traffic import planned_traffic


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve seconds of 400 requests of 2,048 tokens, of which 30 groups share the first 1,024."""
    rng, rows, now_ms = random.Random(1), [], 0.0
    for number in range(400):
        now_ms += rng.expovariate(400 / 12_000)
        group = rng.randrange(30)
        ids = [2 * group, 2 * group + 1, 1000 + 2 * number, 1001 + 2 * number]
        rows.append({"timestamp": int(now_ms), "input_length": 2048, "output_length": 64, "hash_ids": ids})
    file = tmp_path_factory.mktemp("plan") / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return file


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_answer_holds_step_by_step_and_one_engine_fewer_does_not(trace: Path) -> None:
    found = run(str(trace), "--profile", "a100-llama-8b", "--policy", "dynamo_kv", "--gpu-usd-per-hour", "2")
    (plan,) = found["plans"]
    assert plan["workers"] >= 2
    objectives = load_objectives(["ttft", "tpot"])
    engine = EngineConfig(
        profile("a100-llama-8b").step_time,
        block_size=512,
        capacity_blocks=plan["capacity_blocks"],
        max_num_batched_tokens=8192,
    )
    holds = {}
    for workers in (plan["workers"], plan["workers"] - 1):
        simulation = FleetSimulation([make_policy("dynamo_kv", seed=0)], engine, workers, jumps=False)
        graded = grade(simulation.run(read_trace(trace).requests).records, objectives, workers=workers, block_size=512)
        holds[workers] = all(objective.ok for objective in graded["dynamo_kv"].objectives)
    assert holds == {plan["workers"]: True, plan["workers"] - 1: False}
    hours = plan["workers"] * found["traffic_hours"]
    assert plan["gpu_hours"] == pytest.approx(hours)
    assert plan["usd_per_1000_requests"] == pytest.approx(hours * 2 / 400 * 1000)
    assert plan["ideal_gpu_hours"] <= plan["gpu_hours"]


def test_the_page_shows_the_front_and_the_answer(trace: Path, tmp_path: Path) -> None:
    found = run(
        str(trace), "--profile", "a100-llama-8b", "--policy", "round_robin,dynamo_kv", "--out", str(tmp_path / "plan")
    )
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == found
    page = (tmp_path / "plan" / "report.html").read_text()
    blind, aware = found["plans"]
    assert f"dynamo_kv, cache 1 ×: {aware['workers']} engines meet ttft, tpot." in page
    assert "The figures are in plan.json" in page
    cheapest = min((plan for plan in found["plans"]), key=lambda plan: plan["workers"])
    front, hours = plan_charts(found)
    assert cheapest["workers"] in [int(row[1]) for row in front.rows]
    assert hours.rows[1][:2] == ["dynamo_kv, cache 1 ×", str(aware["workers"])]
    for plan in (blind, aware):
        for fleet in plan["fleets"]:
            assert fleet["holds"] == (fleet["margin"] >= 0)
            assert fleet["gpu_hours"] == pytest.approx(fleet["workers"] * found["traffic_hours"])


def test_the_front_is_what_no_cheaper_fleet_beats() -> None:
    fleets = [
        {"gpu_hours": hours, "margin": margin} for hours, margin in [(3, 0.2), (1, -0.1), (2, 0.1), (2, 0.05), (4, 0.2)]
    ]
    assert [fleet["gpu_hours"] for fleet in pareto_front(fleets)] == [1, 2, 3]


def test_a_smaller_cache_never_needs_fewer_engines(trace: Path) -> None:
    found = run(str(trace), "--profile", "a100-llama-8b", "--policy", "dynamo_kv", "--cache-sizes", "0.01,1")
    small, whole = found["plans"]
    assert small["workers"] >= whole["workers"]
    assert small["hit_ratio"] < whole["hit_ratio"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "h900"], "--profile: no step time profile 'h900'"),
        (["--slo", ""], "--slo: name at least one objective"),
        (["--cache-sizes", "1,x"], "--cache-sizes 1,x: expected numbers"),
        (["--cache-sizes", "0"], "expected numbers above 0"),
        (["--policy", "nope"], "nope"),
        (["--speed", "0"], "--speed must be a number above 0"),
        (["--speed", "1e-300"], "from 0.001 to 1,000,000, got 1e-300"),
        (["--capacity-blocks", "1"], "are 0 of the traffic's blocks of 512 tokens, and its smallest request needs 5"),
        (["--cache-sizes", "0.001"], "times 0.001 are 0 of the traffic's blocks"),
        (["--profile", "l40s-llama-8b", "--speed", "0.001", "--slo", "ttft"], "choose faster hardware"),
    ],
)
def test_what_cannot_be_planned_is_one_message(trace: Path, arguments: list[str], message: str) -> None:
    slow = trace.with_name("slow.jsonl")
    rows = [
        {"timestamp": k * 1000, "input_length": 16384, "output_length": 8, "hash_ids": list(range(k * 32, k * 32 + 32))}
        for k in range(20)
    ]
    slow.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    source = slow if "l40s-llama-8b" in arguments else trace
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, [str(source), *arguments], catch_exceptions=False)


def test_a_plan_of_a_scenario_has_its_blocks(tmp_path: Path) -> None:
    file = tmp_path / "blocks.yaml"
    file.write_text(
        "name: blocks\nduration_seconds: 5\narrivals: {rate_per_second: 4}\n"
        "groups: {count: 1, shared_tokens: 640, unique_tokens: 64, output_tokens: 4}\n"
        "engine: {workers: 1, block_size: 64}\n"
    )
    found = planned_traffic(str(file), RecordingOptions(), 1.0, None)
    assert found.block_size == 64
    assert {len(each.blocks) for each in found.requests} == {found.requests[0].prompt_tokens // 64}


def test_a_closed_loop_has_no_times_to_plan_by(tmp_path: Path) -> None:
    file = tmp_path / "closed.yaml"
    file.write_text(
        "name: closed\nduration_seconds: 5\narrivals: {kind: closed, concurrency: 2, requests: 10}\n"
        "groups: {count: 1, shared_tokens: 64, unique_tokens: 16, output_tokens: 4}\n"
    )
    with pytest.raises(InputError, match=r"has 10 requests that all arrive at once.*: give it arrivals with a rate"):
        planned_traffic(str(file), RecordingOptions(), 1.0, None)
