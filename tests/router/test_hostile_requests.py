"""What clients and engines may send to do harm (security review): refused or bounded, and never at others' expense."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.errors import BadRequest
from prefixwatch.router.exchange.endpoints import CHAT, COMPLETIONS
from prefixwatch.router.exchange.prompt import PromptLimits, PromptReader
from prefixwatch.router.placement.cache_view import HistoryView
from prefixwatch.router.placement.dispatch import Dispatcher
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.placement.load import load_report
from prefixwatch.router.policies import POLICIES, make_policy
from prefixwatch.router.policy import LoadReport, RouteRequest
from prefixwatch.router.tenant_config import TenantsConfig
from tests.router.fake_engine import DONE, FakeEngine, Out, delta, never_answer, until, usage

Engines = list[FakeEngine]
Start = Any  # a coroutine function, see conftest.start
LIVE_POLICIES = [name for name, policy in POLICIES.items() if not policy.needs.truth]

hostile = st.one_of(
    st.integers(), st.sampled_from([0, -1, 10**18, 10**100, 10**400, -(10**400)]),
    st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 1e308]),
)  # fmt: skip


@pytest.mark.parametrize("name", LIVE_POLICIES)
@given(limits=st.lists(st.integers() | st.sampled_from([10**18, 10**400]), min_size=1, max_size=4), figures=st.data())
@settings(max_examples=20)
def test_no_figure_of_clients_or_engines_spoils_a_policy(name: str, limits: list[int], figures: st.DataObject) -> None:
    """H3, H5: one request with max_tokens 10^400 made policy preble refuse everything; one NaN several others."""
    ledger = Ledger()
    for worker in "abc":
        ledger.join(worker)
    dispatcher = Dispatcher(make_policy(name), ledger, HistoryView(1000), lambda worker: True)
    reported = ledger.worker("a")
    assert reported is not None
    tokens = as_tokens(range(200))
    for limit in [*limits, 5, 5]:
        drawn: list[Any] = figures.draw(st.lists(hostile, min_size=6, max_size=6))
        reported.report = LoadReport(1e9, *drawn)
        request = RouteRequest(
            "r", 200, tokens, block_hashes(tokens, 16), 16, max_output_tokens=limit, tenant="t", text="x" * 1000
        )
        placement = dispatcher.place(request)
        dispatcher.first_token(placement)
        dispatcher.end(placement)
    assert not any(ledger.in_flight().values())


@pytest.mark.parametrize("name", LIVE_POLICIES)
@pytest.mark.parametrize("where", ["on_admit", "routed"])
def test_a_fault_while_placing_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    ledger, view = Ledger(), HistoryView(1000)
    ledger.join("a")
    policy = make_policy(name)
    dispatcher = Dispatcher(policy, ledger, view, lambda worker: True)
    tokens = as_tokens(range(64))
    request = RouteRequest("r", 64, tokens, block_hashes(tokens, 16), 16, text="hello")

    def broken(*_: Any) -> None:
        raise OverflowError

    with monkeypatch.context() as patch:
        patch.setattr(policy if where == "on_admit" else view, where, broken)
        with pytest.raises(OverflowError):
            dispatcher.place(request)
    assert ledger.in_flight() == {"a": 0}
    assert ledger.oldest_seconds(1e9) is None
    dispatcher.end(dispatcher.place(request))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "abc", "1e308", "-1", "1e400", "9" * 400])
@pytest.mark.parametrize("family", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])
def test_a_load_that_cannot_be_true_is_unknown(family: str, value: str) -> None:
    """H5: it ended the polling of that worker for good."""
    families = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    page = "".join(f'vllm:{name}{{engine="0"}} {value if name == family else "0.5"}\n' for name in families)
    page += f"sglang:max_total_num_tokens {value}\n"
    report = load_report(page.encode(), 1.0)
    figures = {"num_requests_running": report.running, "num_requests_waiting": report.waiting,
               "kv_cache_usage_perc": report.kv_usage_ratio}  # fmt: skip
    assert figures.pop(family) is None
    assert None not in figures.values()
    assert report.kv_capacity_tokens is None


def reader(tokenizer: Tokenizer, **limits: int) -> PromptReader:
    return PromptReader(tokenizer, block_size=16, tenants=TenantsConfig(), limits=PromptLimits(**limits))


def read(prompts: PromptReader, body: Any, path: str = CHAT) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return prompts.read(path, data, "", tokens=True, blocks=True, text=True)


@pytest.mark.parametrize("depth", [1, 2, 5, 14, 31, 63, 64, 65, 200])
def test_nested_prompts_reach_no_kernel(tokenizer: Tokenizer, depth: int) -> None:
    """H1: each further level froze the router for up to 93 s, while a kernel was compiled for it."""
    prompt: Any = list(range(32))
    for _ in range(depth):
        prompt = [prompt]
    if depth == 1:  # a batch of one
        got = read(reader(tokenizer), {"prompt": prompt}, COMPLETIONS)
        assert got.tokens.tolist() == list(range(32))
    else:
        with pytest.raises(BadRequest, match="flat list of integers"):
            read(reader(tokenizer), {"prompt": prompt}, COMPLETIONS)


@pytest.mark.parametrize("ids", [[1, "a"], [1.5], [-1], [2**32], [10**400], [True, None]])
def test_token_ids_that_no_engine_takes_are_a_400_of_the_client(tokenizer: Tokenizer, ids: list[Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        read(reader(tokenizer), {"prompt": ids}, COMPLETIONS)
    assert (refused.value.status, refused.value.reason) == (400, "bad_tokens")


def test_an_extra_key_is_part_of_the_namespace_and_cannot_complete_another_tenants_salt(tokenizer: Tokenizer) -> None:
    """SGLang joins cache_salt and extra_key: with the salt `ab`, a key `c` reaches the tenant whose salt is `abc`."""
    body = {"messages": [{"role": "user", "content": "x" * 64}]}
    plain, keyed, listed = (read(reader(tokenizer), {**body, **more}) for more in
                            ({}, {"extra_key": "c"}, {"extra_key": ["c"]}))  # fmt: skip
    assert len({plain.blocks[0], keyed.blocks[0], listed.blocks[0]}) == 3
    guarded = PromptReader(tokenizer, block_size=16, tenants=TenantsConfig(salts={"acme": "ab", "bolt": "abc"}))
    for key in ("c", ["c"], 5, {"a": 1}, ""):
        data = json.dumps({**body, "extra_key": key}).encode()
        got = guarded.read(CHAT, data, "acme", tokens=True, blocks=True)
        assert json.loads(got.body) == {**body, "cache_salt": "ab"}
        assert (
            got.blocks[0] == guarded.read(CHAT, json.dumps(body).encode(), "acme", tokens=True, blocks=True).blocks[0]
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * 3000}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 3000}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "name": "a" * 3000}]}),
        (CHAT, {"messages": [{}] * 900}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": ["a" * 3000]}),
        (COMPLETIONS, {"prompt": "a" * 3000}),
        (COMPLETIONS, {"prompt": list(range(3000))}),
    ],
)
def test_a_prompt_beyond_the_limit_is_refused_before_it_is_tokenised(
    tokenizer: Tokenizer, path: str, body: Any
) -> None:
    """H2: 50 MB took 7.5 GB and two minutes."""
    with pytest.raises(BadRequest) as refused:
        read(reader(tokenizer, characters=1000), body, path)
    assert (refused.value.status, refused.value.reason) == (413, "too_large")


def test_messages_are_limited_however_short(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="more than 10 messages"):
        read(reader(tokenizer, messages=10), {"messages": [{"role": "user", "content": "a"}] * 11})


def test_an_encoded_image_may_be_long(tokenizer: Tokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    read(reader(tokenizer, characters=1000), {"messages": messages})


@pytest.mark.parametrize("salt", [["s3cr3t-acme"], 5, True, {"a": 1}])
def test_a_salt_that_is_not_text_is_refused(tokenizer: Tokenizer, salt: Any) -> None:
    """L7: it was passed on as it came, for the engine to make of it what it will."""
    with pytest.raises(BadRequest, match="cache_salt must be a text"):
        read(reader(tokenizer), {"messages": [], "cache_salt": salt})


CLIENT_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "not JSON": (CHAT, {"data": b"{"}),
    "deep": (CHAT, {"data": b'{"messages":' + b"[" * 100_000}),
    "deep and closed": (CHAT, {"data": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"}),
    "nested prompt": (COMPLETIONS, {"data": b'{"prompt":[[[1]]]}'}),
    "no gzip": (CHAT, {"data": b"hello", "headers": {"Content-Encoding": "gzip"}}),
    "5,000 digits": (CHAT, {"data": b'{"max_tokens":' + b"9" * 5000 + b"}"}),
    "bad text": (CHAT, {"data": b'{"model":"\xff"}'}),
    "two tenants": (CHAT, {"json": {}, "headers": [("x-tenant-id", "a"), ("X-Tenant-Id", "b")]}),
    "no text salt": (CHAT, {"json": {"cache_salt": 5}}),
}


@pytest.mark.parametrize("fault", CLIENT_FAULTS)
async def test_a_fault_of_the_client_is_never_a_failure(engines: Engines, start: Start, fault: str) -> None:
    """L1, L5, L7: anybody could burn the error budget."""

    async def bad_request(out: Out) -> None:
        await out.json({"error": {"message": "no"}}, 400)

    engines[0].behaviour = bad_request
    client = await start(engines[:1], policy="cache_aware")
    path, arguments = CLIENT_FAULTS[fault]
    async with client.session.post(client.url + path, **arguments) as answer:
        assert 400 <= answer.status < 500
        assert json.loads(await answer.read())["error"]["message"]
    outcomes = {
        sample.labels["outcome"]: sample.value
        for family in client.router.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "prefixwatch_router_requests_total"
    }
    assert outcomes == {"rejected": 1}


async def test_bodies_in_flight_are_bounded_and_given_back(engines: Engines, start: Start) -> None:
    """H2: five bodies of 50 MB at once took 9.8 GB."""
    client = await start(engines[:1], max_body_bytes=100_000, max_bodies_bytes=150_000)
    engines[0].script = [never_answer]
    first = asyncio.create_task(client.chat("a" * 90_000).__aenter__())
    await until(lambda: engines[0].running == 1)
    async with client.chat("a" * 90_000) as answer:
        assert (answer.status, "try again" in await answer.text()) == (503, True)
    async with client.chat("a" * 10) as answer:
        assert answer.status == 200
        await answer.read()
    async with client.chat("a" * 110_000) as answer:
        assert answer.status == 413
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await client.settled()
    async with client.chat("a" * 90_000) as answer:
        assert answer.status == 200
        await answer.read()
    assert client.router._proxy._bodies._held_bytes == 0


async def test_an_answer_without_an_end_is_not_kept(
    engines: Engines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: 300 MB from an engine were 300 MB in the router."""
    monkeypatch.setattr("prefixwatch.router.serving.upstream.MAX_BODY_BYTES", 100_000)

    async def endless(out: Out) -> None:
        await out.head(200, "application/json")
        while True:
            await out.chunk(b"x" * 10_000)

    engines[0].behaviour = endless
    client = await start(engines[:1])
    async with client.chat(stream=False) as answer:
        assert answer.status == 502
    await until(lambda: engines[0].running == 0)


