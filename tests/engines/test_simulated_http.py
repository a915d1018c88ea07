"""The simulated engine over real sockets: what a client, a scraper and a KV-event subscriber see."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.simulated.server import SimulatedEngine, main
from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer

CATALOGUE = Path(__file__).parent / "data" / "vllm_0.32.0.catalogue.txt"
FAST = StepTime(0.002)
PROMPT = list(range(300, 400))  # 6 full blocks of 16 and 4 tokens

Start = Callable[..., Awaitable[SimulatedEngine]]


@pytest.fixture
async def start(tokenizer_dir: Path) -> AsyncIterator[Start]:
    engines: list[SimulatedEngine] = []

    async def start_one(**settings: Any) -> SimulatedEngine:
        values = {"model_dir": tokenizer_dir, "step_time": FAST, **settings}
        engine = SimulatedEngine(SimulatedEngineConfig(**values))
        await engine.start()
        engines.append(engine)
        return engine

    yield start_one
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url, data=data) as response:
        return response.status, await response.json()


async def complete(http: aiohttp.ClientSession, engine: SimulatedEngine, **body: Any) -> dict[str, Any]:
    status, answer = await post(http, engine.url + "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, **body})
    assert status == 200, answer
    return answer


async def events_of(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    """The server-sent events of a streamed answer; the end mark as the text it is."""
    async with http.post(url, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def samples_of(http: aiohttp.ClientSession, engine: SimulatedEngine) -> dict[str, float]:
    """Sample values by name, labels beyond vLLM's usual two appended."""
    async with http.get(engine.url + "/metrics") as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            more = [value for key, value in sorted(sample.labels.items()) if key not in ("engine", "model_name")]
            found[" ".join([sample.name, *more])] = sample.value
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_repeated_prompt_is_reused_in_whole_blocks(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    first = await complete(http, engine)
    again = await complete(http, engine)
    assert (cached(first), cached(again)) == (0, 96)
    assert again["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 3,
        "total_tokens": 103,
        "prompt_tokens_details": {"cached_tokens": 96},
    }
    assert cached(await complete(http, engine, prompt=PROMPT[:96])) == 80


async def test_each_salt_has_a_cache_of_its_own(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        assert cached(await complete(http, engine, **salt)) == 0
        assert cached(await complete(http, engine, **salt)) == 96


async def test_an_engine_that_ignores_salts_shares_its_cache(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(ignore_cache_salt=True)
    assert cached(await complete(http, engine, cache_salt="a")) == 0
    assert cached(await complete(http, engine, cache_salt="b")) == 96


async def test_a_chat_streams_role_words_usage_and_the_end_mark(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello there"}],
        "max_completion_tokens": 3,
        "stream_options": {"include_usage": True},
    }
    role, *words, usage, end = await events_of(http, engine.url + "/v1/chat/completions", body)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["object"] == "chat.completion.chunk"
    assert [word["choices"][0]["finish_reason"] for word in words] == [None, None, "length"]
    assert all("usage" not in word for word in words)
    assert (usage["choices"], usage["usage"]["completion_tokens"], end) == ([], 3, "[DONE]")


async def test_continuous_usage_counts_up(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 2, "stream_options": options}
    *chunks, last, _ = await events_of(http, engine.url + "/v1/completions", body)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2]
    assert last["usage"]["total_tokens"] == 102


async def test_streamed_or_not_seeded_alike_the_words_are_the_same_and_one_token_each(
    start: Start, http: aiohttp.ClientSession, tokenizer_dir: Path
) -> None:
    engine, twin, other = await start(), await start(), await start(seed=1)
    whole = (await complete(http, engine, max_tokens=20))["choices"][0]["text"]
    chunks = await events_of(http, twin.url + "/v1/completions", {"prompt": PROMPT, "max_tokens": 20})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole
    assert len(Tokenizer(tokenizer_dir).encode(whole)) == 20
    assert (await complete(http, other, max_tokens=20))["choices"][0]["text"] != whole


async def test_without_a_limit_a_chat_stops_by_itself_unless_told_to_go_on(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await start(default_output_tokens=5, max_model_len=64, step_time=StepTime(0.0001))
    url, body = engine.url + "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}
    _, answer = await post(http, url, body)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "stop")
    _, answer = await post(http, url, {**body, "ignore_eos": True})
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (64, "length")


async def test_a_client_that_leaves_takes_its_request_along(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(step_time=StepTime(0.01))
    body = {"prompt": PROMPT, "max_tokens": 5000, "stream": True}
    async with http.post(engine.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        assert engine.model.running == 1
    async with asyncio.timeout(2):
        while (await samples_of(http, engine))["vllm:num_requests_running"]:
            pass
    assert engine.model.pool.used_blocks == 0
    assert (await samples_of(http, engine))["vllm:request_success_total abort"] == 0
    assert cached(await complete(http, engine)) == 96


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", b'{"prompt": ', 400, "the body is not JSON"),
        ("completions", b"\xff\xfe", 400, "the body is not JSON"),
        ("completions", b"[]", 400, "Expected `object`"),
        ("completions", {}, 400, "missing required field `prompt`"),
        ("completions", {"prompt": ""}, 400, "prompt must not be empty"),
        ("completions", {"prompt": [-1]}, 400, "token ids must be between"),
        ("completions", {"prompt": [99_999]}, 400, "token id 99999 is not in the model's vocabulary"),
        ("completions", {"prompt": [1], "model": "other"}, 404, "The model `other` does not exist."),
        ("completions", {"prompt": [1], "cache_salt": ""}, 400, "cache_salt must be a non-empty string"),
        ("completions", {"prompt": [1], "cache_salt": 7}, 400, "Expected `str | null`, got `int` - at `$.cache_salt`"),
        ("completions", {"prompt": [1], "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
        ("completions", {"prompt": [1], "n": 2}, 400, "n must be 1"),
        ("completions", {"prompt": [1], "stream_options": {}}, 400, "only allowed with stream"),
        ("completions", {"prompt": [1] * 90, "max_tokens": 40}, 400, "maximum context length is 128 tokens"),
        ("chat/completions", {"messages": []}, 400, "at least one message"),
        ("chat/completions", {"messages": [{"role": "user", "content": ["hi"]}]}, 400, "content parts must be objects"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"tools": 1}},
            400,
            "can't set tools",
        ),
        ("chat/completions", {"messages": "hello"}, 400, "Expected `array`, got `str` - at `$.messages`"),
    ],
)
async def test_a_bad_request_gets_an_openai_error_that_says_why(
    start: Start, http: aiohttp.ClientSession, *, path: str, body: Any, status: int, message: str
) -> None:
    engine = await start(max_model_len=128)
    found, answer = await post(http, f"{engine.url}/v1/{path}", body)
    assert (found, answer["error"]["code"]) == (status, status)
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert (engine.model.running, engine.model.waiting) == (0, 0)


async def test_the_other_endpoints_answer_as_vllm(
    start: Start, http: aiohttp.ClientSession, tokenizer_dir: Path
) -> None:
    engine = await start()
    async with http.get(engine.url + "/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with http.get(engine.url + "/v1/models") as response:
        [model] = (await response.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 8192)
    async with http.get(engine.url + "/version") as response:
        assert (await response.json())["version"].startswith("0.32.0")
    messages = [{"role": "user", "content": "hello there"}]
    _, answer = await post(http, engine.url + "/tokenize", {"messages": messages})
    assert answer["tokens"] == Tokenizer(tokenizer_dir).encode_chat(messages).tolist()
    assert answer["count"] == len(answer["tokens"])


async def test_a_reset_empties_the_prefix_cache(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    await complete(http, engine)
    assert await post(http, engine.url + "/reset_prefix_cache", {}) == (200, {"success": True})
    assert cached(await complete(http, engine)) == 0


async def test_metrics_have_vllms_names_types_labels_and_buckets(start: Start, http: aiohttp.ClientSession) -> None:
    """Every family but the cache configuration equals the one captured from a real vLLM 0.32.0."""
    real: dict[str, tuple[str, set[str], list[str]]] = {}
    for line in CATALOGUE.read_text().splitlines():
        name, kind, labels, *rest = (part.strip() for part in line.split("|"))
        bounds = next((part.removeprefix("le=").split() for part in rest if part.startswith("le=")), [])
        real[name] = (kind, set(labels.split(",")) - {""}, bounds)
    engine = await start()
    async with http.get(engine.url + "/metrics") as response:
        text = await response.text()
    checked = 0
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("vllm:") or family.name.endswith(("_created", "cache_config_info")):
            continue
        name = family.name + "_total" if family.type == "counter" else family.name
        found = {label for sample in family.samples for label in sample.labels} - {"le"}
        bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
        assert (name, (family.type, found, bounds)) == (name, real.get(name))
        checked += 1
    assert checked == 34
    assert {"process_start_time_seconds", "process_cpu_seconds_total"} <= set(text.split())


async def test_metric_identities_of_vllm_hold(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    for prompt_tokens in (100, 100, 40, 64):
        await complete(http, engine, prompt=PROMPT[:prompt_tokens])
    found = await samples_of(http, engine)
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"] == 304
    assert found["vllm:prefix_cache_hits_total"] == found["vllm:prompt_tokens_cached_total"] == 0 + 96 + 32 + 48
    computed = found["vllm:prompt_tokens_by_source_total local_compute"]
    assert computed + found["vllm:prompt_tokens_by_source_total local_cache_hit"] == 304
    assert found["vllm:prompt_tokens_cached_by_source_total device"] == found["vllm:prefix_cache_hits_total"]
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == computed
    assert found["vllm:generation_tokens_total"] == found["vllm:request_generation_tokens_sum"] == 12
    assert found["vllm:iteration_tokens_total_sum"] == computed + 12
    assert found["vllm:request_inference_time_seconds_sum"] == pytest.approx(
        found["vllm:request_prefill_time_seconds_sum"] + found["vllm:request_decode_time_seconds_sum"]
    )
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:request_success_total length"] == 4
    assert found["vllm:inter_token_latency_seconds_count"] == 8
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:num_requests_running"] == 0


async def test_steps_take_the_time_of_the_profile(start: Start, http: aiohttp.ClientSession) -> None:
    """31 steps of 10 ms, at 4 times the speed, on an engine made twice as slow; sleeps' overshoots don't add up."""
    engine = await start(step_time=StepTime(0.010), speed=4, slow_factor=2)
    await complete(http, engine, max_tokens=31)
    total_s = (await samples_of(http, engine))["vllm:e2e_request_latency_seconds_sum"]
    assert 0.155 <= total_s + 1e-6 < 0.155 + 0.15


async def test_kv_events_tell_what_the_cache_holds_and_can_be_replayed(
    start: Start, http: aiohttp.ClientSession
) -> None:
    """Ids are the engine's own; token ids, parents and the salt let a subscriber find the blocks by itself."""
    anywhere = "tcp://127.0.0.1:*"
    engine = await start(kv_events_endpoint=anywhere, replay_endpoint=anywhere, kv_events_topic="kv@e0")
    publisher = engine.publisher
    assert publisher is not None
    assert publisher.replay_endpoint is not None
    context = zmq.asyncio.Context()
    subscriber, replayer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"kv@e0")
        replayer.connect(publisher.replay_endpoint)
        await _until_subscribed(subscriber, engine, http)
        await complete(http, engine, cache_salt="tenant-a")
        topic, sequence, payload = await asyncio.wait_for(subscriber.recv_multipart(), 5)
        await complete(http, engine, prompt=[*PROMPT[:96], *range(400, 420)], cache_salt="tenant-a")
        _, next_sequence, next_payload = await asyncio.wait_for(subscriber.recv_multipart(), 5)
        await replayer.send_multipart([b"", sequence])
        replayed = [await asyncio.wait_for(replayer.recv_multipart(), 5) for _ in range(3)]
    finally:
        context.destroy(linger=0)

    [stored] = msgspec.msgpack.decode(payload)[1]
    assert topic == b"kv@e0"
    assert (stored["type"], stored["block_size"], stored["parent_block_hash"]) == ("BlockStored", 16, None)
    assert stored["token_ids"] == PROMPT[:96]
    assert stored["extra_keys"] == [["tenant-a"], None, None, None, None, None]
    assert len(stored["block_hashes"]) == 6
    assert not set(stored["block_hashes"]) & set(block_hashes(as_tokens(PROMPT)).tolist())
    [child] = msgspec.msgpack.decode(next_payload)[1]
    assert child["parent_block_hash"] == stored["block_hashes"][-1]
    assert child["token_ids"] == list(range(400, 416))
    assert child["extra_keys"] == [None]
    assert int.from_bytes(next_sequence, "big") == int.from_bytes(sequence, "big") + 1
    assert replayed == [
        [b"", b"kv@e0", sequence, payload],
        [b"", b"kv@e0", next_sequence, next_payload],
        [b"", b"", b"\xff" * 8, b""],
    ]


async def _until_subscribed(subscriber: Any, engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    """ZMQ drops what is published before a subscription arrives: send marked prompts until one comes through."""
    for attempt in range(100):
        await complete(http, engine, prompt=[1000 + attempt] * 16, max_tokens=1)
        if await subscriber.poll(50):
            break
    while await subscriber.poll(50):
        await subscriber.recv_multipart()


async def test_an_eviction_is_published_before_the_block_that_takes_its_place(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await start(
        kv_events_endpoint="tcp://127.0.0.1:*", capacity_blocks=8, max_model_len=128, step_time=StepTime(0.0001)
    )
    publisher = engine.publisher
    assert publisher is not None
    await complete(http, engine)
    await complete(http, engine, prompt=list(range(500, 564)), max_tokens=1)
    await post(http, engine.url + "/reset_prefix_cache", {})
    await complete(http, engine, prompt=[7], max_tokens=1)
    batches = [msgspec.msgpack.decode(payload)[1] for _, payload in publisher._sent]
    first, second, third = ([event["type"] for event in batch] for batch in batches)
    assert first == ["BlockStored"]
    assert second == ["BlockRemoved", "BlockRemoved", "BlockStored"]
    assert [event["block_hashes"] for event in batches[1][:2]] == [[h] for h in batches[0][0]["block_hashes"][:3:-1]]
    assert third == ["AllBlocksCleared"]


def test_a_port_in_use_and_bad_settings_end_with_one_message_and_code_2(
    tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = ["--model-dir", str(tokenizer_dir)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([*model_dir, "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use: choose another with --port" in capsys.readouterr().err
    assert main([*model_dir, "--profile", "h200"]) == 2
    assert "no step time profile 'h200'" in capsys.readouterr().err
    assert main(["--model-dir", str(tmp_path)]) == 2
    assert "no tokenizer.json in" in capsys.readouterr().err
    config = tmp_path / "engine.yaml"
    config.write_text("prot: 80\n")
    assert main([*model_dir, "--config", str(config)]) == 2
    assert "engine.yaml: prot: unknown key: did you mean 'port'?" in capsys.readouterr().err
    assert main([*model_dir, "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: can't be read" in capsys.readouterr().err


async def test_an_unusable_kv_event_address_is_named(start: Start, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/missing/kv.sock"
    with pytest.raises(EngineError, match=f"can't be published on {endpoint}"):
        await start(kv_events_endpoint=endpoint)
