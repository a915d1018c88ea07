"""Simulated SGLang and TensorRT-LLM from outside: pages as the exporter reads them, usage fields, KV events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.simulated.server import SimulatedEngine
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.scrape import Scraper
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.router.placement.load import load_report

PROMPT = list(range(300, 400))  # 6 full blocks of 16 and 4 tokens


@pytest.fixture
async def engine(request: pytest.FixtureRequest, tokenizer_dir: Path, tmp_path: Path) -> AsyncIterator[SimulatedEngine]:
    if request.param.get("kv_events_endpoint") == "ipc":
        request.param["kv_events_endpoint"] = f"ipc://{tmp_path}/kv"
    config = {"model_dir": tokenizer_dir, "step_time": StepTime(0.002), "capacity_blocks": 600, **request.param}
    running = SimulatedEngine(SimulatedEngineConfig(**config))
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def usage_of(http: aiohttp.ClientSession, engine: SimulatedEngine) -> dict[str, Any]:
    async with http.post(engine.url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}) as response:
        assert response.status == 200
        usage: dict[str, Any] = (await response.json())["usage"]
        return usage


async def scraped(engine: SimulatedEngine) -> Target:
    own = TargetConfig(name="engine", url=f"{engine.url}/metrics")
    settings = ExporterConfig(targets=(own,))
    target = Target(own, settings, shipped_catalogue())
    scraper = Scraper(settings.timeout_seconds, settings.limits.body_bytes)
    try:
        target.ingest(await scraper.fetch(own.url), monotonic())
    finally:
        await scraper.close()
    return target


@pytest.mark.parametrize(
    ("engine", "system"),
    [({"kind": "vllm"}, "vllm"), ({"kind": "sglang"}, "sglang"), ({"kind": "tensorrt-llm"}, "tensorrt-llm")],
    indirect=["engine"],
)
async def test_the_exporter_reads_the_same_figures_of_every_kind(
    engine: SimulatedEngine, http: aiohttp.ClientSession, system: str
) -> None:
    await usage_of(http, engine)
    await usage_of(http, engine)

    target = await scraped(engine)

    store, numbers = target.store, target.numbers
    assert store is not None
    assert numbers is not None
    assert target.system is not None
    assert target.system.system == system
    assert store.total("prefix_query_tokens") == 200
    assert store.total("prefix_hit_tokens") == 96
    assert store.total("generation_tokens") == 6
    assert store.total("finished_requests") == 2
    assert (numbers.running, numbers.waiting) == (0, 0)
    assert numbers.kv_usage_max_ratio == 0


@pytest.mark.parametrize("engine", [{"kind": "sglang"}, {"kind": "tensorrt-llm"}], indirect=True)
async def test_no_token_counter_is_shown_before_a_request_has_finished(engine: SimulatedEngine) -> None:
    target = await scraped(engine)

    assert target.store is not None
    assert target.store.total("prefix_query_tokens") is None
    assert target.numbers is not None
    assert target.numbers.running == 0


@pytest.mark.parametrize("engine", [{"kind": "sglang"}, {"kind": "tensorrt-llm"}], indirect=True)
async def test_a_router_reads_the_load(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    async with http.get(engine.url + "/metrics") as response:
        report = load_report(await response.read(), 1.0)

    assert (report.running, report.waiting, report.kv_usage_ratio) == (0, 0, 0.0)
    assert report.kv_capacity_tokens == 9600


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ({"kind": "sglang"}, {"prompt_tokens_details": {"cached_tokens": 96}, "reasoning_tokens": 0}),
        ({"kind": "sglang", "cache_report": False}, {"prompt_tokens_details": None, "reasoning_tokens": 0}),
        ({"kind": "tensorrt-llm"}, {"prompt_tokens_details": {"cached_tokens": 96}}),
    ],
    indirect=["engine"],
)
async def test_usage_has_the_systems_own_fields(
    engine: SimulatedEngine, http: aiohttp.ClientSession, fields: dict[str, Any]
) -> None:
    await usage_of(http, engine)

    counts = {"prompt_tokens": 100, "total_tokens": 103, "completion_tokens": 3}
    assert await usage_of(http, engine) == {**counts, **fields}


@pytest.mark.parametrize("engine", [{"kind": "sglang", "kv_events_endpoint": "ipc"}], indirect=True)
async def test_sglang_publishes_an_array_per_page(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    assert engine.publisher is not None
    subscriber = zmq.asyncio.Context.instance().socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(engine.publisher.endpoint)
    try:
        frames: list[bytes] = []
        while not frames:  # until the subscription has arrived
            await usage_of(http, engine)
            await http.post(engine.url + "/flush_cache")
            if await subscriber.poll(200):
                frames = await subscriber.recv_multipart()
    finally:
        subscriber.close(linger=0)

    _, events, rank = msgspec.msgpack.decode(frames[2])
    events = [event for event in events if event[0] == "BlockStored"]
    assert rank == 0
    assert [(event[3], event[4]) for event in events] == [(PROMPT[k * 16 : k * 16 + 16], 16) for k in range(6)]
    assert [event[2] for event in events] == [None, *(event[1][0] for event in events[:-1])]


@pytest.mark.parametrize("engine", [{"kind": "tensorrt-llm"}], indirect=True)
async def test_tensorrt_llm_gives_its_events_once(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    await usage_of(http, engine)

    async def fetched() -> list[dict[str, Any]]:
        async with http.post(engine.url + "/kv_cache_events") as response:
            found: list[dict[str, Any]] = await response.json()
            return found

    events = await fetched()
    tokens = [token["token_id"] for event in events for block in event["data"]["blocks"] for token in block["tokens"]]
    assert tokens == PROMPT[:96]
    assert [event["event_id"] for event in events] == list(range(len(events)))
    assert events[0]["data"]["parent_hash"] is None
    assert await fetched() == []
    async with http.get(engine.url + "/prometheus/metrics") as response:
        assert b"trtllm_kv_cache_max_blocks" in await response.read()
