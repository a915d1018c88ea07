"""Region, worker and GPU group: three steps of one placement, each exchangeable, each named in the reason."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Fleet, LoadReport, Place, Worker
from tests.router.fleets import a_request

EU_A, EU_B, US = Place("eu", "", "n1", "a"), Place("eu", "", "n1", "b"), Place("us", "", "n9", "a")


def fleet_of(places: dict[str, Place], hits: dict[str, int], **in_flight: int) -> Fleet:
    workers = [Worker(name, in_flight=in_flight.get(name, 0), place=place) for name, place in places.items()]
    return Fleet(workers, lambda request: hits, 0.0)


def chosen(fleet: Fleet, **options: Any) -> tuple[str, str]:
    decision = make_policy("topology", options={"worker": "cache_aware", **options}).choose(a_request(1, 160), fleet)
    return decision.worker, decision.reason


def test_the_region_that_holds_most_is_taken_first_and_each_step_is_in_the_reason() -> None:
    fleet = fleet_of({"us": US, "eu-1": EU_A, "eu-2": EU_B}, {"eu-2": 10, "us": 4})
    worker, reason = chosen(fleet)
    assert worker == "eu-2"
    assert reason.split(">")[0::2] == ["cached", "kept"]
    assert reason in make_policy("topology", options={"worker": "cache_aware"}).reasons


def test_an_overloaded_region_is_left_for_the_one_that_holds_less() -> None:
    fleet = fleet_of({"us": US, "eu-1": EU_A, "eu-2": EU_B}, {"eu-2": 10, "us": 4}, **{"eu-1": 30, "eu-2": 30})
    assert chosen(fleet, overload=1.2)[0] == "us"
    assert chosen(fleet, overload=1.2)[1].startswith("cached>")


def test_without_any_hit_the_least_loaded_region_is_taken() -> None:
    fleet = fleet_of({"us": US, "eu-1": EU_A}, {}, us=3)
    worker, reason = chosen(fleet)
    assert (worker, reason.split(">")[0]) == ("eu-1", "least_loaded")


def test_each_step_can_be_exchanged_without_the_others() -> None:
    places, hits = {"us": US, "eu-1": EU_A, "eu-2": EU_A}, {"us": 10, "eu-1": 10, "eu-2": 10}
    fleet = fleet_of(places, hits, **{"us": 9, "eu-1": 5, "eu-2": 1})
    assert chosen(fleet, region="any", worker="round_robin", gpu_group="chosen") == ("eu-1", "any>next_in_turn>kept")
    assert chosen(fleet, region="cached", worker="least_load", gpu_group="chosen")[0] == "eu-2"
    eu = fleet_of({"eu-1": EU_A, "eu-2": EU_A}, hits, **{"eu-1": 5, "eu-2": 1})
    assert chosen(eu, worker="round_robin", gpu_group="chosen")[0] == "eu-1"
    assert chosen(eu, worker="round_robin", gpu_group="least_loaded") == ("eu-2", "any>next_in_turn>moved")


def test_a_request_moves_within_a_group_only_to_a_gpu_that_holds_as_much() -> None:
    places = {"one": EU_A, "two": EU_A, "other": EU_B}
    fleet = fleet_of(places, {"one": 10, "two": 9, "other": 10}, one=5)
    assert chosen(fleet, worker="round_robin") == ("one", "any>next_in_turn>kept")


def test_free_memory_counts_unknown_use_as_the_highest() -> None:
    fleet = fleet_of({"one": EU_A, "two": EU_A, "three": EU_A}, {})
    for worker, usage in zip(fleet.workers, (0.9, None, 0.4), strict=True):
        worker.report = None if usage is None else LoadReport(0.0, kv_usage_ratio=usage)
    assert chosen(fleet, worker="round_robin", gpu_group="free_memory")[0] == "three"


def test_routers_agree_on_the_home_region_of_a_session() -> None:
    fleet = fleet_of({f"{region}-{k}": Place(region) for region in ("eu", "us", "ap") for k in range(2)}, {})
    homes = set()
    for seed in range(4):
        policy = make_policy("topology", seed=seed, options={"region": "home", "worker": "least_load"})
        homes.add(policy.choose(a_request(session="s"), fleet).worker.split("-")[0])
    assert len(homes) == 1


def test_topology_within_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be topology itself"):
        make_policy("topology", options={"worker": "topology"})
