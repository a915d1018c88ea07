"""Several models behind one router, endpoints that it doesn't read, and prompts with images."""

from __future__ import annotations

import asyncio
import gzip
import json
from time import perf_counter
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.exchange.endpoints import CHAT, GENERATING, HELPING
from prefixwatch.router.exchange.prompt import Prompt, PromptReader
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.preble import prefix_tree_load
from prefixwatch.router.policies.preble.prefix_tree_load import PrefixTreeLoad
from prefixwatch.router.policies.shared.routed_hashes import RoutedHashes
from prefixwatch.router.serving.create import ROUTER, create_app
from prefixwatch.router.serving.models import ServedModels
from prefixwatch.router.tenant_config import TenantsConfig
from tests.router.fake_engine import DONE, FakeEngine, Out, delta, until, usage

Engines = list[FakeEngine]
Start = Any  # a coroutine function, see conftest.start


async def test_only_workers_that_serve_the_model_are_asked(engines: Engines, start: Start) -> None:
    engines[0].models, engines[1].models = ["large", "alias-of-large"], ["small"]
    client = await start(engines)
    for model, count in (("large", 2), ("alias-of-large", 3), ("small", 4)):
        for _ in range(count):
            async with client.chat(model=model) as answer:
                assert answer.status == 200
                await answer.read()
    assert (len(engines[0].bodies), len(engines[1].bodies)) == (5, 4)


async def test_a_model_that_nobody_serves_is_a_404_and_reaches_no_engine(engines: Engines, start: Start) -> None:
    engines[0].models, engines[1].models = ["large"], ["small"]
    client = await start(engines)
    async with client.chat(model="other") as answer:
        message = (await answer.json())["error"]["message"]
        assert (answer.status, message) == (404, "no engine serves the model 'other': use one of large, small")
    assert engines[0].bodies == engines[1].bodies == []
    assert client.value("refusals_total", reason="no_model") == 1


async def test_a_request_is_not_retried_on_a_worker_with_another_model(engines: Engines, start: Start) -> None:
    engines[0].models, engines[1].models = ["large"], ["small"]
    client = await start(engines)
    await engines[0].stop()
    for status in (502, 503):
        async with client.chat(model="large") as answer:
            assert answer.status == status
    assert engines[1].bodies == []


def test_a_worker_whose_models_are_unknown_may_serve_any() -> None:
    models = ServedModels({"a": None, "b": None, "c": ["fixed"]})
    assert models.workers("x") == frozenset("ab")
    models.learn("a", [{"id": "x"}, {"id": "y"}, {"object": "model"}])
    models.learn("b", None)
    models.learn("c", [{"id": "x"}])  # what is configured wins
    assert serving(models, "x", "z", "fixed") == ["ab", "b", "bc"]
    models.learn("b", [{"id": "z"}])
    models.learn("a", [])
    assert serving(models, "x", "z", "new") == ["a", "b", ""]
    assert (models.workers(""), models.names()) == (None, ["fixed", "x", "y", "z"])


def serving(models: ServedModels, *names: str) -> list[str]:
    return ["".join(sorted(models.workers(name) or ())) for name in names]


