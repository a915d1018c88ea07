from __future__ import annotations

from typing import Any

import pytest

from benchmarks.multi_router import ENGINE, WORKERS, measure
from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.simulator.multi_router import simulate_routers, spread_over
from prefixwatch.simulator.runs import simulate_requests

REQUESTS = shared_prefix_requests(
    SharedPrefixWorkload(
        requests=1200,
        rate_per_second=60,
        groups=120,
        zipf_exponent=0.6,
        shared_blocks=12,
        unique_blocks=2,
        output_tokens=24,
        block_size=64,
    ),
    seed=5,
)
FLEET: Any = {"workers": WORKERS, "engine": ENGINE, "seed": 3}


def hits_lost(policy: str, view: Any) -> float:
    """Of one router's hit ratio, the share that eight lose."""
    one, eight = (simulate_routers(REQUESTS, policy=policy, routers=k, view=view, **FLEET) for k in (1, 8))
    assert one.token_hit_ratio is not None
    assert eight.token_hit_ratio is not None
    return 1 - eight.token_hit_ratio / one.token_hit_ratio


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize(
    ("policy", "view"),
    [("round_robin", "history"), ("score", "history"), ("cache_aware", "events"), ("preble", "history")],
)
def test_one_router_is_the_ordinary_fleet(policy: str, view: Any, serial: bool) -> None:
    one = simulate_routers(REQUESTS[:300], policy=policy, routers=1, serial=serial, view=view, **FLEET)
    arrivals: Any = "serial" if serial else "trace"
    assert one == simulate_requests(REQUESTS[:300], policy=policy, arrivals=arrivals, view=view, **FLEET)


@pytest.mark.parametrize("policy", ["cache_aware", "cache_aware_v1", "prefixaware", "preble", "score"])
def test_routers_that_only_know_what_they_routed_lose_hits(policy: str) -> None:
    """smg-project/smg#2437 (F-5): each replica learns owners of its own, and a group ends up on many workers."""
    assert hits_lost(policy, "history") > 0.25


@pytest.mark.parametrize("policy", ["cache_aware", "kvaware", "llmd_precise"])
def test_routers_that_hear_the_engines_lose_next_to_nothing(policy: str) -> None:
    """Replicas converge from the same events, whichever of them routed a request (MR-1)."""
    assert hits_lost(policy, "events") < 0.05


@pytest.mark.parametrize("policy", ["score", "affinity"])
def test_policies_that_weigh_their_own_load_lose_far_less_by_events_than_by_history(policy: str) -> None:
    """What they know of the caches is the same in every replica; what each has in flight is not (smg#1621, RT05)."""
    assert hits_lost(policy, "events") < min(0.15, hits_lost(policy, "history") / 2)


@pytest.mark.parametrize("policy", ["prefix_hash", "round_robin"])
def test_stateless_routers_lose_next_to_nothing(policy: str) -> None:
    """A hash of the prompt is the same in every replica (MR-0)."""
    assert hits_lost(policy, "history") < 0.05


def test_counters_of_one_replica_see_only_its_share() -> None:
    """smg-project/smg#1621 (RT05): with eight replicas least_load balances worse, by its own counts as well as ever."""
    one, eight = measure(["least_load"], (1, 8), requests=REQUESTS)
    assert eight.in_flight_max_over_mean > one.in_flight_max_over_mean + 0.2


def test_the_table_compares_each_row_with_its_first_number_of_routers() -> None:
    rows = list(measure(["cache_aware", "prefixaware"], (1, 8), requests=REQUESTS[:400]))
    assert [(row.policy, row.knows, row.routers) for row in rows] == [
        (policy, knows, routers)
        for policy, knows in (("cache_aware", "history"), ("cache_aware", "events"), ("prefixaware", "history"))
        for routers in (1, 8)
    ]
    assert all((row.hits_lost, row.ttft_p95_ratio) == (0, 1) for row in rows if row.routers == 1)
    alone, shared, *_ = rows
    assert shared.hits_lost == pytest.approx(1 - shared.hit_ratio / alone.hit_ratio, abs=0.001)


def test_no_request_is_lost_between_routers() -> None:
    result = simulate_routers(REQUESTS[:300], policy="score", routers=8, **FLEET)
    assert sum(worker.requests for worker in result.workers) == 300
    assert {record.outcome for record in result.records} == {"completed"}


def test_spreading() -> None:
    assert spread_over(3, 5, "round_robin", seed=1) == [0, 1, 2, 0, 1]
    at_random = spread_over(8, 8000, "random", seed=1)
    assert at_random is not None
    assert at_random == spread_over(8, 8000, "random", seed=1)
    assert all(900 < at_random.count(k) < 1100 for k in range(8))


def test_a_fleet_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 router"):
        simulate_routers(REQUESTS[:3], policy="round_robin", routers=0, **FLEET)
