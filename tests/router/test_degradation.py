"""The degradation chain in the router: which workers are left, what clients are offered, and what it costs when off."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.degradation.chain import Entry, State, Step
from prefixwatch.router.degradation.config import DegradationConfig
from prefixwatch.router.degradation.policy import DegradingPolicy
from prefixwatch.router.errors import RouterError
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import create_app
from prefixwatch.router.serving.degraded import one_token_body
from tests.router.conftest import Client
from tests.router.fake_engine import FakeEngine, Out, answer_ok, until
from tests.router.fleets import a_fleet, a_request

Start = Any
LEARNED_TOKENS_PER_SECOND = 1000


def degrading(*steps: Step, workers: int = 3, **options: Any) -> DegradingPolicy:
    """A policy that takes these steps, and has learned what a prompt token takes."""
    policy = DegradingPolicy(make_policy("least_load"), DegradationConfig(enabled=True, ttft_seconds=1.0, **options))
    for tokens in range(100, 2000, 100):
        policy.line.add(tokens, tokens / LEARNED_TOKENS_PER_SECOND)
    press(policy, *steps)
    return policy


def press(policy: DegradingPolicy, *steps: Step) -> None:
    policy.own("").state = State(active=tuple(Entry(step, 0.0, 0.0, None) for step in steps))


def test_without_a_step_the_wrapped_policy_sees_the_whole_fleet() -> None:
    policy = degrading()
    decision = policy.choose(a_request(prompt_tokens=800), a_fleet([5, 4, 0]))
    assert (decision.worker, decision.reason) == ("w2", "shortest_queue")


def test_the_warm_pool_takes_the_misses_and_leaves_the_other_workers_to_the_hits() -> None:
    policy = degrading(Step.WARM_POOL)
    miss, hit = a_request(prompt_tokens=800), a_request(prompt_tokens=800)

    assert policy.choose(miss, a_fleet([5, 0, 0])).worker == "w0"
    assert policy.pool == {"w0"}
    assert policy.choose(hit, a_fleet([0, 5, 4], hits={"w1": 40})).worker == "w2"
    assert policy.choose(hit, a_fleet([0, 5, 4], hits={"w0": 40})).worker == "w2", "known in the pool: it moves out"


def test_a_prompt_that_takes_longer_than_the_objective_elsewhere_stays_with_the_pool_that_holds_it() -> None:
    policy = degrading(Step.WARM_POOL)
    policy.choose(a_request(prompt_tokens=800), a_fleet([5, 0, 0]))
    long = a_request(prompt_tokens=1600)
    assert policy.choose(long, a_fleet([5, 0, 0], hits={"w0": 98})).worker == "w0"


def test_the_pool_grows_while_its_backlog_exceeds_the_objective_and_ends_with_the_step() -> None:
    policy = degrading(Step.WARM_POOL, warm_pool_most_ratio=0.6, dwell_seconds=5.0)
    for second in (0.0, 1.5, 3.0, 10.0, 20.0, 30.0):
        request = a_request(prompt_tokens=800)
        chosen = policy.choose(request, a_fleet([0] * 5, now=second))
        policy.on_admit(request, chosen.worker, second)
    assert len(policy.pool) == 3
    assert policy.pool_utilization() == pytest.approx(6 * 0.8 / 3, rel=0.01)

    press(policy)
    policy.tick(40.0)
    assert (policy.pool, policy.pool_utilization()) == (frozenset(), None)


def test_re_sticky_keeps_to_the_workers_that_hold_the_opening_unless_they_are_overloaded() -> None:
    policy = degrading(Step.RE_STICKY)
    request = a_request(prompt_tokens=800, session="new")

    decision = policy.choose(request, a_fleet([2, 1, 1], hits={"w0": 16}))
    assert (decision.worker, decision.reason) == ("w0", "re_sticky:shortest_queue")
    assert policy.choose(request, a_fleet([9, 1, 1], hits={"w0": 16})).worker != "w0"
    assert policy.choose(request, a_fleet([2, 1, 0], hits={"w0": 15})).worker == "w2", "less than the opening"


def test_a_slow_fleet_walks_the_chain_and_a_class_with_its_own_objective_does_not() -> None:
    policy = DegradingPolicy(
        make_policy("least_load"), DegradationConfig(enabled=True, ttft_seconds=0.5, classes={"batch": 60.0})
    )
    for second in range(40):
        for request_class in ("", "batch"):
            request = a_request(prompt_tokens=800, request_class=request_class)
            policy.on_admit(request, policy.choose(request, a_fleet([0, 0], now=second)).worker, second)
            policy.on_first_token(request, "w0", second + 1.5 + 0.01 * second)
    assert policy.own("unheard of").state.name == "async_prefill"
    assert policy.own("batch").state.name == "normal"
    assert policy.own("batch").seconds["normal"] == pytest.approx(39, abs=1)


async def test_the_smaller_model_answers_only_clients_that_accept_it_and_the_answer_says_so(
    engines: list[FakeEngine], start: Start
) -> None:
    engines[0].models, engines[1].models = ["large"], ["small"]
    client = await started(start, engines, smaller_models={"large": "small"})
    press(policy_of(client), Step.SMALLER_MODEL)

    async with client.chat(model="large") as answer:
        assert "Preference-Applied" not in answer.headers
    async with client.chat(model="large", headers={"Prefer": "smaller-model"}) as answer:
        assert answer.headers["Preference-Applied"] == "smaller-model"
    assert [json.loads(engine.bodies[-1])["model"] for engine in engines] == ["large", "small"]
    assert client.value("degradation_state", **{"class": "default", "state": "smaller_model"}) == 1


async def test_a_miss_gets_a_202_its_prompt_is_computed_and_the_request_then_goes_where_it_is(
    engines: list[FakeEngine], start: Start
) -> None:
    async def prefill(out: Out) -> None:
        await out.json({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "length"}]})

    client = await started(start, engines)
    teach(policy_of(client))
    press(policy_of(client), Step.ASYNC_PREFILL)
    long = "a long prompt " * 100
    for engine in engines:
        engine.behaviour = prefill
    async with client.chat(long, headers={"Prefer": "respond-async", "x-tenant-id": "acme"}) as answer:
        accepted = await answer.json()
        assert (answer.status, answer.headers["Location"]) == (202, accepted["poll"])
        assert answer.headers["Preference-Applied"] == "respond-async"
    await until(lambda: client.value("async_prefills_total", outcome="ready") == 1)
    async with client.session.get(client.url + accepted["poll"]) as answer:
        assert (answer.status, (await answer.json())["status"]) == (200, "ready")
    [engine] = [engine for engine in engines if engine.bodies]
    assert json.loads(engine.bodies[0]) | {"messages": None} == {
        "model": "tiny", "stream": False, "messages": None, "max_tokens": 1,
    }  # fmt: skip
    assert client.value("async_prefill_wait_seconds_count") == 1
    assert client.value("requests_total", worker=engine.name, model="other", outcome="completed") is None

    for each in engines:
        each.behaviour = answer_ok
    key = accepted["poll"].rsplit("/", 1)[1]
    headers = {"Prefer": "respond-async", "x-tenant-id": "acme", "x-prefixwatch-prefill": key}
    async with client.chat(long, headers=headers) as answer:
        assert (answer.status, answer.headers["x-prefixwatch-worker"]) == (200, engine.name)


async def test_in_a_split_fleet_a_prompt_is_prepared_where_it_will_be_answered(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, decode = engines
    roles = zip(engines, ("prefill", "decode"), strict=True)
    workers = [{"name": engine.name, "url": engine.url, "role": role} for engine, role in roles]
    split = {"enabled": True, "prefill_from_tokens": 10_000}
    degradation = {"enabled": True, "ttft_seconds": 1.0}
    client: Client = await start(engines, policy="least_load", workers=workers, split=split, degradation=degradation)
    teach(policy_of(client))
    press(policy_of(client), Step.ASYNC_PREFILL)
    for letter in "abc":
        async with client.chat(letter * 1400, headers={"Prefer": "respond-async"}) as answer:
            assert answer.status == 202
    await until(lambda: len(prefill.bodies) + len(decode.bodies) == 3)
    assert prefill.bodies == []


async def test_whoever_does_not_accept_it_or_asks_for_what_is_cached_is_served_at_once(
    engines: list[FakeEngine], start: Start
) -> None:
    client = await started(start, engines)
    teach(policy_of(client))
    press(policy_of(client), Step.ASYNC_PREFILL)
    long = "a long prompt " * 100
    async with client.chat(long) as answer:
        assert answer.status == 200
        await answer.read()
    async with client.chat(long, headers={"Prefer": "respond-async"}) as answer:
        assert answer.status == 200, "a worker holds it now"


async def test_an_unknown_prefill_is_a_404(engines: list[FakeEngine], start: Start) -> None:
    client = await started(start, engines)
    async with client.session.get(f"{client.url}/router/prefills/nothing") as answer:
        assert answer.status == 404


async def test_without_degradation_nothing_of_it_is_there(engines: list[FakeEngine], start: Start) -> None:
    client = await start(engines)
    assert not isinstance(client.router.dispatcher.policy, DegradingPolicy)
    assert client.value("degradation_state", **{"class": "default", "state": "normal"}) is None


def test_degradation_needs_to_know_what_is_cached(tokenizer: Tokenizer) -> None:
    config = RouterConfig.model_validate(
        {
            "workers": [{"name": "a", "url": "http://a"}],
            "cache_view": {"source": "none"},
            "degradation": {"enabled": True},
        }
    )
    with pytest.raises(RouterError, match=r"set model_dir, and cache_view.source to 'events' or 'history'"):
        create_app(config, policy=make_policy("round_robin"), tokenizer=tokenizer)


def test_a_prefill_asks_for_one_token_of_the_same_prompt() -> None:
    body = {"messages": [1], "stream": True, "stream_options": {}, "max_completion_tokens": 9, "n": 2, "tools": []}
    assert json.loads(one_token_body(json.dumps(body).encode())) == {
        "messages": [1], "stream": False, "tools": [], "max_tokens": 1,
    }  # fmt: skip


async def started(start: Start, engines: list[FakeEngine], **degradation: Any) -> Client:
    """A router with a chain that only tests press."""
    options = {"enabled": True, "ttft_seconds": 1.0, **degradation}
    return cast(Client, await start(engines, policy="least_load", degradation=options))


def policy_of(client: Client) -> DegradingPolicy:
    policy = client.router.dispatcher.policy
    assert isinstance(policy, DegradingPolicy)
    return policy


def teach(policy: DegradingPolicy) -> None:
    """A token takes a millisecond."""
    for tokens in range(100, 2000, 100):
        policy.line.add(tokens, tokens / LEARNED_TOKENS_PER_SECOND)
