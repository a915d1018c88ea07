"""What a decision tells of itself: scores, predicted times, and what became of the predicted hit tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prefixwatch.router.exchange.explain import scores_json, shown_scores
from prefixwatch.router.placement.cache_view import HistoryView
from prefixwatch.router.placement.dispatch import CacheLosses, Dispatcher
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Decision, LoadReport
from tests.router.fake_engine import DONE, FakeEngine, Out, answer_ok, delta, never_answer, until, usage
from tests.router.fleets import a_fleet, a_request

Start = Any  # a coroutine function, see conftest.start
ASKED = {"x-prefixwatch-explain": "1"}


def test_the_chosen_worker_and_its_seven_closest_rivals_are_shown() -> None:
    decision = Decision("w5", "r", scores={f"w{k}": k**2 / 3 for k in range(64)})
    assert list(shown_scores(decision)) == ["w5", "w4", "w6", "w3", "w2", "w7", "w1", "w0"]
    assert scores_json(decision).startswith('{"w5":8.33333,"w4":5.33333,"w6":12.0,')


def test_a_branch_that_scores_nobody_shows_nothing() -> None:
    assert scores_json(Decision("w0", "next_in_turn")) == ""


def test_scores_without_the_chosen_worker_are_shown_as_they_come() -> None:
    assert shown_scores(Decision("w9", "r", scores={"w0": 1.0, "w1": 2.0})) == {"w0": 1.0, "w1": 2.0}


@pytest.mark.parametrize(
    ("name", "options", "queue_seconds", "prefill_seconds"),
    [
        ("score", {"prefill_tokens_per_second": 1000, "decode_ms_per_request": 10}, 0.17, 0.08),
        ("flexlb_formula", {"batcher": "none"}, 0.0, 0.104),  # 160 − 0.7 · 80 ms
        ("mooncake", {"transfer_tokens_per_second": None}, 0.0, 0.02),  # 10 ms + 80 · 0.125 ms
        ("dynamo_kv", {"prefill_tokens_per_second": 1000}, 0.0, 0.08),
        ("oracle", {}, 2.0, 0.08),
        ("least_load", {}, 0.5, None),
        ("dynamo_kv", {}, None, None),
        ("round_robin", {}, None, None),
    ],
)
def test_policies_that_reckon_in_time_say_what_they_expect(
    name: str, options: dict[str, Any], queue_seconds: float | None, prefill_seconds: float | None
) -> None:
    report = LoadReport(0.0, waiting_uncached_tokens=1000, kv_usage_ratio=0.5)
    fleet = a_fleet([2], {"w0": 5}, prefill_tokens=[150], backlog_seconds=[2.0], report=[report])
    decision = make_policy(name, options=options).choose(a_request(prompt_tokens=160), fleet)
    assert decision.predicted_queue_seconds == (None if queue_seconds is None else pytest.approx(queue_seconds))
    assert decision.predicted_prefill_seconds == (None if prefill_seconds is None else pytest.approx(prefill_seconds))


def test_preble_predicts_the_prefill_of_what_the_worker_lacks() -> None:
    policy, fleet = make_policy("preble"), a_fleet([0])
    cold = policy.choose(a_request(1, 1600), fleet).predicted_prefill_seconds
    policy.on_admit(a_request(1, 1600), "w0", 0.0)
    warm = policy.choose(a_request(1, 1616), fleet).predicted_prefill_seconds
    assert cold is not None
    assert warm is not None
    assert warm < cold / 3


async def test_scores_come_when_asked_for_and_not_otherwise(engines: list[FakeEngine], start: Start) -> None:
    client = await start(engines, policy="score")
    async with client.chat("x" * 60) as answer:
        assert not {name for name in answer.headers if name.lower().startswith("x-prefixwatch-scores")}
        await answer.read()
    async with client.chat("x" * 60, headers=ASKED) as answer:
        scores = json.loads(answer.headers["x-prefixwatch-scores"])
        assert set(scores) == {"a", "b"}
        assert scores[answer.headers["x-prefixwatch-worker"]] == max(scores.values())
        assert float(answer.headers["x-prefixwatch-predicted-queue-s"]) == 0
        assert float(answer.headers["x-prefixwatch-predicted-prefill-s"]) == pytest.approx((77 - 64) / 8000)
        await answer.read()
    await client.settled()
    assert client.value("predicted_queue_seconds_count") == client.value("predicted_prefill_seconds_count") == 2
    assert client.value("predicted_prefill_seconds_sum") == pytest.approx((77 + 77 - 64) / 8000)
    assert not any("x-prefixwatch-explain" in headers for engine in engines for headers in engine.headers)


async def test_what_became_of_predictions_is_counted_by_cause(engines: list[FakeEngine], start: Start) -> None:
    """Two at once with one opening: the router credits the second with what the first is still computing."""
    go = asyncio.Event()

    async def wait(out: Out) -> None:
        await go.wait()
        await out.stream(delta("x"), usage(prompt=77, cached=0), DONE)

    (engine,) = engines[:1]
    engine.behaviour = wait
    client = await start(engines[:1], policy="cache_aware")
    asking = [asyncio.ensure_future(_ask(client)) for _ in range(2)]
    await until(lambda: engine.running == 2)
    go.set()
    await asyncio.gather(*asking)
    engine.behaviour = answer_ok  # reports no usage
    await _ask(client)
    await client.settled()

    def counted(cause: str) -> tuple[float | None, ...]:
        tokens = [
            client.value("prediction_tokens_total", cause=cause, kind=kind) for kind in ("predicted", "delivered")
        ]
        return client.value("predictions_total", cause=cause), *tokens

    assert counted("exact") == (1, 0, 0)
    assert counted("concurrent_miss") == (1, 64, 0)
    assert counted("not_reported") == (1, None, None)


async def test_a_request_without_an_answer_has_no_cause(engines: list[FakeEngine], start: Start) -> None:
    engines[0].behaviour = never_answer
    client = await start(engines[:1], policy="cache_aware", timeouts={"first_byte_seconds": 0.05})
    await _ask(client)
    await client.settled()
    assert "prefixwatch_router_predictions_total{" not in (await _metrics(client))


@pytest.mark.parametrize(
    ("lost", "cause"),
    [
        (CacheLosses(), "over_credited"),
        (CacheLosses(removed_blocks=9), "evicted_since"),
        (CacheLosses(1, 9), "cleared"),
    ],
)
def test_what_the_engine_dropped_between_decision_and_first_token_explains_a_miss(
    lost: CacheLosses, cause: str
) -> None:
    ledger, losses = Ledger(), CacheLosses()
    ledger.join("w0")
    dispatcher = Dispatcher(
        make_policy("cache_aware"), ledger, HistoryView(100), lambda name: True, losses=lambda name: losses
    )
    first = dispatcher.place(a_request())
    dispatcher.first_token(first)
    dispatcher.end(first)
    again = dispatcher.place(a_request())
    losses = lost
    dispatcher.first_token(again)
    losses = CacheLosses(2, 99)  # later losses don't count
    assert dispatcher.prediction_cause(again, 0) == cause
    assert dispatcher.prediction_cause(again, 144) == "exact"


def test_only_requests_without_a_first_token_count_as_computing() -> None:
    ledger = Ledger()
    ledger.join("w0")
    dispatcher = Dispatcher(make_policy("cache_aware"), ledger, HistoryView(100), lambda name: True)
    computing, failed, done = (dispatcher.place(a_request(1 + 1000 * k)) for k in range(3))
    dispatcher.end(failed)
    dispatcher.first_token(done)
    assert list(dispatcher.place(a_request()).computing) == [computing.request]


async def _ask(client: Any) -> None:
    async with client.chat("x" * 60) as answer:
        await answer.read()


async def _metrics(client: Any) -> str:
    async with client.session.get(f"{client.url}/metrics") as answer:
        return str(await answer.text())
