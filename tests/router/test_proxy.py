"""Requests through the router: bytes pass unchanged, each is placed, explained and accounted for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prefixwatch.router.policies import make_policy
from tests.router.fake_engine import (
    DONE,
    ROLE,
    FakeEngine,
    Out,
    answer_ok,
    delta,
    never_answer,
    read_for_ever,
    reset_at_once,
    until,
    usage,
)

Engines = list[FakeEngine]
Start = Any  # a coroutine function, see conftest.start


async def test_a_stream_passes_unchanged_and_explains_itself(engines: Engines, start: Start) -> None:
    async def behaviour(out: Out) -> None:
        await out.stream(ROLE, delta("hello"), usage(prompt=40, cached=16), DONE)

    engines[0].behaviour = behaviour
    client = await start(engines[:1], policy="cache_aware")
    async with client.chat("x" * 60) as answer:
        assert await answer.read() == ROLE + delta("hello") + usage(40, 16) + DONE
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["x-prefixwatch-worker"] == "a"
        assert answer.headers["x-prefixwatch-policy"] == "cache_aware"
        assert answer.headers["x-prefixwatch-reason"] == "miss_least_load"
        assert answer.headers["x-prefixwatch-predicted-tokens"] == "0"
        assert answer.headers["x-prefixwatch-retries"] == "0"
        assert 0 < float(answer.headers["x-prefixwatch-decision-us"]) < 1e6
    async with client.chat("x" * 60) as answer:  # <user> + 60 + <assistant> = 77 tokens: 4 full blocks
        assert answer.headers["x-prefixwatch-predicted-tokens"] == "64"
        await answer.read()
    await client.settled()
    assert client.value("delivered_hit_tokens_total", worker="a") == 32
    assert client.value("predicted_hit_tokens_total", worker="a") == 64
    assert client.value("ttft_seconds_count", cache="partial") == 2


async def test_an_answer_that_is_not_streamed(engines: Engines, start: Start) -> None:
    body = {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}

    async def behaviour(out: Out) -> None:
        await out.json(body)

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with client.chat(stream=False) as answer:
        assert (answer.status, await answer.json()) == (200, body)
    assert client.in_flight() == {"a": 0}
    assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 1


async def test_token_id_prompts_are_used_as_they_are(engines: Engines, start: Start) -> None:
    """Not keyed by their length: vllm-project/router#237 (RT09)."""
    client = await start(engines[:1], policy="cache_aware")
    predicted = []
    for first in (1, 1, 2):
        body = {"model": "tiny", "prompt": [first] * 40, "stream": True}
        async with client.session.post(f"{client.url}/v1/completions", json=body) as answer:
            predicted.append(answer.headers["x-prefixwatch-predicted-tokens"])
            await answer.read()
    assert predicted == ["0", "32", "0"]


async def test_each_event_is_passed_on_at_once(engines: Engines, start: Start) -> None:
    """No buffering: dstackai/dstack#4269 (RT31)."""
    taken = asyncio.Semaphore(0)

    async def behaviour(out: Out) -> None:
        await out.head()
        for number in range(20):
            await out.chunk(delta(str(number)))
            await taken.acquire()  # the next is written only once this one has arrived
        await out.chunk(DONE)
        await out.end()

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with asyncio.timeout(60), client.chat() as answer:
        for number in range(20):
            assert await answer.content.readany() == delta(str(number))
            taken.release()


async def test_characters_split_between_two_reads_survive(engines: Engines, start: Start) -> None:
    """api7/aisix#111 (RT32)"""
    event = 'data: {"choices":[{"index":0,"delta":{"content":"中文"}}]}\n\n'.encode()
    taken = asyncio.Semaphore(0)

    async def behaviour(out: Out) -> None:
        await out.head()
        for position in range(len(event)):
            await out.chunk(event[position : position + 1])
            await taken.acquire()
        await out.chunk(DONE)
        await out.end()

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    received = b""
    async with asyncio.timeout(60), client.chat() as answer:
        while len(received) < len(event):
            received += await answer.content.readany()
            taken.release()
        assert received == event
        assert await answer.read() == DONE
    await client.settled()
    assert client.value("ttft_seconds_count", cache="unknown") == 1


async def test_ttft_is_the_first_content_and_not_the_last_chunk(engines: Engines, start: Start) -> None:
    """vllm-project/aibrix#2477 (RT38)"""

    seen = asyncio.Event()

    async def behaviour(out: Out) -> None:
        await out.head()
        await out.chunk(ROLE + delta("first"))
        await seen.wait()
        await asyncio.sleep(0.3)
        await out.chunk(delta("last") + DONE)
        await out.end()

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with client.chat() as answer:
        await answer.content.readuntil(b"first")
        seen.set()
        await answer.read()
    await client.settled()
    assert client.value("e2e_seconds_sum") - client.value("ttft_seconds_sum", cache="unknown") >= 0.3


