"""`prefixwatch simulate` from its command line: which arrival times a simulation keeps."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import prefixwatch.loadgen.scenarios
from prefixwatch.documents.errors import InputError
from prefixwatch.engines.model.profiles import profile
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.simulated.server import SimulatedEngine
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.loadgen.request_log.fleet_rows import read_fleet
from prefixwatch.loadgen.request_log.records import read_requests
from prefixwatch.loadgen.results.comparison import run_compare
from prefixwatch.loadgen.scenario.model import load_scenario
from prefixwatch.stack.bench.report import run_report
from prefixwatch.stack.bench.simulate import run_simulate
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.simulation.calibrate import CalibrateOptions, run_calibrate
from prefixwatch.stack.simulation.options import SimulateOptions
from prefixwatch.stack.simulation.runs import SimulatedFleet
from tests.stack.summary_figures import value

SCENARIOS = Path(prefixwatch.loadgen.scenarios.__path__[0])


def simulated(**options: Any) -> tuple[dict[str, Any], int]:
    given = {"repeats": 1, "policy": "round_robin", "workers": 1, **options}
    return run_simulate(SimulateOptions(**given), Console(file=io.StringIO()))


def test_one_worker_serves_a_scenario_at_its_own_times() -> None:
    """`--workers 1` replaced the arrivals by one request after another, and an overloaded engine passed."""
    found, code = simulated(source="shared-prefix")

    own = found["policies"]["round_robin"]
    assert (found["verdict"], code) == ("fail", 1)
    assert value(own, "ttft_p95") > 10_000
    assert value(own, "achieved_rps") < 0.5 * value(own, "offered_rps")
    assert found["runs"][0]["loop"] == "open"
    assert found == {**simulated(source="shared-prefix", arrivals="trace")[0], "started_at": found["started_at"]}


def test_a_serial_replay_is_on_request_and_labelled() -> None:
    found, _ = simulated(source="smoke", arrivals="serial")

    assert found["runs"][0]["loop"] == "serial"
    assert found["notes"][0].startswith("serial replay: ")


def test_a_trace_before_one_worker_is_replayed_one_after_another_and_says_so(tmp_path: Path) -> None:
    rows = [{"timestamp": k, "input_length": 1024, "output_length": 4, "hash_ids": [0, k + 1]} for k in range(60)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))

    found, code = simulated(source=str(trace))

    assert found["runs"][0]["loop"] == "serial"
    assert (found["verdict"], code) == ("not_graded", 0)
    assert simulated(source=str(trace), arrivals="trace")[0]["runs"][0]["loop"] == "open"


def test_a_serial_replay_has_no_rate_to_search() -> None:
    with pytest.raises(UsageError, match="sweep or search without it"):
        simulated(source="smoke", arrivals="serial", sweep_rate="10")


def test_a_level_that_one_worker_can_not_carry_does_not_pass() -> None:
    found, code = simulated(source="smoke", sweep_rate="5,200")

    assert [step["verdict"] for step in found["policies"]["round_robin"]["steps"]][1] == "fail"
    assert code == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated")
    simulated(source="smoke", policy="cache_aware", workers=3, repeats=2, out=out)
    return out


def test_out_has_the_files_of_a_bench(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {
        "summary.json", "summary.md", "requests.parquet", "fleet.parquet", "report.html", "junit.xml", "config.yaml",
    }  # fmt: skip


def test_report_grades_the_folder_alike(folder: Path, tmp_path: Path) -> None:
    written = json.loads((folder / "summary.json").read_text())

    graded, _ = run_report(folder, [], tmp_path, Console(file=io.StringIO()))

    assert graded["policies"] == written["policies"]
    assert graded["verdict"] == written["verdict"]


def test_compare_finds_a_second_run_the_same_byte_by_byte(folder: Path, tmp_path: Path) -> None:
    """A seed fixes every result, whether or not somebody watches."""
    simulated(source="smoke", policy="cache_aware", workers=3, repeats=2, out=tmp_path)

    for name in ("requests.parquet", "fleet.parquet"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    compared, code = run_compare(folder, tmp_path, [], [], 0.0)
    assert (compared.verdict, compared.paired, code) == ("same", True, 0)
    unwatched, _ = simulated(source="smoke", policy="cache_aware", workers=3, repeats=2)
    assert unwatched["policies"] == json.loads((folder / "summary.json").read_text())["policies"]


def test_the_fleets_rows_agree_with_the_request_log(folder: Path) -> None:
    rows, records = read_fleet(folder / "fleet.parquet"), read_requests(folder / "requests.parquet")

    for repeat in range(2):
        last = {row.worker: row for row in rows if row.repeat == repeat}
        assert len(last) == 3
        hits = sum(row.prefix_hit_tokens_total or 0 for row in last.values())
        assert hits == sum(record.cached_tokens or 0 for record in records if record.repeat == repeat)
    at_s = [row.at_s for row in rows if row.repeat == 0 and row.worker == "worker-1"]
    assert at_s == sorted(at_s, key=lambda at: at or 0.0)
    assert max(row.running or 0 for row in rows) > 0
    assert max(row.kv_usage_ratio or 0 for row in rows) > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert [run["loop"] for run in summary["runs"]] == ["open", "open"]


def test_a_sweep_leaves_its_levels(tmp_path: Path) -> None:
    simulated(source="smoke", sweep_rate="5", out=tmp_path)

    assert {file.name for file in tmp_path.iterdir()} == {"levels.json", "report.html"}


def test_a_terminal_shows_the_progress_of_each_run() -> None:
    shown = io.StringIO()
    options = SimulateOptions(source="smoke", repeats=1, policy="round_robin", workers=2)

    run_simulate(options, Console(file=shown, force_terminal=True, width=100))

    assert "round_robin, repeat 1" in shown.getvalue()


def test_a_scenarios_fleet_mixes_kinds_of_engines(tmp_path: Path) -> None:
    fleet = "[{count: 2}, {count: 1, kind: sglang}, {count: 1, kind: tensorrt-llm, capacity_blocks: 900}]"
    file = tmp_path / "mixed.yaml"
    text = (SCENARIOS / "smoke.yaml").read_text()
    file.write_text(text.replace("workers: 2, ", "") + f"fleet: {fleet}\n")
    scenario = load_scenario(str(file))

    own = SimulatedFleet.of_scenario(scenario, SimulateOptions(source=str(file)))
    asked = SimulatedFleet.of_scenario(scenario, SimulateOptions(source=str(file), engine_kind="sglang"))

    assert [engine.kind for engine in own.engines] == ["vllm", "vllm", "sglang", "tensorrt-llm"]
    assert {engine.kind for engine in asked.engines} == {"sglang"}
    found, _ = simulated(source=str(file), workers=None)
    assert value(found["policies"]["round_robin"], "not_completed_ratio") == 0.0


async def test_a_running_engine_is_calibrated_within_its_budget(tmp_path: Path) -> None:
    """A simulated engine whose steps take 10 ms and 0.3 ms per prompt token: sleeping overshoots by far less."""
    true = StepTime(0.01, 3e-4)
    config = SimulatedEngineConfig(model_dir=default_model_dir(), step_time=true, max_num_batched_tokens=2048)
    engine = SimulatedEngine(config)
    await engine.start()
    try:
        options = CalibrateOptions(target=engine.url, out=tmp_path / "fitted.yaml", max_prompt_tokens=6000)
        found, _ = await asyncio.to_thread(run_calibrate, options, Console(file=io.StringIO()))
    finally:
        await engine.stop()

    assert found["samples"]["prefill"] >= 8
    fitted = profile(str(tmp_path / "fitted.yaml")).step_time
    assert fitted.prefill_s(1000, 0, 2048) == pytest.approx(true.prefill_s(1000, 0, 2048), rel=0.5)
    assert engine.model.counters.prompt_tokens < 9000


def test_a_calibration_of_a_bench_names_what_is_missing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    for run, out, said in (
        (tmp_path / "none", "x.yaml", "requests.parquet"),
        (None, "x.yaml", "give a bench's folder, or --target URL"),
        (folder, "x.json", "name a file that ends in .yaml"),
    ):
        with pytest.raises(InputError, match=said):
            run_calibrate(CalibrateOptions(run=run, out=tmp_path / out), Console(file=io.StringIO()))
