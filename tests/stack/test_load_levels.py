"""Sweeps and the search for the highest rate, in virtual time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefixwatch.documents import parse
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.slo.build import load_objectives
from prefixwatch.stack.bench.levels import LevelRun, LevelsRequest, levels_request, run_levels
from prefixwatch.stack.bench.simulate import run_simulate
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.interrupt import Interrupt, StoppedError
from prefixwatch.stack.simulation.options import SimulateOptions
from tests.stack.summary_figures import value

SCENARIO = """\
name: one-engine
duration_seconds: 15
arrivals: {kind: poisson, rate_per_second: 8}
groups: {count: 0, shared_tokens: 400, unique_tokens: 100, output_tokens: 8}
engine: {workers: 1, capacity_blocks: 20000, profile: assumed-gpu}
slo: [ttft]
search: {precision_ratio: 0.1, repeats: 3, max_per_second: 200}
"""


def found(folder: Path, levels: LevelsRequest, text: str = SCENARIO) -> tuple[dict[str, Any], int, str]:
    file = folder / "one-engine.yaml"
    file.write_text(text)
    screen = io.StringIO()
    sweep = {"rate": "sweep_rate", "concurrency": "sweep_concurrency"}[levels.kind]
    given: Any = {sweep: ",".join(map(str, levels.values))} if levels.values else {"search_rate": True}
    options = SimulateOptions(source=str(file), policy="round_robin", arrivals="trace", repeats=1, **given)
    summary, code = run_simulate(options, Console(file=screen, width=200))
    return summary["policies"]["round_robin"], code, screen.getvalue()


def test_the_highest_rate_is_found_with_confidence_and_holds(tmp_path: Path) -> None:
    search, code, screen = found(tmp_path, LevelsRequest("rate"))
    assert code == 0
    best, failing = search["rate_per_second"], search["failing_rate_per_second"]
    assert best < failing <= 1.1 * best
    assert "meets every objective with 95 % confidence" in screen
    for step in search["steps"]:
        assert (step["verdict"] == "fail") == (step["rate_per_second"] >= failing)
    sweep, code, _ = found(tmp_path, LevelsRequest("rate", [best, 1.5 * failing]))
    assert [step["verdict"] for step in sweep["steps"]] == ["pass", "fail"]
    assert code == 1


def answered(index: int) -> RequestRecord:
    at = index / 8
    return RequestRecord(
        id=f"r{index}", policy="p", repeat=0, index=index, phase="measured", tenant="-", session=f"s{index}", turn=0,
        group="-", request_class="interactive", scheduled_s=at, sent_s=at, first_token_s=at + 0.1, end_s=at + 0.2,
        outcome=Outcome.COMPLETED, planned_prompt_tokens=100, planned_shared_tokens=0,
    )  # fmt: skip


@pytest.mark.parametrize("request_", [LevelsRequest("rate"), LevelsRequest("rate", [1, 2, 3])], ids=["search", "sweep"])
async def test_what_was_found_before_an_interrupt_is_kept(request_: LevelsRequest) -> None:
    """The level at work when the user ended it counts for nothing, nor do policies that were still to come."""
    console = Console(file=io.StringIO())
    interrupt = Interrupt(console)
    scenario = parse(SCENARIO, Scenario, name="one-engine.yaml")
    made: list[str] = []

    async def run(level: Scenario, policy: str, repeat: int) -> LevelRun:
        if made:
            interrupt.asked = True
            raise StoppedError
        made.append(policy)
        return LevelRun([answered(k) for k in range(200)])

    levels, code = await run_levels(
        scenario, load_objectives(["ttft"]), ["round_robin", "score"], request_,
        run=run, console=console, interrupt=interrupt,
    )  # fmt: skip
    assert code == 3
    assert list(levels["policies"]) == ["round_robin"]
    assert len(levels["policies"]["round_robin"]["steps"]) == 1


def test_a_rate_that_cannot_be_met_is_a_failure(tmp_path: Path) -> None:
    text = SCENARIO.replace("shared_tokens: 400", "shared_tokens: 12000").replace(
        "max_per", "min_per_second: 4, max_per"
    )
    search, code, screen = found(tmp_path, LevelsRequest("rate"), text)
    assert (search["rate_per_second"], code) == (None, 1)
    assert "no rate down to 4 req/s meets the objectives: ttft" in screen


def test_a_sweep_over_users_shows_where_throughput_stops_growing(tmp_path: Path) -> None:
    text = SCENARIO.replace("output_tokens: 8", "output_tokens: 40")
    sweep, _, screen = found(tmp_path, LevelsRequest("concurrency", [1, 4, 16]), text)
    throughput = [step["throughput_rps"] for step in sweep["steps"]]
    latency = [value(step["grade"], "ttft_p50") for step in sweep["steps"]]
    assert throughput[0] < throughput[1] < throughput[2] < 16 * throughput[0]
    assert latency == sorted(latency)
    assert "users" in screen


def test_a_closed_loop_never_has_more_in_flight_than_users(tmp_path: Path) -> None:
    sweep, _, _ = found(tmp_path, LevelsRequest("concurrency", [3]))
    assert sweep["steps"][0]["grade"]["requests"]["completed"] == 150


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"search_rate": True, "sweep_rate": "1"}, "--search-rate and --sweep-rate: give one of them"),
        ({"sweep_rate": "fast"}, "--sweep-rate fast: give numbers with commas between them"),
        ({"sweep_concurrency": "1,0"}, "--sweep-concurrency 1,0: every number must be above 0"),
    ],
)
def test_impossible_levels_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        levels_request(**{"search_rate": False, "sweep_rate": "", "sweep_concurrency": "", **options})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("slo: [ttft]", "slo: []"), "has no objectives to search by"),
        (("{kind: poisson, rate_per_second: 8}", "{kind: closed, concurrency: 2}"), "needs arrivals with a rate"),
    ],
)
def test_a_search_needs_objectives_and_a_rate(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        found(tmp_path, LevelsRequest("rate"), SCENARIO.replace(*change))