async def test_after_a_storm_of_aborts_every_gauge_is_back_at_zero(engines: Engines, start: Start) -> None:
    """40 answered, 20 reset before headers, 20 left in prefill, 20 left in decode: vllm-project/router#215 (RT22)."""

    async def in_decode(out: Out) -> None:
        await out.head()
        await out.chunk(delta("x"))
        await never_answer(out)

    async def ask(behaviour: Any, client: Any) -> None:
        async with client.chat() as answer:
            await (answer.content.readany() if behaviour is in_decode else answer.read())

    client = await start(engines[:1], health={"down_interval_seconds": 0.01})
    (engine,) = engines[:1]
    for behaviour, count in ((never_answer, 20), (in_decode, 20), (answer_ok, 40), (reset_at_once, 20)):
        engine.behaviour = behaviour
        asking = [asyncio.ensure_future(ask(behaviour, client)) for _ in range(count)]
        if behaviour is never_answer:
            await until(lambda: engine.running == 20)
            for task in asking:
                task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    await client.settled()
    assert client.in_flight() == {"a": 0}
    assert client.value("prefill_tokens", worker="a") == 0
    assert client.value("client_disconnects_total", phase="prefill") == 20
    assert client.value("client_disconnects_total", phase="decode") == 20
    assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 40


async def test_concurrent_cold_requests_split_evenly(engines: Engines, start: Start) -> None:
    """Counted before dispatch, so that 8 at once split 4/4: sgl-project/sglang#15473 (RT03)."""
    client = await start(engines, policy="least_load")
    for engine in engines:
        engine.behaviour = never_answer
    asking = [asyncio.ensure_future(read_for_ever(client)) for _ in range(8)]
    await until(lambda: sum(engine.running for engine in engines) == 8)
    assert client.in_flight() == {"a": 4, "b": 4}
    for task in asking:
        task.cancel()


async def test_150_streams_run_at_once(engines: Engines, start: Start) -> None:
    """No pool of 100 connections: vllm-project/production-stack#767 (RT26)."""
    everyone = asyncio.Event()

    async def behaviour(out: Out) -> None:
        await out.head()
        await out.chunk(delta("x"))
        await everyone.wait()
        await out.chunk(DONE)
        await out.end()

    for engine in engines:
        engine.behaviour = behaviour
    client = await start(engines)
    asking = [asyncio.ensure_future(read_for_ever(client)) for _ in range(150)]
    await until(lambda: sum(engine.running for engine in engines) == 150)
    assert client.in_flight() == {"a": 75, "b": 75}
    everyone.set()
    await asyncio.gather(*asking)
    await client.settled()


@pytest.mark.parametrize("megabytes", [1.5, 20])
async def test_large_bodies_pass(engines: Engines, start: Start, megabytes: float) -> None:
    """sgl-project/sglang#6622 (RT30)"""
    client = await start(engines[:1])
    async with client.chat("x" * int(megabytes * 2**20)) as answer:
        assert answer.status == 200
        await answer.read()
    assert len(engines[0].bodies[0]) > megabytes * 2**20


async def test_a_body_over_the_limit_is_counted_as_such(engines: Engines, start: Start) -> None:
    """sgl-project/sglang#6622 (RT30)"""
    client = await start(engines[:1], max_body_bytes=1000)
    async with client.chat("x" * 2000) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (413, 413)
    assert client.value("refusals_total", reason="too_large") == 1
    assert engines[0].bodies == []


async def test_a_long_prompt_does_not_hold_up_the_others(engines: Engines, start: Start) -> None:
    """vllm-project/production-stack#1016: tokenising 32k tokens takes tens of ms, /health goes on answering."""
    client = await start(engines[:1], policy="cache_aware")
    slowest = 0.0
    loop = asyncio.get_running_loop()
    asking = [asyncio.ensure_future(_ask(client, f"{number} " + "word " * 30_000)) for number in range(4)]
    while not all(task.done() for task in asking):
        begun = loop.time()
        async with client.session.get(f"{client.url}/health") as answer:
            await answer.read()
        slowest = max(slowest, loop.time() - begun)
    total = client.value("decision_seconds_sum", step="tokenize")
    assert total is not None
    assert slowest < total / 4


async def _ask(client: Any, text: str) -> None:
    async with client.chat(text) as answer:
        await answer.read()


