"""`prefixwatch compare` and `prefixwatch report`: on run folders as `bench` writes them, without an engine."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.grading.summary import read_summary
from prefixwatch.loadgen.report.comparison_chart import comparison_chart
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.results.comparison import run_compare
from prefixwatch.loadgen.results.run_folder import read_run
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.slo.build import load_objectives
from prefixwatch.stack.bench.compare import comparison_markdown, comparison_page
from prefixwatch.stack.bench.report import run_report
from prefixwatch.stack.bench.results import BenchRuns, write_results
from prefixwatch.stack.errors import UsageError
from tests.stack.test_mutated_documents import REPLACEMENTS, SAMPLES, places, replaced

REQUESTS = 300


def records(policy: str, *, seed: int, slower: float = 1.0, plan: int = 0, repeats: int = 2) -> list[RequestRecord]:
    """Requests of one plan (`plan`), their TTFT drawn by `seed` around 100 ms × `slower`."""
    rows = []
    for repeat in range(repeats):
        times = np.cumsum(np.random.default_rng((plan, repeat)).exponential(0.1, REQUESTS)).tolist()
        waits = np.random.default_rng((seed, repeat)).lognormal(np.log(0.1 * slower), 0.3, REQUESTS).tolist()
        rows += [
            RequestRecord(
                id=f"{policy}-{repeat}-{i}",
                policy=policy,
                repeat=repeat,
                index=i,
                phase="measured",
                tenant="acme",
                session=f"s{i}",
                turn=0,
                group="g0",
                request_class="interactive",
                scheduled_s=times[i],
                sent_s=times[i],
                first_token_s=times[i] + waits[i],
                end_s=times[i] + waits[i] + 0.3,
                outcome=Outcome.COMPLETED,
                status=200,
                planned_prompt_tokens=160,
                planned_shared_tokens=128,
                prompt_tokens=160,
                cached_tokens=128,
                output_tokens=16,
                worker=f"w{i % 2}",
            )
            for i in range(REQUESTS)
        ]
    return rows


def write_run(folder: Path, rows: list[RequestRecord], slo: tuple[str, ...] = ("ttft",), reason: str = "") -> Path:
    scenario = load_scenario("shared-prefix").model_copy(update={"slo": list(slo)})
    policies = list(dict.fromkeys(row.policy for row in rows))
    runs = BenchRuns(
        scenario=scenario,
        objectives=load_objectives(slo),
        engine="simulated",
        workers=2,
        policies=policies,
        seed=1,
        again={"scenario": {"slo": list(slo)}},
        notes=["policies were calibrated"],
    )
    report = {"seed": 1, "policy": policies[0], "reasons": [reason] if reason else []}
    folder.mkdir()
    runs.reports.append(report)
    runs.records = rows
    write_results(folder, runs, Console(file=io.StringIO()))
    return folder


def test_a_run_that_is_slower_on_the_same_plan_is_worse(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("cache_aware", seed=1))
    b = write_run(tmp_path / "b", records("cache_aware", seed=2, slower=1.3))

    result, code = run_compare(a, b, [], [], 0.0)

    assert (result.verdict, code, result.paired) == ("worse", 1, True)
    found = {c.metric: c for c in result.comparison}
    assert found["ttft_p50"].relative == pytest.approx(0.3, abs=0.06)
    assert found["hit_tokens_mean"].difference == 0.0
    assert "| TTFT p95, ms |" in comparison_markdown(result)


def test_the_page_says_its_verdict_first_and_each_difference_with_its_unit(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("cache_aware", seed=1))
    b = write_run(tmp_path / "b<script>", records("cache_aware", seed=2, slower=1.3))

    page = comparison_page(run_compare(a, b, [], [], 0.0)[0])

    head, _, body = page.partition("<h1>")
    verdict, figures = body.index("✗ Worse"), body.index("What differs?")
    assert verdict < figures
    assert "TTFT p50, ms" in body
    assert 'class="worse">✗ worse</td>' in body
    assert "b<script>" not in page
    assert "--fail" in head
    assert not re.findall(r'(?:src|href)="(?!#)[^"]+"', page.partition("<script>")[0]), "it loads nothing"


def test_the_chart_has_every_difference_relative_to_the_baseline_with_its_interval(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("cache_aware", seed=1))
    b = write_run(tmp_path / "b", records("cache_aware", seed=2, slower=1.3))
    found = [c for c in run_compare(a, b, [], [], 0.0)[0].comparison if c.metric == "ttft_p50"]

    chart = comparison_chart(found, ["TTFT p50, ms"])

    (one,) = found
    assert one.ci95 is not None
    assert one.a_value is not None
    (trace,) = chart.traces
    assert (trace["name"], trace["marker"]["symbol"], trace["y"]) == ("worse", "x", ["TTFT p50, ms"])
    assert trace["x"] == [pytest.approx(100 * (one.relative or 0), rel=1e-4)]
    low, high = trace["error_x"]["arrayminus"][0], trace["error_x"]["array"][0]
    assert trace["x"][0] - low == pytest.approx(100 * one.ci95[0] / one.a_value, rel=1e-4)
    assert trace["x"][0] + high == pytest.approx(100 * one.ci95[1] / one.a_value, rel=1e-4)


def test_a_loss_within_the_tolerance_passes_the_gate(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1))
    b = write_run(tmp_path / "b", records("score", seed=2, slower=1.3))

    result, code = run_compare(a, b, [], [], 45.0)

    assert (result.verdict, code) == ("same", 0)


def test_two_runs_of_the_same_thing_show_no_difference(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1))
    b = write_run(tmp_path / "b", records("score", seed=2))

    result, code = run_compare(a, b, [], [], 0.0)

    assert (result.verdict, code) == ("same", 0)


def test_runs_of_different_plans_are_compared_as_two_samples(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1, plan=1))
    b = write_run(tmp_path / "b", records("score", seed=2, plan=2, slower=0.6, repeats=3))

    result, code = run_compare(a, b, [], [], 0.0)

    assert (result.paired, result.verdict, code) == (False, "better", 0)


def test_differently_named_policies_are_compared_when_each_run_has_one(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("round_robin", seed=1))
    b = write_run(tmp_path / "b", records("cache_aware", seed=2, slower=0.5))

    result, _ = run_compare(a, b, [], [], 0.0)

    assert {(c.a, c.b) for c in result.comparison} == {("round_robin", "cache_aware")}
    assert result.verdict == "better"


def test_in_the_json_a_is_run_a_everywhere_and_differences_are_b_less_a(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1))
    b = write_run(tmp_path / "b", records("score", seed=2, slower=1.5))

    found = run_compare(a, b, [], [], 0.0)[0].model_dump(mode="json", by_alias=True)

    assert (found["schema"], found["a"], found["b"]) == (2, str(a), str(b))
    [ttft] = [row for row in found["comparison"] if row["metric"] == "ttft_p50"]
    assert ttft["a_value"] == pytest.approx(100, rel=0.1)
    assert ttft["b_value"] == pytest.approx(150, rel=0.1)
    assert ttft["difference"] == ttft["b_value"] - ttft["a_value"]
    assert ttft["relative"] == ttft["difference"] / ttft["a_value"]
    assert ttft["ci95"][0] > 0
    assert (ttft["unit"], ttft["effect"]) == ("ms", "worse")


def test_a_run_that_cannot_be_believed_decides_nothing(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1))
    b = write_run(tmp_path / "b", records("score", seed=2, slower=2.0), reason="the client stalled")

    result, code = run_compare(a, b, [], [], 0.0)

    assert (result.verdict, code) == ("inconclusive", 3)
    assert result.reasons == [f"{b}: score: the client stalled"]


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (["oracle"], "has no policy 'oracle', only score"),
        ([], "no policy is in both runs"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, policies: list[str], message: str) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1))
    two = records("round_robin", seed=1) + records("cache_aware", seed=2)
    b = write_run(tmp_path / "b", two)

    with pytest.raises(InputError, match=message):
        run_compare(a, b, policies, [], 0.0)


def test_runs_graded_on_different_objectives_need_common_ones(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", records("score", seed=1))
    b = write_run(tmp_path / "b", records("score", seed=2), slo=("availability",))

    with pytest.raises(InputError, match="name those to grade both on with --slo"):
        run_compare(a, b, [], [], 0.0)

    assert run_compare(a, b, [], ["availability"], 0.0)[0].verdict == "same"


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        run_compare(tmp_path / "none", tmp_path, [], [], 0.0)
    with pytest.raises(InputError, match=r"requests\.parquet: No such file"):
        run_compare(tmp_path, tmp_path, [], [], 0.0)


def test_a_request_log_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", records("score", seed=1))
    (run / "requests.parquet").write_text("id,policy\n", encoding="utf-8")

    with pytest.raises(InputError, match=r"requests\.parquet: not a readable Parquet file"):
        run_compare(run, run, [], [], 0.0)


def test_a_report_from_the_log_says_what_the_bench_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", records("score", seed=1), reason="the client stalled")
    kept = json.loads((run / "summary.json").read_text(encoding="utf-8"))

    again, code = run_report(run, [], tmp_path / "again", Console(file=io.StringIO()))

    assert again == kept
    assert again["notes"][0] == "policies were calibrated"
    assert code == 3
    assert (tmp_path / "again" / "report.html").stat().st_size > 100_000


def test_a_report_can_be_graded_on_other_objectives(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", records("score", seed=1))

    again, _ = run_report(run, ["availability"], tmp_path / "again", Console(file=io.StringIO()))

    assert [o["name"] for o in again["policies"]["score"]["objectives"]] == ["availability"]
    configuration = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert configuration["block_size"] == 16


def closed_run(folder: Path, users: int) -> Path:
    """Never more than two at once, however many users were asked for."""
    rows = records("score", seed=1)
    for row in rows:
        row.scheduled_s = row.sent_s = row.index / 4
        row.first_token_s, row.end_s = row.sent_s + 0.1, row.sent_s + 0.4
    arrivals = {"kind": "closed", "concurrency": users}
    scenario = Scenario.model_validate(
        {"name": "c", "duration_seconds": 60, "arrivals": arrivals, "groups": {"count": 1, **LENGTHS}, "slo": ["ttft"]}
    )
    again = {"scenario": scenario.model_dump(mode="json", exclude_unset=True)}
    runs = BenchRuns(scenario, load_objectives(["ttft"]), "simulated", 2, ["score"], 1, again)
    report = {"seed": 1, "policy": "score", "reasons": [], "loop": "closed", "concurrency": users}
    runs.records, runs.reports = rows, [{**report, "repeat": repeat} for repeat in range(2)]
    folder.mkdir()
    write_results(folder, runs, Console(file=io.StringIO()))
    return folder


LENGTHS = {"shared_tokens": 64, "unique_tokens": 16, "output_tokens": 4}


def test_a_closed_loop_that_never_had_so_many_in_flight_is_invalid(tmp_path: Path) -> None:
    """vllm-project/vllm#7241, #14513 (LT21): a connection limit on the way, and not the engine, made the figures."""
    found = read_summary(closed_run(tmp_path / "run", 256) / "summary.json")

    assert (found.validity.valid, found.verdict) == (False, "inconclusive")
    assert found.validity.reasons == [
        "score: 256 requests in flight were requested, 2 reached: look for a connection limit on the path"
    ]
    again, code = run_report(tmp_path / "run", [], tmp_path / "again", Console(file=io.StringIO()))
    assert (again["validity"]["reasons"], code) == (found.validity.reasons, 3)


