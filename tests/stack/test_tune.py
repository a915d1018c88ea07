"""`simulate --tune`: what may be tuned, the Pareto front, and the choice held against traffic it wasn't made on."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefixwatch.loadgen.request_log.records import RequestRecord, read_requests
from prefixwatch.stack.bench.simulate import run_simulate
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.simulation.options import SimulateOptions
from prefixwatch.stack.simulation.tune import Point, parse_tune, point, tuned
from prefixwatch.stack.simulation.tune_run import run_tune
from tests.stack.command_line import prefixwatch

SHORT = """
name: short
duration_seconds: 2
arrivals: {rate_per_second: 10}
groups: {count: 2, shared_tokens: 64, unique_tokens: 16, output_tokens: 2}
engine: {workers: 2, profile: assumed-gpu}
"""
TUNE = parse_tune("loadaware.beta=0,0.5,1")
POINTS = {
    "0": Point(hit_ratio=0.6, in_flight_max_over_mean=7.0, ttft_p95_ms=900.0, not_completed_ratio=0.0),
    "0.5": Point(hit_ratio=0.59, in_flight_max_over_mean=1.6, ttft_p95_ms=200.0, not_completed_ratio=0.0),
    "1": Point(hit_ratio=0.58, in_flight_max_over_mean=1.7, ttft_p95_ms=210.0, not_completed_ratio=0.0),
}


def test_values_are_a_list_or_a_range_of_nine() -> None:
    assert dict(TUNE.specs) == {value: f"loadaware{{beta={value}}}" for value in ("0", "0.5", "1")}
    assert list(parse_tune("loadaware.beta=0:2").specs) == ["0", "0.25", "0.5", "0.75", "1", "1.25", "1.5", "1.75", "2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loadaware", "write policy.option=values"),
        ("loadaware.beta=1", "give at least two values"),
        ("loadaware.beta=2:0", "its first number must be below"),
        ("loadaware.beta=a:b", "is not a range: write low:high"),
        ("loadawar.beta=0,1", "unknown policy 'loadawar'"),
        ("loadaware.bta=0,1", "policy loadaware has no option 'bta'; it has beta, statistics_window_seconds"),
        ("loadaware.beta=low,high", "policy loadaware: "),
    ],
)
def test_what_can_not_be_tuned_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_tune(text)


def test_policies_beside_it_run_too_and_the_tuned_one_keeps_its_other_options() -> None:
    tune = parse_tune("loadaware.beta=0,1", "round_robin,loadaware{statistics_window_seconds=5}")
    assert tune.specs == {value: f"loadaware{{statistics_window_seconds=5,beta={value}}}" for value in ("0", "1")}
    assert tune.beside == {"round_robin": "round_robin"}
    assert list(tune.policies) == [*tune.specs.values(), "round_robin"]
    assert parse_tune("loadaware.beta=0,1", "loadaware").beside == {}


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("loadaware{beta=2}", "--policy gives loadaware the option beta, which --tune varies: leave it out"),
        ("loadaware,loadaware{beta=2}", "--policy names loadaware several times, and --tune varies one of them"),
        ("best", "--policy: unknown policy 'best'"),
    ],
)
def test_what_policy_says_against_the_tuning_is_refused(policies: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_tune("loadaware.beta=0,1", policies)


def test_a_value_that_another_one_beats_in_everything_is_not_on_the_front() -> None:
    found = tuned(TUNE, POINTS, POINTS)
    assert {own["value"]: own["pareto"] for own in found["points"]} == {"0": True, "0.5": True, "1": False}
    assert (found["chosen"], found["holds"]) == ("0.5", True)


def test_a_choice_that_was_luck_does_not_hold() -> None:
    held_back = {**POINTS, "0.5": replace(POINTS["0.5"], ttft_p95_ms=400.0)}
    found = tuned(TUNE, POINTS, held_back)
    assert (found["chosen"], found["holds"]) == ("0.5", False)
    assert found["statement"] == (
        "loadaware: beta=0.5 has the lowest TTFT p95; on the held-back traffic 400 ms, where beta=1 has 210 ms: "
        "the choice does not hold"
    )


def test_within_five_percent_of_the_best_it_holds() -> None:
    held_back = {**POINTS, "0.5": replace(POINTS["0.5"], ttft_p95_ms=215.0)}
    assert tuned(TUNE, POINTS, held_back)["holds"]


def test_a_worker_that_got_nothing_counts_for_the_balance() -> None:
    record = RequestRecord(
        id="r", policy="p", repeat=0, index=0, phase="measured", tenant="", session="", turn=0, group="",
        request_class="", scheduled_s=0.0, sent_s=0.0, end_s=1.0, worker="worker-0",
    )  # fmt: skip
    assert point([record], 8).in_flight_max_over_mean == 8


def a_trace(folder: Path) -> Path:
    """Two hot documents and many cold ones; a policy blind to load gathers the hot requests."""
    rows: list[dict[str, Any]] = []
    for k in range(400):
        document = [1, 2, 3, 4] if k % 4 else [5, 6, 7, 8]
        rows.append({"timestamp": 40 * k, "input_length": 2560, "output_length": 60, "hash_ids": [*document, 100 + k]})
    file = folder / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_on_a_trace_balance_is_bought_with_hits(tmp_path: Path) -> None:
    options = SimulateOptions(source=str(a_trace(tmp_path)), workers=8, tune="loadaware.beta=0,1", out=tmp_path / "out")
    console = Console(file=io.StringIO(), width=120)
    found, code = run_tune(options, parse_tune(options.tune), console, processes=1)

    blind, aware = found["points"]
    assert blind["in_flight_max_over_mean"] > 1.2 * aware["in_flight_max_over_mean"]
    assert blind["hit_ratio"] > aware["hit_ratio"]
    assert found["held_back"] == "the second half of the recording"
    assert (found["chosen"], found["holds"], code) == ("1", True, 0)
    assert json.loads((tmp_path / "out" / "tune.json").read_text()) == found
    assert 'id="tune-balance"' in (tmp_path / "out" / "report.html").read_text()
    assert "loadaware: beta=1 has the lowest TTFT p95" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_all_cores_give_what_one_gives() -> None:
    options = SimulateOptions(source="smoke", workers=2, repeats=1, tune="loadaware.beta=0,2")
    tune, console = parse_tune(options.tune), Console(quiet=True)
    found, _ = run_tune(options, tune, console, processes=2)
    assert found == run_tune(options, tune, console, processes=1)[0]
    assert found["held_back"] == "seed 2"


def test_a_simulation_shows_the_policies_beside_the_values(tmp_path: Path) -> None:
    """They were left out without a word."""
    beside = SimulateOptions(source="smoke", workers=2, repeats=1, tune="loadaware.beta=0,2", policy="round_robin")
    console = Console(file=io.StringIO(), width=120)
    found, _ = run_simulate(replace(beside, out=tmp_path), console)
    alone, _ = run_simulate(replace(beside, policy=None), Console(quiet=True))
    [other] = found.pop("beside")
    assert other["policy"] == "round_robin"
    assert None not in (other["ttft_p95_ms"], other["held_back"]["ttft_p95_ms"])
    assert found == {name: value for name, value in alone.items() if name != "beside"}
    assert "round_robin" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "round_robin" in (tmp_path / "report.html").read_text()


def test_tuning_goes_with_one_load() -> None:
    options = SimulateOptions(source="smoke", tune="loadaware.beta=0,1", sweep_rate="5")
    with pytest.raises(UsageError, match="--tune goes neither with a sweep or search"):
        run_simulate(options, Console(quiet=True))


def test_a_bench_tunes_on_engines_and_holds_a_repeat_back(tmp_path: Path) -> None:
    scenario = tmp_path / "short.yaml"
    scenario.write_text(SHORT)
    out = tmp_path / "out"
    result = prefixwatch(
        *("bench", str(scenario), "--tune", "loadaware.beta=0,1", "--policy", "round_robin"),
        *("--repeats", "1", "--out", str(out), "--json"),
    )
    assert result.code in (0, 3), result.err
    found = json.loads(result.out)
    assert found == json.loads((out / "tune.json").read_text())
    assert [own["value"] for own in found["points"]] == ["0", "1"]
    [beside] = found["beside"]
    assert (beside["policy"], beside["held_back"]["ttft_p95_ms"] is None) == ("round_robin", False)
    assert list(json.loads((out / "summary.json").read_text())["policies"])[-1] == "round_robin"
    assert found["held_back"] == "repeat 2"
    log = read_requests(out / "requests.parquet")
    for own in found["points"]:
        for repeat, figures in ((0, own), (1, own["held_back"])):
            mine = [r for r in log if r.policy == f"loadaware{{beta={own['value']}}}" and r.repeat == repeat]
            cached, prompt = (sum(getattr(r, name) or 0 for r in mine) for name in ("cached_tokens", "prompt_tokens"))
            assert figures["hit_ratio"] == pytest.approx(cached / prompt)
    assert "loadaware.beta" in (out / "tune.html").read_text()


def test_a_target_has_a_router_of_its_own_that_is_not_tuned(tmp_path: Path) -> None:
    target = ("--target", "http://127.0.0.1:9", "--tune", "loadaware.beta=0,1", "--out", str(tmp_path))
    result = prefixwatch("bench", "smoke", *target)
    assert (result.code, "--tune goes neither with --target" in result.err) == (2, True)


def test_a_ray_cluster_gives_what_this_machine_gives(tmp_path: Path) -> None:
    """Each value and seed is a task of its own; the results come back in order."""
    pytest.importorskip("ray", reason="Ray isn't installed: pip install 'prefixwatch[ray]'")
    scenario = tmp_path / "short.yaml"
    scenario.write_text(SHORT)
    options = SimulateOptions(source=str(scenario), repeats=1)
    here, _ = run_tune(options, TUNE, Console(file=io.StringIO()), processes=1)
    there, _ = run_tune(replace(options, ray="local"), TUNE, Console(file=io.StringIO()))
    assert there == here


def test_ray_is_for_tuning() -> None:
    with pytest.raises(UsageError, match="--ray spreads the runs of --tune over a cluster: give --tune"):
        run_simulate(SimulateOptions(source="smoke", ray="auto"), Console(file=io.StringIO()))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_the_extra_it_is_named() -> None:
    done = prefixwatch("simulate", "smoke", "--tune", "loadaware.beta=0,1", "--ray", "auto")
    assert done.code == 2
    assert "this command needs ray, which isn't installed: run pip install 'prefixwatch[ray]'" in done.err
