"""What happens when an engine dies, falls silent or is overloaded, and when a client leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.router.fake_engine import (
    DONE,
    FakeEngine,
    Out,
    delta,
    events,
    never_answer,
    read_for_ever,
    reset_at_once,
    until,
)

Engines = list[FakeEngine]
Start = Any  # a coroutine function, see conftest.start


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(engines: Engines, start: Start, phase: str, stream: bool) -> None:
    async def behaviour(out: Out) -> None:
        if phase == "decode":
            await out.head(content_type="text/event-stream" if stream else "application/json")
            await out.chunk(delta("x"))
        await never_answer(out)

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    asking = asyncio.ensure_future(read_for_ever(client))
    await until(lambda: engines[0].running == 1)
    asking.cancel()
    async with asyncio.timeout(60):
        await engines[0].abandoned.acquire()
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="disconnected") == 1


async def test_a_client_that_leaves_on_done_has_its_answer(engines: Engines, start: Start) -> None:
    async def behaviour(out: Out) -> None:
        await out.head()
        await out.chunk(delta("x") + DONE)
        await never_answer(out)

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with client.chat() as answer:
        await answer.content.readany()
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 1


async def test_an_engine_that_dies_before_its_first_byte_costs_one_retry(engines: Engines, start: Start) -> None:
    engines[0].script = [reset_at_once]
    client = await start(engines)
    async with client.chat() as answer:
        assert events(await answer.read())[-1] == "[DONE]"
        assert answer.headers["x-prefixwatch-worker"] == "b"
        assert answer.headers["x-prefixwatch-retries"] == "1"
    await client.settled()
    assert client.value("retries_total", reason="reset") == 1
    assert client.value("requests_total", worker="b", model="tiny", outcome="completed") == 1


async def test_when_both_engines_fail_the_client_is_told(engines: Engines, start: Start) -> None:
    for engine in engines:
        engine.behaviour = reset_at_once
    client = await start(engines)
    async with client.chat() as answer:
        assert answer.status == 502
        assert (await answer.json())["error"]["type"] == "router_failed"
    assert [len(engine.bodies) for engine in engines] == [1, 1]
    assert client.in_flight() == {"a": 0, "b": 0}


async def test_a_killed_engine_leaves_the_candidates_with_the_first_refusal(engines: Engines, start: Start) -> None:
    """ai-dynamo/dynamo#11646 (RT19): of 20 requests none fails, and at most one is sent there."""
    client = await start(engines, health={"interval_seconds": 60})
    await engines[0].stop()
    for _ in range(20):
        async with client.chat() as answer:
            assert events(await answer.read())[-1] == "[DONE]"
    assert client.value("retries_total", reason="refused") == 1
    assert client.value("worker_up", worker="a") == 0
    async with client.session.get(f"{client.url}/health") as answer:
        standing = {worker["name"]: worker["healthy"] for worker in (await answer.json())["workers"]}
        assert (answer.status, standing) == (200, {"a": False, "b": True})
    await engines[0].start()


async def test_an_engine_that_comes_back_is_used_again(engines: Engines, start: Start) -> None:
    engines[0].script = [reset_at_once]
    client = await start(engines, health={"interval_seconds": 60, "down_interval_seconds": 0.01})
    async with client.chat() as answer:
        await answer.read()
    await until(lambda: client.value("worker_up", worker="a") == 1)


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(engines: Engines, start: Start) -> None:
    async def behaviour(out: Out) -> None:
        await out.head()
        await out.chunk(delta("one") + b'data: {"choi')
        await asyncio.sleep(0.05)
        out.reset()

    engines[0].behaviour = behaviour
    client = await start(engines)
    async with client.chat() as answer:
        body = await answer.read()
    assert body.startswith(delta("one") + b'data: {"choi\n\ndata: {"error":')
    error = json.loads(body.rsplit(b"data: ", 1)[1])["error"]
    assert (error["type"], error["code"]) == ("router_failed", 502)
    assert engines[1].bodies == []
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="failed") == 1


async def test_a_stream_that_ends_without_done_is_an_error(engines: Engines, start: Start) -> None:
    async def behaviour(out: Out) -> None:
        await out.stream(delta("one"))

    engines[0].behaviour = behaviour
    client = await start(engines)
    async with client.chat() as answer:
        assert events(await answer.read())[-1]["error"]["message"] == "the engine's stream ended without [DONE]"