@pytest.mark.parametrize("path", [*GENERATING, *HELPING])
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_other_endpoints_pass_through_unread_and_are_counted(
    engines: Engines, start: Start, path: str, content_type: str
) -> None:
    """N30"""
    answer_body = (
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n' if "event" in content_type else b'{"data":[1]}'
    )

    async def behaviour(out: Out) -> None:
        await out.head(200, content_type)
        await out.chunk(answer_body)
        await out.end()

    engines[0].behaviour = behaviour
    client = await start(engines[:1], policy="cache_aware")
    body = {"model": "tiny", "input": "hello", "stream": "event" in content_type}
    async with client.session.post(client.url + path, json=body) as answer:
        assert (answer.status, await answer.read()) == (200, answer_body)
    assert json.loads(engines[0].bodies[0]) == body
    await client.settled()
    if path in HELPING:
        assert client.value("passed_requests_total", endpoint=path, worker="a", outcome="completed") == 1
    else:
        assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 1
        assert client.value("untokenized_requests_total", endpoint=path, reason="endpoint") == 1
        assert client.value("sessionless_requests_total") == 1
    async with client.session.get(f"{client.url}/router/requests") as page:
        records = json.loads(await page.read())["records"]
    assert len(records) == (path in GENERATING)
    for record in records:  # nothing is known of its prompt: unknown, not 0
        assert not record.keys() & {"predicted_tokens", "held_tokens", "prompt_tokens", "cached_tokens"}


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_a_stream_is_passed_on_as_it_comes_whatever_its_header_says(
    engines: Engines, start: Start, content_type: str
) -> None:
    """vllm-project/vllm-ascend#5033: a proxy in front of the engine writes its own Content-Type."""
    seen = asyncio.Event()

    async def behaviour(out: Out) -> None:
        await out.head(200, content_type)
        await out.chunk(delta("A"))
        await seen.wait()  # a router that waits for the end would wait for the client, and it for the router
        await out.chunk(usage(20, 16) + DONE)
        await out.end()

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with client.chat() as answer:
        assert await answer.content.readany() == delta("A")
        seen.set()
        assert await answer.read() == usage(20, 16) + DONE
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 1


async def test_a_packed_answer_is_passed_on_unread_and_is_no_failure(engines: Engines, start: Start) -> None:
    """A sidecar compresses in spite of `Accept-Encoding: identity`: what the answer counts is unknown."""
    packed = gzip.compress(b'{"choices":[{"message":{"content":"A"},"finish_reason":"stop"}]}')

    async def behaviour(out: Out) -> None:
        await out.head(200, "application/json\r\nContent-Encoding: gzip")
        await out.chunk(packed)
        await out.end()

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    async with client.chat() as answer:
        assert (answer.status, await answer.json()) == (200, json.loads(gzip.decompress(packed)))
    await client.settled()
    assert client.value("requests_total", worker="a", model="tiny", outcome="completed") == 1


@pytest.mark.parametrize("prompts", [["a" * 64, "b" * 64, "c" * 64], [list(range(64)), list(range(9, 73))]])
async def test_nothing_is_held_against_a_batch_whose_first_prompt_alone_was_read(
    engines: Engines, start: Start, prompts: list[Any]
) -> None:
    """The engine counts all of its prompts: taken for the first one's, that was a tokenizer that differs, and hits that
    nobody had predicted."""

    async def behaviour(out: Out) -> None:
        await out.stream(
            b'data: {"choices":[{"index":0,"text":"A","finish_reason":"length"}]}\n\n', usage(192, 96), DONE
        )

    engines[0].behaviour = behaviour
    client = await start(engines[:1], policy="score")
    for _ in range(2):
        body = {"model": "tiny", "prompt": prompts, "stream": True}
        async with client.session.post(f"{client.url}/v1/completions", json=body) as answer:
            await answer.read()
    await client.settled()
    async with client.session.get(f"{client.url}/router/requests") as page:
        records = json.loads(await page.read())["records"]
    assert [(record["prompt_tokens"], record["cached_tokens"]) for record in records] == [(192, 96)] * 2
    unknown = {
        "counted_tokens",
        "predicted_tokens",
        "held_tokens",
        "held_by",
        "own_tokens",
        "prompt_block",
        "reused_block",
    }
    assert not any(record.keys() & unknown for record in records)
    assert client.value("predictions_total", cause="not_predicted") == 2


async def test_a_passed_body_that_breaks_off_is_not_taken_for_complete(engines: Engines, start: Start) -> None:
    async def behaviour(out: Out) -> None:
        await out.head(200, "application/json")
        await out.chunk(b'{"data":[')
        out.reset()

    engines[0].behaviour = behaviour
    client = await start(engines[:1])
    with pytest.raises(aiohttp.ClientError):
        async with client.session.post(f"{client.url}/v1/embeddings", json={"model": "tiny"}) as answer:
            await answer.read()
    await client.settled()
    assert client.value("passed_requests_total", endpoint="/v1/embeddings", worker="a", outcome="failed") == 1


