from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig, EngineModel
from prefixwatch.engines.model.sequence import SimRequest
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.errors import RouterError
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Fleet, Worker
from prefixwatch.router.serving.create import create_app
from prefixwatch.simulator.engine_views import TruthView
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from tests.router.fleets import BLOCK, a_fleet, a_request

ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1e-4), block_size=BLOCK, capacity_blocks=4_000)
REQUESTS = shared_prefix_requests(
    SharedPrefixWorkload(requests=400, rate_per_second=26, groups=20, shared_blocks=64, unique_blocks=8), seed=1
)


def run(policy: str, requests: list[SimulatedRequest] = REQUESTS, **arguments: Any) -> SimulationResult:
    return simulate_requests(requests, policy=policy, **{"workers": 4, "engine": ENGINE, **arguments})


def mean_ttft_s(result: SimulationResult) -> float:
    times = [record.ttft_s for record in result.records if record.ttft_s is not None]
    return sum(times) / len(times)


def test_the_soonest_first_token_wins_then_the_deeper_cache_then_the_shorter_queue() -> None:
    policy = make_policy("oracle")
    decision = policy.choose(a_request(), a_fleet([0, 0], {"w0": 8}, backlog_seconds=[0.1, 0.0]))
    assert decision.scores == pytest.approx({"w0": 0.1 + 0.032, "w1": 0.16})
    assert (decision.worker, decision.hit_blocks) == ("w0", 8)
    even = a_fleet([0, 1], {"w1": 10}, backlog_seconds=[0.0, 0.16])
    assert policy.choose(a_request(), even).worker == "w1"
    assert policy.choose(a_request(), a_fleet([1, 0])).worker == "w1"


def test_full_ties_are_random() -> None:
    policy = make_policy("oracle")
    counts = Counter(policy.choose(a_request(), a_fleet([0, 0])).worker for _ in range(400))
    assert 140 < counts["w0"] < 260


def test_a_live_router_refuses_it() -> None:
    config = RouterConfig.model_validate({"workers": [{"name": "a", "url": "http://127.0.0.1:1"}]})
    with pytest.raises(RouterError, match="policy oracle needs to know the engines' true state"):
        create_app(config, policy=make_policy("oracle"))
    with pytest.raises(ValueError, match="needs the simulator"):
        make_policy("oracle").choose(a_request(), Fleet([Worker("w0")], lambda request: {}, 0.0))


def test_the_truth_about_one_engine() -> None:
    """A step in work, a prompt in chunks, and one that waits behind it: exactly when a newcomer's turn comes."""
    view, model = TruthView(), EngineModel(ENGINE)
    view.watch({"w0": model})
    first, second = a_request(1, 3_200, "first"), a_request(1, 3_200 + 160, "second")
    for request in (first, second):
        view.routed(request, "w0")
        model.submit(SimRequest(request.id, request.blocks, request.prompt_tokens, 1))
    step = model.begin_step(0.0)
    assert step is not None
    assert step.prefill_tokens == 2048
    assert view.depths(second) == {"w0": 210}
    fleet = Fleet([Worker("w0")], view.depths, 0.1)
    view.tell(fleet, {"w0": step.duration_s})
    left_s = step.duration_s - 0.1
    assert fleet.workers[0].backlog_seconds == pytest.approx(left_s + 0.01 + (1152 + 160) * 1e-4)
    assert fleet.prefill_seconds is not None
    assert fleet.prefill_seconds(3_200, 3_200) == pytest.approx(0.01 + 16e-4)


def test_what_it_expects_alone_is_what_happens() -> None:
    for record in run("oracle", arrivals="serial").records:
        assert record.predicted_tokens is not None
        assert record.cached_tokens == min(record.predicted_tokens, (record.prompt_tokens or 0) - 1)


def test_no_policy_gives_a_sooner_first_token() -> None:
    oracle = mean_ttft_s(run("oracle"))
    for policy in ("round_robin", "least_load", "cache_aware", "score", "dynamo_kv", "flexlb_formula", "preble"):
        assert oracle < 1.02 * mean_ttft_s(run(policy)), policy


def test_a_burst_with_a_new_prefix_is_not_prefilled_everywhere() -> None:
    """F-13: whoever waits for the first copy instead of making another must know that it is under way."""
    blocks = a_request(1, 1_600).blocks
    burst = [SimulatedRequest(f"r{k}", 0.05 * k, 1_600, 1, blocks) for k in range(3)]
    computed = {
        policy: sum(worker.counters.query_tokens - worker.counters.hit_tokens for worker in run(policy, burst).workers)
        for policy in ("oracle", "round_robin")
    }
    assert computed == {"oracle": 1600 + 2 * 16, "round_robin": 3 * 1600}


def test_a_request_that_fits_no_engine_leaves_nothing_behind() -> None:
    tiny = EngineConfig(ENGINE.step_time, block_size=BLOCK, capacity_blocks=4)
    assert {record.status for record in run("oracle", REQUESTS[:3], engine=tiny).records} == {400}
