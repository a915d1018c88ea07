"""Published faults that have no better place: the faithful policy shows each, `score` and `affinity` don't."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from prefixwatch.router.placement.cache_view import HistoryView
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.sglang.cache_aware_v1 import CacheAwareV1
from prefixwatch.router.policy import Fleet, LoadReport, Policy, RouteRequest, Worker
from tests.router.fake_engine import DONE, Behaviour, FakeEngine, Out, delta, never_answer, reset_at_once, until
from tests.router.fleets import BLOCK, a_fleet, a_request, serve

OURS = ["affinity", "score"]
Start = Any  # a coroutine function, see conftest.start


def place_and_hold(policy: Policy, requests: list[RouteRequest], fleet: Fleet) -> Counter[str]:
    """Requests by worker; none of them ends, so each is in flight when the next is placed."""
    workers, placed = {worker.name: worker for worker in fleet.workers}, Counter[str]()
    for request in requests:
        chosen = policy.choose(request, fleet).worker
        policy.on_admit(request, chosen, fleet.now_seconds)
        workers[chosen].in_flight += 1
        workers[chosen].prefill_tokens += request.prompt_tokens
        placed[chosen] += 1
    return placed


def test_by_the_smallest_tree_a_worker_that_just_joined_gets_every_miss() -> None:
    """sgl-project/sglang#14305, sgl-project/sglang#14532 (RT02, F-3): B is full and idle, A is new and busy."""
    full = [a_request(100_000 * k, 1600) for k in range(1, 101)]
    misses = [a_request(1000 * k) for k in range(100)]
    spiral = CacheAwareV1(misses="smallest_tree", balance_abs_threshold=10_000)
    b_alone = Fleet(a_fleet([0, 0]).workers[1:], lambda request: {}, 0.0)
    for request in full:
        serve(spiral, b_alone, request)
    decisions = [spiral.choose(request, a_fleet([40, 0])) for request in misses]
    assert {(d.worker, d.reason) for d in decisions} == {("w0", "miss_smallest_tree")}
    for name in OURS:
        assert place_and_hold(make_policy(name), misses, a_fleet([40, 0]))["w0"] < 60  # of 100


@pytest.mark.parametrize("ours", OURS)
def test_a_session_stays_with_a_saturated_worker(ours: str) -> None:
    """PrimeIntellect-ai/prime-rl#3255 (F-11): consistent hashing pins a hot key, whatever waits there already."""
    hot = [a_request(1, 1600, session="hot") for _ in range(40)]
    assert len(place_and_hold(make_policy("session"), hot, a_fleet([0] * 4))) == 1
    assert max(place_and_hold(make_policy(ours), hot, a_fleet([0] * 4)).values()) < 0.5 * len(hot)


@pytest.mark.parametrize("ours", OURS)
def test_three_routers_each_stay_below_a_threshold_that_the_fleet_is_over(ours: str) -> None:
    """smg-project/smg#1621 (RT05, F-5): each of three routers has 20 in flight at w0, which is at 98 % of its KV."""
    reports = [LoadReport(0.0, running=40, waiting=20, kv_usage_ratio=0.98), LoadReport(0.0, 0, 0, 0.05)]
    request = a_request()

    def one_of_three(policy: CacheAwareV1) -> str:
        first = Fleet(a_fleet([0, 0]).workers[:1], lambda request: {}, 0.0)
        serve(policy, first, request)
        return policy.choose(request, a_fleet([20, 0], report=reports)).reason

    assert one_of_three(CacheAwareV1()) == "cache_hit"
    assert one_of_three(CacheAwareV1(balance_abs_threshold=64 / 3 - 2)) == "imbalanced"
    assert one_of_three(CacheAwareV1(kv_spread_threshold=0.5)) == "kv_pressure"
    assert make_policy(ours).choose(request, a_fleet([20, 0], {"w0": 4}, report=reports)).worker == "w1"


@pytest.mark.parametrize("name", OURS)
def test_a_cold_burst_for_one_prefix_is_not_computed_everywhere(name: str) -> None:
    """F-13: twelve simultaneous requests for a prefix that nobody holds, by the router's own history, 8 workers."""
    policy, view, ledger = make_policy(name), HistoryView(100_000), Ledger()
    for k in range(8):
        ledger.join(f"w{k}")
    for k in range(12):
        request = replace(a_request(1, 4096), id=f"r{k}")
        decision = policy.choose(request, Fleet(ledger.workers, view.depths, 0.0))
        ledger.admit(decision.worker, request.prompt_tokens - decision.hit_blocks * BLOCK, 0.0)
        policy.on_admit(request, decision.worker, 0.0)
        view.routed(request, decision.worker)
    assert sum(worker.in_flight > 0 for worker in ledger.workers) <= 3