async def test_a_tenants_salt_goes_to_every_endpoint_that_caches(engines: Engines, start: Start) -> None:
    client = await start(engines[:1], tenants={"salts": {"acme": "s3cr3t"}})
    for path in GENERATING:
        async with client.session.post(
            client.url + path, json={"model": "tiny"}, headers={"x-tenant-id": "acme"}
        ) as answer:
            await answer.read()
    assert {json.loads(body)["cache_salt"] for body in engines[0].bodies} == {"s3cr3t"}


def read(tokenizer: Tokenizer, *contents: Any) -> Prompt:
    reader = PromptReader(tokenizer, block_size=16, tenants=TenantsConfig())
    messages = [{"role": "user", "content": content} for content in contents]
    return reader.read(CHAT, json.dumps({"messages": messages}).encode(), "", tokens=True, blocks=True)


def image(name: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x" * 64}, {"type": "image_url", "image_url": {"url": f"http://host/{name}.png"}}]


def test_an_image_is_part_of_the_hash_at_its_place(tokenizer: Tokenizer) -> None:
    """N36: by their texts alone, prompts with different images had the same blocks."""
    text = read(tokenizer, "a" * 100, "b" * 100)
    cat, dog = [read(tokenizer, "a" * 100, image(name), "b" * 100) for name in ("cat", "dog")]
    again = read(tokenizer, "a" * 100, image("cat"), "b" * 100)
    assert (cat.unread, dog.unread, text.unread) == ("media", "media", "")
    shared = (len("<user>") + 100) // 16
    assert cat.blocks[:shared].tolist() == dog.blocks[:shared].tolist() == text.blocks[:shared].tolist()
    assert not set(cat.blocks[shared + 1 :].tolist()) & set(dog.blocks.tolist())
    assert cat.blocks.tolist() == again.blocks.tolist()


def test_a_policys_memory_of_hashes_is_bounded() -> None:
    notes = RoutedHashes(most=1000)
    for prompt in range(50):
        notes.store("ab"[prompt % 2], range(prompt * 100, prompt * 100 + 100))
        assert notes.memory().entries <= 1000
        assert 4999 not in notes or prompt == 49
    assert notes.memory().entries == notes.count("a") + notes.count("b") >= 800
    assert 4950 in notes  # the most recent
    assert 0 not in notes
    notes.forget("a")
    notes.forget("b")
    assert (notes.memory().entries, len(notes)) == (0, 0)


def test_prebles_tree_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree_load, "MOST_BLOCKS", 500)
    tree = PrefixTreeLoad()
    for prompt in range(40):
        leaf = tree.insert(range(prompt * 100, prompt * 100 + 100), 16, 1.0)
        tree.place(leaf, "a", 10, 1.0)
        tree.finish(leaf, "a", 1.0)
    assert tree.blocks == sum(len(node.blocks) for node in tree.nodes()) <= 600


async def test_what_a_worker_is_goes_to_its_records_and_metrics(engines: Engines, tokenizer: Tokenizer) -> None:
    place = {"role": "decode", "pool": "blue", "namespace": "chat", "cluster": "eu-1"}
    worker = {"name": "a", "url": engines[0].url, "zone": "z1", **place}
    app = create_app(
        RouterConfig.model_validate({"workers": [worker]}), policy=make_policy("score"), tokenizer=tokenizer
    )
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        async with session.post(url + CHAT, json=body) as answer:
            await answer.read()
        await until(lambda: not any(app[ROUTER].ledger.in_flight().values()))
        async with session.get(f"{url}/router/requests") as page:
            (record,) = json.loads(await page.read())["records"]
    registry = app[ROUTER].metrics.registry
    await runner.cleanup()
    assert place.items() <= record.items()
    info = {"worker": "a", "zone": "z1", "node": "", **place}
    assert registry.get_sample_value("prefixwatch_router_worker_info", info) == 1
    assert registry.get_sample_value("prefixwatch_router_policy_memory_entries") == 0


async def test_the_age_of_each_load_report_is_exported(engines: Engines, start: Start) -> None:
    client = await start(engines, policy="least_load")
    assert client.value("load_report_age_seconds", worker="a") is None  # it never reported: unknown, not 0
    client.router.ledger.reported_at["a"] = perf_counter() - 100
    age = client.value("load_report_age_seconds", worker="a")
    assert age is not None
    assert age >= 100
    assert client.value("load_report_age_seconds", worker="b") is None