async def test_absurd_usage_is_unknown_in_every_count(engines: Engines, start: Start) -> None:
    """M6: it made the record vanish, or stayed in the sums forever."""

    async def behaviour(out: Out) -> None:
        await out.stream(delta("A"), usage(-5, 10**25), DONE)

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with client.chat() as answer:
        await answer.read()
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 1
    assert client.value("prompt_tokens_total", worker="a") is None
    async with client.session.get(f"{client.url}/router/requests") as page:
        (record,) = json.loads(await page.read())["records"]
    assert record["outcome"] == "completed"
    assert "cached_tokens" not in record


async def test_silence_after_done_is_a_complete_answer(
    engines: Engines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L4"""
    monkeypatch.setattr("prefixwatch.router.serving.relay._SECONDS_AFTER_DONE", 0.05)

    async def behaviour(out: Out) -> None:
        await out.head()
        await out.chunk(delta("A") + DONE)
        await never_answer(out)

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with client.chat() as answer:
        assert await answer.read() == delta("A") + DONE
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 1


async def test_clients_learn_no_internal_addresses(engines: Engines, start: Start) -> None:
    """L6"""
    client = await start(engines)
    addresses = [engine.url.removeprefix("http://") for engine in engines]
    for engine in engines:
        await engine.stop()
    async with client.chat() as answer:
        text = await answer.text()
        assert answer.status == 502
    assert "engine a refuses connections; then engine b refuses connections" in text
    assert not any(address in text or address.split(":")[1] in text for address in addresses)


async def test_pages_about_others_need_the_admin_token(engines: Engines, start: Start) -> None:
    """L6"""
    client = await start(engines[:1], admin_token="t0ken")
    good = {"Authorization": "Bearer t0ken"}
    for page in ("/metrics", "/router/requests"):
        for headers, status in ((None, 401), ({"Authorization": "Bearer tøken"}, 401), (good, 200)):
            async with client.session.get(client.url + page, headers=headers) as answer:
                assert answer.status == status
    async with client.session.get(f"{client.url}/health") as answer:
        assert await answer.json() == {"status": "ok"}
    async with client.session.get(f"{client.url}/health", headers=good) as answer:
        assert (await answer.json())["workers"][0]["name"] == "a"


async def test_a_stop_does_not_wait_for_a_prompt_that_is_being_read(
    engines: Engines, model_dir: Path, tmp_path: Path
) -> None:
    """H2: SIGTERM did not end the router within 33 s."""
    workers = [{"name": "a", "url": engines[0].url}]
    file = tmp_path / "router.json"
    file.write_text(json.dumps({"workers": workers, "port": 0, "model_dir": str(model_dir)}))
    slow = (
        "import sys, time, threading\n"
        "from prefixwatch.router.exchange.prompt import PromptReader\n"
        "def read(*_, **__): print('reading', flush=True); time.sleep(600)\n"
        "PromptReader.read = read\n"
        "from prefixwatch.router.serving import app\n"
        f"sys.argv = ['app', '--config', {str(file)!r}]\n"
        "app._leave(app.main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", slow, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    ready = (await process.stdout.readline()).decode().split()[-1]
    async with aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "a" * 20_000}]}
        asking = asyncio.create_task(session.post(f"{ready}{CHAT}", json=body).__aenter__())
        assert await process.stdout.readline() == b"reading\n"
        begun = perf_counter()
        os.kill(process.pid, signal.SIGTERM)
        async with asyncio.timeout(120):
            assert await process.wait() == 0
        assert perf_counter() - begun < 120  # and not the 600 s of that prompt
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