async def _stream(out: Out) -> None:
    await out.stream(delta("x"), DONE)


async def _whole(out: Out) -> None:
    await out.json({"choices": [{"message": {"content": "x"}}]})


async def _rejected(out: Out) -> None:
    await out.json({"error": {"message": "no such model"}}, 404)


async def _overloaded(out: Out) -> None:
    await out.json({"error": {"message": "queue full"}}, 503)


async def _breaks_off(out: Out) -> None:
    await out.head()
    await out.chunk(delta("x"))
    out.reset()


@pytest.mark.parametrize("ending", [_stream, _whole, _rejected, _overloaded, reset_at_once, _breaks_off, never_answer])
async def test_load_is_counted_and_given_back_on_every_path(
    engines: list[FakeEngine], start: Start, ending: Behaviour
) -> None:
    """vllm-project/router#179 (F-4): one path never counted its load. With `never_answer` the client leaves."""
    go = asyncio.Event()

    async def behaviour(out: Out) -> None:
        await go.wait()
        await ending(out)

    (engine,) = engines[:1]
    engine.behaviour = behaviour
    client = await start(engines[:1], policy="cache_aware", health={"down_interval_seconds": 0.01})
    asking = asyncio.ensure_future(_ask(client, stream=ending is not _whole))
    await until(lambda: engine.running == 1)
    assert client.in_flight() == {"a": 1}
    assert client.value("prefill_tokens", worker="a") > 0
    go.set()
    if ending is never_answer:
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await client.settled()
    assert client.in_flight() == {"a": 0}
    assert client.value("prefill_tokens", worker="a") == 0


async def test_a_request_that_hangs_shows_by_its_age_and_ends_at_its_deadline(
    engines: list[FakeEngine], start: Start
) -> None:
    """ai-dynamo/dynamo#13088 (RT39): a few of many requests never completed, without error or time-out."""
    engines[0].behaviour = never_answer
    client = await start(engines[:1], timeouts={"first_byte_seconds": 0.2})
    assert client.value("oldest_in_flight_seconds") is None
    declared = {family.name for family in client.router.metrics.registry.collect()}
    assert "prefixwatch_router_oldest_in_flight_seconds" in declared
    asking = asyncio.ensure_future(_ask(client))
    await until(lambda: engines[0].running == 1)
    age = client.value("oldest_in_flight_seconds")
    assert age is not None
    assert 0 < age < 0.2
    assert await asking == 504
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="timed_out") == 1


async def test_the_whole_way_through_the_router_is_timed(engines: list[FakeEngine], start: Start) -> None:
    """llm-d/llm-d-router#1109 (RT36), vllm-project/aibrix#673 (RT37): receiving and tokenising too, of 220 KB.

    The histograms reach from 10 µs to 5 s.
    """
    client = await start(engines[:1], policy="cache_aware")
    assert await _ask(client, "word " * 44_000) == 200
    await client.settled()
    steps = {s: client.value("decision_seconds_sum", step=s) for s in ("tokenize", "hash", "lookup", "choose", "total")}
    total = steps.pop("total")
    assert all(seconds > 0 for seconds in steps.values())
    assert total == pytest.approx(sum(steps.values()))
    assert steps["tokenize"] > steps["lookup"] + steps["choose"]
    assert client.value("receive_seconds_count") == 1
    assert client.value("decision_seconds_bucket", step="total", le="1e-05") == 0
    assert client.value("decision_seconds_bucket", step="total", le="5.0") == 1


async def _ask(client: Any, text: str = "x" * 60, **fields: Any) -> int:
    async with client.chat(text, **fields) as answer:
        await answer.read()
        return int(answer.status)


@pytest.mark.parametrize("name", OURS)
def test_on_two_workers_a_queue_outweighs_even_a_full_hit(name: str) -> None:
    """The price of a queue is capped at n times the patience: below a whole prompt that would not be enough."""
    busy, idle = Worker("busy", in_flight=2000, prefill_tokens=400_000), Worker("idle")
    request = a_request(1, 160)
    fleet = Fleet([busy, idle], lambda _: {"busy": len(request.blocks)}, 0.0)
    assert make_policy(name).choose(request, fleet).worker == "idle"
