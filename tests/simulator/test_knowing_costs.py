"""Block sizes and ways to know the caches: what each costs, and what it brings."""

from __future__ import annotations

import pytest

from benchmarks.block_size import row
from benchmarks.control_plane import priced
from prefixwatch.loadgen.scenario.model import load_scenario
from prefixwatch.simulator.router import snapshot_seconds
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic


def test_large_blocks_need_fewer_names_and_reuse_less() -> None:
    scenario = load_scenario("agent-loop")
    small, large = (row(scenario, size, "cache_aware", 0) for size in (16, 128))
    assert small.hashed_per_request / large.hashed_per_request == pytest.approx(8, rel=0.05)
    assert small.hit_ratio > large.hit_ratio
    assert small.stored_per_second > 4 * large.stored_per_second


def test_a_scenario_says_how_large_its_blocks_are() -> None:
    scenario = load_scenario("smoke")
    engine = scenario.engine.model_copy(update={"block_size": 64})
    large = ScenarioTraffic(scenario.model_copy(update={"engine": engine})).requests(0)
    small = ScenarioTraffic(scenario).requests(0)
    assert [len(request.blocks) for request in large] == [request.prompt_tokens // 64 for request in small]


def test_telling_less_often_costs_hits_and_saves_bytes() -> None:
    scenario = load_scenario("stale-index")
    requests = ScenarioTraffic(scenario).requests(0)
    each_second, every_five = (priced(scenario, requests, view, "score") for view in ("snapshots:1", "snapshots:5"))
    events = priced(scenario, requests, "events", "score")
    assert events.hit_ratio > each_second.hit_ratio > every_five.hit_ratio
    assert each_second.kilobytes_per_second > 3 * every_five.kilobytes_per_second
    assert priced(scenario, requests, "history", "score").messages_per_second == 0


@pytest.mark.parametrize("view", ["snapshots:0", "snapshots:x", "snapshots:inf", "snapshots:", "polls:3"])
def test_an_interval_that_is_none_is_refused(view: str) -> None:
    with pytest.raises(ValueError, match="one every 5 seconds"):
        snapshot_seconds(view)
    assert snapshot_seconds("snapshots:2.5") == 2.5
    assert snapshot_seconds("snapshots") is None