def test_a_closed_loop_that_had_them_is_valid_and_labelled(tmp_path: Path) -> None:
    run = closed_run(tmp_path / "run", 2)

    found = read_summary(run / "summary.json")

    assert found.validity.reasons == []
    assert found.notes[0].startswith("closed loop of 2 users: ")
    assert "closed loop of 2 users" in (run / "report.html").read_text(encoding="utf-8")
    assert "2 × simulated, closed loop of 2 users, 2 repeats" in (run / "summary.md").read_text(encoding="utf-8")


def test_a_report_can_also_be_in_vllms_format(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", records("score", seed=1))

    run_report(run, [], None, Console(file=io.StringIO()), also="vllm-bench")

    found = json.loads((run / "vllm-bench-score.json").read_text(encoding="utf-8"))
    assert (found["label"], found["completed"]) == ("score", 2 * REQUESTS)
    assert found["median_ttft_ms"] == pytest.approx(100.0, rel=0.1)
    with pytest.raises(UsageError, match="--as guidellm: choose vllm-bench"):
        run_report(run, [], None, Console(file=io.StringIO()), also="guidellm")


def test_a_comparison_passes_on_what_the_runs_say_of_themselves(tmp_path: Path) -> None:
    a, b = closed_run(tmp_path / "a", 2), closed_run(tmp_path / "b", 2)

    result, _ = run_compare(a, b, [], [], 0.0)

    assert [note.partition(": a server")[0] for note in result.notes] == [
        f"{a}: closed loop of 2 users",
        f"{b}: closed loop of 2 users",
    ]
    assert f"- Note: {a}: closed loop of 2 users" in comparison_markdown(result)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_a_file_of_a_run_that_was_changed_is_an_input_error(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "a", records("score", seed=1, repeats=1)[:40])
    file, whole = folder / name, yaml.safe_load((folder / name).read_text())
    options = [(place, new) for place in places(whole) for new in REPLACEMENTS]
    for place, new in random.Random(name).sample(options, SAMPLES):
        file.write_text(json.dumps(replaced(whole, place, new)))
        try:
            _ = read_run(folder).summary
        except InputError:
            continue
        except Exception as error:
            raise AssertionError(f"{name}: {'.'.join(map(str, place))} = {new!r}") from error


def test_a_config_that_is_no_yaml_is_an_input_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", records("score", seed=1, repeats=1)[:40])
    (folder / "config.yaml").write_text("scenario: {")
    with pytest.raises(InputError, match=r"config\.yaml:1: not valid YAML"):
        read_run(folder)


def test_a_policy_with_a_path_among_its_options_has_a_file_for_vllm_bench(tmp_path: Path) -> None:
    label = "flexlb_learning{weights=a/b.json}"
    folder = write_run(tmp_path / "a", records(label, seed=1, repeats=1))
    run_report(folder, [], None, Console(quiet=True), also="vllm-bench")
    assert json.loads((folder / "vllm-bench-flexlb_learning_weights=a_b.json_.json").read_text())["label"] == label
