"""Prefill and decode apart in the live router: who computes a prompt, and what happens when that fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from prefixwatch.router.config import RouterConfig
from tests.router.fake_engine import DONE, FakeEngine, Out, delta, never_answer, reset_at_once, until, usage

Start = Any
LONG, SHORT = "x" * 400, "y" * 40


def split_fleet(engines: list[FakeEngine], **split: Any) -> dict[str, Any]:
    """The first engine computes prompts, the second answers."""
    return {
        "workers": [
            {"name": engine.name, "url": engine.url, "role": role}
            for engine, role in zip(engines, ("prefill", "decode"), strict=True)
        ],
        "split": {"enabled": True, "prefill_from_tokens": 200, **split},
    }


async def answer_one_token(out: Out) -> None:
    await out.json(
        {"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 400, "completion_tokens": 1}}
    )


async def answer_error(out: Out) -> None:
    await out.json({"error": {"message": "out of memory"}}, 500)


async def test_a_long_uncached_prompt_is_computed_at_the_prefill_worker_and_answered_at_the_other(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, decode = engines
    prefill.behaviour = answer_one_token
    client = await start(engines, **split_fleet(engines))
    async with client.chat(LONG) as answer:
        await answer.read()
    assert (answer.status, answer.headers["x-prefixwatch-worker"]) == (200, decode.name)
    assert answer.headers["x-prefixwatch-prefill-side"] == f"remote:{prefill.name}"
    (asked,) = (json.loads(body) for body in prefill.bodies)
    assert (asked["max_tokens"], asked["stream"], len(decode.bodies)) == (1, False, 1)
    assert client.value("split_prefills_total", outcome="remote") == 1
    await client.settled()


async def test_a_short_prompt_and_a_long_one_that_is_cached_stay_with_the_answering_worker(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, decode = engines
    prefill.behaviour = answer_one_token
    client = await start(engines, **split_fleet(engines))
    for text in (SHORT, LONG, LONG):
        async with client.chat(text) as answer:
            await answer.read()
    assert (len(prefill.bodies), len(decode.bodies)) == (1, 3)
    assert client.value("split_prefills_total", outcome="local") == 2


@pytest.mark.parametrize("behaviour", [reset_at_once, answer_error, never_answer])
async def test_after_a_failed_prefill_the_answering_worker_computes_the_prompt_and_it_is_counted(
    engines: list[FakeEngine], start: Start, behaviour: Any
) -> None:
    prefill, decode = engines
    prefill.behaviour = behaviour
    client = await start(engines, **split_fleet(engines, timeout_seconds=0.3))
    async with client.chat(LONG) as answer:
        await answer.read()
    assert (answer.status, answer.headers["x-prefixwatch-prefill-side"]) == (200, f"failed:{prefill.name}")
    assert client.value("split_prefills_total", outcome="failed") == 1
    assert len(decode.bodies) == 1
    await client.settled()


async def test_a_prefill_worker_that_hangs_costs_its_time_out_once_and_not_for_each_prompt(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, decode = engines
    prefill.behaviour = never_answer
    client = await start(engines, **split_fleet(engines, timeout_seconds=0.3))
    sides = []
    for letter in "abc":
        async with client.chat(letter * 400) as answer:
            await answer.read()
            sides.append(answer.headers["x-prefixwatch-prefill-side"])
    assert sides == [f"failed:{prefill.name}", "no_worker", "no_worker"]
    assert (len(prefill.bodies), len(decode.bodies)) == (1, 3)
    assert client.value("worker_up", worker=prefill.name) == 0


async def test_a_prefill_worker_that_hung_gets_prompts_again_when_it_is_well(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, _ = engines
    prefill.script, prefill.behaviour = [never_answer], answer_one_token
    health = {"silent_seconds": 0.01, "down_interval_seconds": 0.01}
    client = await start(engines, health=health, **split_fleet(engines, timeout_seconds=0.3))
    async with client.chat("a" * 400) as answer:
        await answer.read()
    await until(lambda: client.value("worker_up", worker=prefill.name) == 1)
    for letter in "bc":
        async with client.chat(letter * 400) as answer:
            await answer.read()
        assert answer.headers["x-prefixwatch-prefill-side"] == f"remote:{prefill.name}"


async def test_without_a_healthy_prefill_worker_prompts_are_computed_where_they_are_answered(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, _ = engines
    prefill.health = 503
    client = await start(engines, **split_fleet(engines))
    async with client.chat(LONG) as answer:
        await answer.read()
    assert (answer.status, answer.headers["x-prefixwatch-prefill-side"]) == (200, "no_worker")


async def test_without_a_healthy_answering_worker_prefill_workers_do_not_answer(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, decode = engines
    decode.health = 503
    client = await start(engines, **split_fleet(engines))
    async with client.chat(SHORT) as answer:
        assert answer.status == 503
    assert not prefill.bodies


async def test_a_body_that_only_the_engine_may_refuse_reaches_it(engines: list[FakeEngine], start: Start) -> None:
    prefill, decode = engines
    prefill.behaviour = answer_one_token
    client = await start(engines, **split_fleet(engines))
    body = json.dumps({"messages": [{"role": "user", "content": LONG}], "temperature": 0.5})
    body = body.replace("0.5", "1e999")
    async with client.session.post(
        f"{client.url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    ) as answer:
        await answer.read()
    assert (answer.status, [body.encode()]) == (200, decode.bodies)


async def test_the_time_at_the_prefill_worker_is_not_taken_for_the_other_workers_speed(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, decode = engines
    prefill.behaviour = answer_one_token

    async def answer(out: Out) -> None:
        await out.stream(delta("x"), usage(prompt=417, cached=416), DONE)

    decode.behaviour = answer
    client = await start(engines, **split_fleet(engines))
    for number in range(10):
        async with client.chat(str(number) * 400) as response:
            await response.read()
    await client.settled()
    assert {record.miss_prefill_seconds for record in client.router.request_log.page(0).records} == {None}


async def test_what_a_prefill_worker_computed_says_how_fast_it_is_and_not_the_one_that_answers(
    engines: list[FakeEngine], start: Start
) -> None:
    prefill, decode = engines

    async def compute(out: Out) -> None:
        used = {"prompt_tokens": 417, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        await out.json({"choices": [{"message": {"content": "x"}}], "usage": used})

    async def answer(out: Out) -> None:
        await out.head()
        await out.chunk(delta("x"))
        await asyncio.sleep(0.01)
        await out.chunk(delta("y") + usage(prompt=417, cached=400, output=20) + DONE)
        await out.end()

    prefill.behaviour, decode.behaviour = compute, answer
    client = await start(engines, **split_fleet(engines))
    for letter in "abc":
        async with client.chat(letter * 400) as response:
            await response.read()
    await client.settled()
    samples = {worker.name: worker.rates.samples for worker in client.router.ledger.workers}
    assert samples == {prefill.name: (3, 0), decode.name: (0, 3)}


async def test_sessions_never_move_to_a_prefill_worker(engines: list[FakeEngine], start: Start) -> None:
    workers = [
        {"name": "p", "url": engines[0].url, "role": "prefill"},
        {"name": "d1", "url": engines[1].url, "role": "decode"},
        {"name": "d2", "url": engines[1].url, "role": "decode"},
    ]
    client = await start(engines, policy="session", workers=workers, split={"enabled": True}, moves={"enabled": True})
    asked = {}
    for number in range(8):
        async with client.chat(SHORT, headers={"x-session-id": f"s{number}"}) as answer:
            await answer.read()
            asked[f"s{number}"] = answer.headers["x-prefixwatch-worker"]
    assert set(asked.values()) == {"d1", "d2"}
    async with client.session.post(f"{client.url}/router/workers/d1/drain") as drained:
        moves = (await drained.json())["moves"]
    assert moves["sessions"] == list(asked.values()).count("d1")
    for name, worker in asked.items():
        async with client.chat(SHORT, headers={"x-session-id": name}) as answer:
            await answer.read()
            assert answer.headers["x-prefixwatch-worker"] == "d2"
            assert ("x-prefixwatch-move" in answer.headers) is (worker == "d1")


@pytest.mark.parametrize("roles", [("prefill", "prefill"), ("", "decode")])
def test_a_split_without_both_sides_is_refused(roles: tuple[str, str]) -> None:
    workers = [{"name": f"w{k}", "url": "http://127.0.0.1:1", "role": role} for k, role in enumerate(roles)]
    with pytest.raises(ValidationError, match="split needs workers with the role 'prefill', and others"):
        RouterConfig.model_validate({"workers": workers, "split": {"enabled": True}})