async def test_models_of_healthy_engines_are_merged(engines: Engines, start: Start) -> None:
    """vllm-project/router#135 (RT27)"""
    engines[0].models, engines[1].models = ["tiny", "only-a"], ["tiny", "only-b"]
    dead = FakeEngine("dead")
    await dead.start()
    await dead.stop()
    client = await start([dead, *engines])
    async with client.session.get(f"{client.url}/v1/models") as answer:
        assert answer.status == 200
        assert [model["id"] for model in (await answer.json())["data"]] == ["tiny", "only-a", "only-b"]


async def test_without_a_healthy_engine_the_router_says_so(engines: Engines, start: Start) -> None:
    for engine in engines:
        engine.health = 503
    client = await start(engines)
    async with client.session.get(f"{client.url}/health") as answer:
        assert (answer.status, (await answer.json())["status"]) == (503, "no healthy worker")
    async with client.chat() as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (503, "router_refused")
    assert client.value("refusals_total", reason="no_workers") == 1


async def test_what_is_not_json_is_a_400(engines: Engines, start: Start) -> None:
    client = await start(engines[:1])
    async with client.session.post(f"{client.url}/v1/chat/completions", data=b"{") as answer:
        assert answer.status == 400
    assert client.value("refusals_total", reason="not_json") == 1


async def test_names_that_only_clients_use_make_no_series(engines: Engines, start: Start) -> None:
    """ai-dynamo/dynamo#9836 (EM33)"""
    client = await start(engines[:1], models=["tiny"])
    for number in range(30):
        async with client.chat(model=f"nope-{number}") as answer:
            await answer.read()
    async with client.session.get(f"{client.url}/metrics") as answer:
        text = await answer.text()
    assert "nope" not in text
    assert client.value("requests_total", worker="none", model="other", outcome="rejected") == 30


async def test_a_tenants_salt_comes_from_the_router(engines: Engines, start: Start) -> None:
    """A caller who sends another tenant's salt doesn't get it: vllm-project/vllm#53347 (IS02)."""
    client = await start(engines[:1], policy="cache_aware", tenants={"salts": {"alice": "salt-a", "bob": "salt-b"}})
    predicted = []
    for tenant, claimed in (("alice", None), ("bob", "salt-a"), ("", "salt-a"), ("alice", "salt-b")):
        fields = {} if claimed is None else {"cache_salt": claimed}
        async with client.chat("x" * 60, headers={"x-tenant-id": tenant}, **fields) as answer:
            predicted.append(answer.headers["x-prefixwatch-predicted-tokens"])
            await answer.read()
    sent = [json.loads(body)["cache_salt"] for body in engines[0].bodies]
    assert sent == ["salt-a", "salt-b", "client:salt-a", "salt-a"]
    assert predicted == ["0", "0", "0", "64"]


async def test_a_body_that_needs_no_salt_is_not_rewritten(engines: Engines, start: Start) -> None:
    client = await start(engines[:1])
    body = b'{ "model":"tiny" , "stream":true, "cache_salt":"mine", "messages":[], "seed":12345678901234567890 }'
    async with client.session.post(f"{client.url}/v1/chat/completions?x=1", data=body) as answer:
        await answer.read()
    assert engines[0].bodies == [body]


async def test_a_policy_that_does_not_look_is_not_tokenised_for(engines: Engines, start: Start) -> None:
    client = await start(engines[:1], policy=make_policy("round_robin"))
    async with client.chat() as answer:
        assert "x-prefixwatch-predicted-tokens" not in answer.headers
        await answer.read()
    assert client.value("decision_seconds_count", step="tokenize") == 0
    client = await start(engines[:1], policy=make_policy("round_robin"), always_predict=True)
    async with client.chat() as answer:
        assert answer.headers["x-prefixwatch-predicted-tokens"] == "0"
        await answer.read()


async def test_headers_reach_the_engine_but_not_those_of_one_hop(engines: Engines, start: Start) -> None:
    client = await start(engines[:1])
    headers = {"Authorization": "Bearer key", "traceparent": "00-1-2-01", "Accept-Encoding": "gzip"}
    headers |= {"Connection": "keep-alive, X-Hop ,x-other", "X-Hop": "1", "X-Other": "1"}  # RFC 9110, 7.6.1
    async with client.chat(headers=headers) as answer:
        await answer.read()
    (seen,) = engines[0].headers
    assert (seen["authorization"], seen["traceparent"]) == ("Bearer key", "00-1-2-01")
    assert seen["accept-encoding"] == "identity"
    assert not seen.keys() & {"x-hop", "x-other"}
