"""`--calibrate`: what a policy takes as a constant is measured on the engines that it will route to."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.engines import fleet
from prefixwatch.engines.model.profiles import profile
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, read_requests
from prefixwatch.router.policies import make_policy
from prefixwatch.stack.bench.options import BenchOptions, specs_of
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.simulation.constants import MOST_ROWS, calibrated, fit_constants
from tests.stack.command_line import prefixwatch

SCENARIO = """
name: short
duration_seconds: 3
arrivals: {rate_per_second: 20}
groups: {count: 4, shared_tokens: {min: 200, max: 1200}, unique_tokens: {min: 16, max: 300}, output_tokens: 2}
engine: {workers: 2, profile: assumed-gpu}
slo: [availability]
"""


def served(prompt: int, cached: int, ms: float, **more: Any) -> RequestRecord:
    return RequestRecord(
        id=f"{prompt}-{cached}", policy="calibration", repeat=0, index=0, phase="measured", tenant="-", session="",
        turn=0, group="", request_class="", scheduled_s=0.0, sent_s=1.0, first_token_s=1.0 + ms / 1e3,
        planned_prompt_tokens=prompt, prompt_tokens=prompt, cached_tokens=cached,
        **{"outcome": Outcome.COMPLETED, **more},
    )  # fmt: skip


RECORDS = [served(n, n // 4, 10 + 0.1 * (n - n // 4)) for n in range(200, 4200, 100)]


def test_the_rate_is_that_of_the_tokens_without_what_every_prompt_costs() -> None:
    found = fit_constants([*RECORDS, served(9000, 0, 1.0, outcome=Outcome.FAILED)])
    assert found.base_ms == pytest.approx(10)
    assert found.prefill_tokens_per_second == pytest.approx(10_000)
    assert (found.requests, len(found.rows)) == (40, MOST_ROWS)
    assert found.error < 1e-9


def test_too_few_requests_and_no_difference_are_refused() -> None:
    with pytest.raises(UsageError, match="7 requests of the first 60 s completed with their cached tokens, and 8 are"):
        fit_constants(RECORDS[:7])
    with pytest.raises(UsageError, match="all compute the same number of tokens"):
        fit_constants([served(100, 0, 20.0)] * 9)


def test_requests_whose_cached_tokens_are_unknown_say_nothing() -> None:
    """Taken for none cached they would make prefill look faster than it is."""
    unknown = [replace(record, cached_tokens=None) for record in RECORDS]
    assert fit_constants([*RECORDS, *unknown]) == fit_constants(RECORDS)
    with pytest.raises(UsageError, match="0 requests of the first 60 s completed with their cached tokens"):
        fit_constants(unknown)


def test_policies_get_what_they_have_an_option_for_and_were_not_given() -> None:
    constants = fit_constants(RECORDS)
    given = {name: name for name in ("round_robin", "score", "flexlb_formula")}
    given["score{prefill_tokens_per_second=5,queue_patience=2}"] = "score{prefill_tokens_per_second=5,queue_patience=2}"
    found = calibrated(given, constants)
    assert list(found) == list(given)
    assert found["round_robin"] == "round_robin"
    assert found["score{prefill_tokens_per_second=5,queue_patience=2}"] == list(given)[-1]
    score, flexlb = (make_policy(found[name]) for name in ("score", "flexlb_formula"))
    assert (score.label, score.options.prefill_tokens_per_second) == ("score", 10_000)
    assert (flexlb.label, len(flexlb.options.calibration)) == ("flexlb_formula", MOST_ROWS)
    patient = calibrated({"score{queue_patience=2}": "score{queue_patience=2}"}, constants)
    made = make_policy(patient["score{queue_patience=2}"])
    assert (made.label, made.options.queue_patience) == ("score-queue_patience-2", 2)


def test_a_simulation_measures_the_profiles_rate(tmp_path: Path) -> None:
    scenario, out = tmp_path / "short.yaml", tmp_path / "out"
    scenario.write_text(SCENARIO)
    options = ("--policy", "round_robin,score", "--repeats", "1", "--calibrate", "--out", str(out), "--json")
    result = prefixwatch("simulate", str(scenario), *options)
    assert result.code in (0, 3), result.err
    assert json.loads(result.out)["notes"][0].startswith("policies were calibrated by ")
    _, text = yaml.safe_load((out / "config.yaml").read_text())["options"]["policy"].split(",", 1)
    step = profile("assumed-gpu").step_time
    assert isinstance(step, StepTime)
    rate = make_policy(text).options.prefill_tokens_per_second
    assert rate == pytest.approx(1 / step.per_prefill_token_s, rel=0.03)


def test_a_bench_gives_its_router_the_measured_rate(tmp_path: Path) -> None:
    scenario, out = tmp_path / "short.yaml", tmp_path / "out"
    scenario.write_text(SCENARIO)
    result = prefixwatch(
        "bench", str(scenario), "--policy", "score", "--repeats", "1", "--calibrate", "--out", str(out), "--json"
    )
    assert result.code in (0, 3), result.err
    found = yaml.safe_load((out / "config.yaml").read_text())["calibrated"]
    [router] = [json.loads(file.read_text()) for file in out.glob("logs/01-score-0/router.json")]
    assert router["policy"]["name"] == found["policies"]["score"]
    assert make_policy(router["policy"]["name"]).options.prefill_tokens_per_second == pytest.approx(
        found["prefill_tokens_per_second"]
    )
    summary = json.loads(result.out)
    assert list(summary["policies"]) == ["score"]
    assert summary["notes"][0].startswith("policies were calibrated by ")


def test_a_target_is_measured_for_the_policy_of_its_router(tmp_path: Path) -> None:
    """The constants of its own answers are in config.yaml, as the router takes them; what is graded is the target."""
    scenario, out = tmp_path / "short.yaml", tmp_path / "out"
    scenario.write_text(SCENARIO)
    [engine] = asyncio.run(fleet.start_simulated(1, default_model_dir(), tmp_path, profile="assumed-gpu"))
    try:
        arguments = ("--target", engine.url, "--model-dir", str(default_model_dir()), "--calibrate", "--repeats", "1")
        result = prefixwatch("bench", str(scenario), *arguments, "--out", str(out), "--json")
    finally:
        engine.process.stop()
    assert result.code in (0, 3), result.err
    summary, config = json.loads(result.out), yaml.safe_load((out / "config.yaml").read_text())
    assert list(summary["policies"]) == ["target"]
    assert summary["notes"][0].startswith("constants for the target's router were fitted to ")
    assert summary["notes"] == config["notes"]
    [log] = out.glob("logs/*calibration*/requests.parquet")
    fitted = fit_constants(read_requests(log))
    assert {k: v for k, v in config["calibrated"].items() if k != "policies"} == fitted.document()
    made = {name: make_policy(text).options for name, text in config["calibrated"]["policies"].items()}
    assert made["score"].prefill_tokens_per_second == config["calibrated"]["prefill_tokens_per_second"]
    assert len(made["flexlb_formula"].calibration) == len(fitted.rows)
    assert "round_robin" not in made


def test_a_targets_constants_are_for_the_policies_that_are_named(tmp_path: Path) -> None:
    plain = BenchOptions(target="http://127.0.0.1:9", policy="score{queue_patience=2}")
    assert specs_of(replace(plain, calibrate=True), None) == {"score{queue_patience=2}": "score{queue_patience=2}"}
    for options, message in (
        (plain, "--policy: a target routes by a policy of its own: leave it out, or add --calibrate"),
        (replace(plain, engine="vllm"), "--engine: a target has engines of its own"),
    ):
        with pytest.raises(UsageError, match=message):
            specs_of(options, None)


@pytest.mark.parametrize("arguments", [("fleet-events",), ("smoke", "--tune", "loadaware.beta=0,1")])
def test_where_later_runs_are_not_like_the_first_minute_it_is_refused(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = prefixwatch("bench", *arguments, "--calibrate", "--out", str(tmp_path))
    assert result.code == 2
    assert "--calibrate goes with neither --tune, a sweep, a search nor events: leave one out" in result.err