async def test_a_stream_that_falls_silent_times_out(engines: Engines, start: Start) -> None:
    """As vLLM's does at SIGTERM: no token, no error, no end."""

    async def behaviour(out: Out) -> None:
        await out.head()
        await out.chunk(delta("one"))
        await never_answer(out)

    engines[0].behaviour = behaviour
    client = await start(engines, timeouts={"inter_token_seconds": 0.1})
    async with client.chat() as answer:
        assert events(await answer.read())[-1]["error"]["type"] == "router_timed_out"
    async with asyncio.timeout(60):
        await engines[0].abandoned.acquire()


async def test_a_client_that_stops_reading_is_let_go_and_not_blamed_on_the_engine(
    engines: Engines, start: Start
) -> None:
    async def behaviour(out: Out) -> None:
        await out.head()
        while True:
            await out.chunk(delta("x" * 100_000))

    engines[0].behaviour = behaviour
    client = await start(engines[:1], timeouts={"inter_token_seconds": 0.2})
    async with asyncio.timeout(60), client.chat() as answer:
        await until(lambda: client.in_flight() == {"a": 0})
        answer.close()
    assert client.value("requests_total", worker="a", model="tiny", outcome="disconnected") == 1


async def test_a_worker_that_is_silent_costs_one_retry_and_leaves_the_rotation(engines: Engines, start: Start) -> None:
    """Its /health goes on answering 200."""
    engines[0].behaviour = never_answer
    client = await start(engines, timeouts={"first_byte_seconds": 0.3})
    for _ in range(4):
        async with client.chat() as answer:
            assert answer.status == 200
            await answer.read()
    assert (len(engines[0].bodies), len(engines[1].bodies)) == (1, 4)
    assert client.value("retries_total", reason="slow") == 1
    assert client.value("worker_up", worker="a") == 0
    assert client.value("worker_flaps_total", worker="a") == 1


async def test_no_first_byte_from_anybody_is_a_504(engines: Engines, start: Start) -> None:
    for engine in engines:
        engine.behaviour = never_answer
    client = await start(engines, timeouts={"first_byte_seconds": 0.1})
    async with client.chat() as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["type"]) == (504, "router_timed_out")
        assert error["message"] == "engine a did not respond in time; then engine b did not respond in time"
    await client.settled()


async def test_a_whole_answer_has_its_own_patience_and_no_second_try(engines: Engines, start: Start) -> None:
    engines[0].behaviour = never_answer
    client = await start(engines, timeouts={"first_byte_seconds": 0.01, "answer_seconds": 0.3})
    async with client.chat(stream=False) as answer:
        assert answer.status == 504
    assert engines[1].bodies == []


@pytest.mark.parametrize("status", [429, 503])
async def test_overload_is_relayed_and_not_retried(engines: Engines, start: Start, status: int) -> None:
    async def behaviour(out: Out) -> None:
        await out.json({"error": {"message": "queue full", "code": status}}, status)

    engines[0].behaviour = behaviour
    client = await start(engines)
    async with client.chat() as answer:
        assert (answer.status, (await answer.json())["error"]["message"]) == (status, "queue full")
    assert engines[1].bodies == []
    assert client.value("requests_total", worker="a", model="tiny", outcome="refused") == 1


async def test_overload_inside_a_200_is_relayed(engines: Engines, start: Start) -> None:
    error = b'data: {"error":{"message":"queue full","code":503}}\n\n'

    async def behaviour(out: Out) -> None:
        await out.stream(error, DONE)

    engines[0].behaviour = behaviour
    client = await start(engines)
    async with client.chat() as answer:
        assert (answer.status, await answer.read()) == (200, error + DONE)
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="refused") == 1


@pytest.mark.parametrize("in_stream", [True, False])
async def test_a_dying_engines_error_is_retried_elsewhere(engines: Engines, start: Start, in_stream: bool) -> None:
    """An error before any content, while /health already says 503."""

    async def behaviour(out: Out) -> None:
        error = {"error": {"message": "EngineCore died", "code": 500}}
        if in_stream:
            await out.stream(f"data: {json.dumps(error)}\n\n".encode(), DONE)
        else:
            await out.json(error, 503)

    engines[0].behaviour = behaviour
    client = await start(engines)
    engines[0].health = 503
    async with client.chat() as answer:
        assert answer.headers["x-prefixwatch-worker"] == "b"
        assert events(await answer.read())[-1] == "[DONE]"
    assert client.value("retries_total", reason="unhealthy") == 1
