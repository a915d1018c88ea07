"""The exporter beside simulated engines: what their KV events tell agrees with the engines' own books."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.simulated.server import SimulatedEngine
from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.exporters.app import running
from prefixwatch.exporters.caches.kv_events import KvEventCounts
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter

TIMEOUT_SECONDS = 20.0


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[SimulatedEngine]]:
    model = make_tiny_model(tmp_path / "tiny")
    started = []
    for k in range(2):
        config = SimulatedEngineConfig(
            model_dir=model,
            step_time=StepTime(0.0005),
            capacity_blocks=64,
            max_model_len=1024,
            kv_events_endpoint=f"ipc://{tmp_path}/kv{k}",
            replay_endpoint=f"ipc://{tmp_path}/replay{k}",
        )
        started.append(SimulatedEngine(config))
        await started[-1].start()
    yield started
    for engine in started:
        await engine.stop()


def exporter_config(engines: list[SimulatedEngine], tmp_path: Path) -> ExporterConfig:
    targets = tuple(
        TargetConfig(
            name=f"w{k}",
            url=f"{engine.url}/metrics",
            kv_events=(f"ipc://{tmp_path}/kv{k}",),
            kv_replay=(f"ipc://{tmp_path}/replay{k}",),
        )
        for k, engine in enumerate(engines)
    )
    return ExporterConfig(targets=targets, listen="127.0.0.1:0", interval_seconds=0.1, window_seconds=5.0)


async def complete(http: aiohttp.ClientSession, engine: SimulatedEngine, prompt: list[int], **body: Any) -> None:
    request = {"prompt": prompt, "max_tokens": 1, **body}
    async with http.post(f"{engine.url}/v1/completions", json=request) as answer:
        assert answer.status == 200, await answer.text()


async def known(exporter: Exporter, name: str, reached: Callable[[KvEventCounts], object]) -> KvEventCounts:
    """What the exporter knows of a target, once it is that."""
    counts: KvEventCounts | None = None
    deadline = asyncio.get_running_loop().time() + TIMEOUT_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        source = next(target.kv_events for target in exporter.targets if target.name == name)
        counts = source.counts() if source else None
        if counts and reached(counts):
            return counts
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {TIMEOUT_SECONDS} s; known is {counts}")


async def agreed(exporter: Exporter, engine: SimulatedEngine, name: str) -> KvEventCounts:
    """What the exporter knows, once it is as much as the engine does."""
    pool = engine.model.pool

    def agrees(counts: KvEventCounts) -> bool:
        return (counts.resident_blocks, counts.evicted_blocks) == (pool.cached_blocks, pool.evicted_blocks)

    return await known(exporter, name, agrees)


async def test_evictions_and_blocks_agree_with_the_engines_own_books(
    engines: list[SimulatedEngine], tmp_path: Path
) -> None:
    """vllm-project/aibrix#2287 (RT16) at the end: a reset cache is known to be gone; nothing of it is an eviction."""
    rng = random.Random(1)
    openings = [[rng.randrange(300, 900) for _ in range(160)] for _ in range(4)]
    async with (
        running(exporter_config(engines, tmp_path)) as exporter,
        aiohttp.ClientSession() as http,
    ):
        for name in ("w0", "w1"):
            await known(exporter, name, lambda _: True)
        for turn in range(40):
            prompt = [*rng.choice(openings), *(rng.randrange(300, 900) for _ in range(64))]
            salt = {"cache_salt": "tenant-a"} if turn % 5 == 0 else {}
            await complete(http, engines[turn % 2], prompt, **salt)
        counts = await agreed(exporter, engines[0], "w0")
        await agreed(exporter, engines[1], "w1")
        assert counts.evicted_blocks > 0
        assert 0 < counts.regretted_blocks <= counts.evicted_blocks
        assert counts.stored_blocks - counts.evicted_blocks == counts.resident_blocks
        assert sum(counts.lifetimes) == counts.evicted_blocks
        assert (counts.missed_batches, counts.incomplete) == (0, False)

        await exporter.prefixes.refresh()
        async with http.get(f"{exporter.url}/api/v1/prefixes?depth=20&limit=5000") as answer:
            document = await answer.json()
        distinct = set()
        for engine in engines:
            distinct |= set(engine.model.pool._references)
        assert document["totals"]["blocks"] == len(distinct) == len(exporter.prefixes.table)
        held = sum(sum(node["workers"].values()) for node in document["nodes"])
        assert held == sum(engine.model.pool.cached_blocks for engine in engines)

        async with http.post(f"{engines[0].url}/reset_prefix_cache") as answer:
            assert answer.status == 200
        await complete(http, engines[0], openings[0])  # an idle engine publishes nothing, the reset neither
        counts = await agreed(exporter, engines[0], "w0")
        assert (counts.clears, counts.resident_blocks) == (1, 10)


async def test_an_exporter_that_comes_later_knows_what_was_cached_before(
    engines: list[SimulatedEngine], tmp_path: Path
) -> None:
    """sgl-project/sglang#39822 (RT17), the other half: a restarted exporter isn't blind, it asks for a replay."""
    async with aiohttp.ClientSession() as http:
        await complete(http, engines[0], list(range(300, 460)))
        async with running(exporter_config(engines, tmp_path)) as exporter:
            counts = await known(exporter, "w0", lambda counts: counts.resident_blocks >= 10)
            assert (counts.resident_blocks, counts.stored_blocks, counts.incomplete) == (10, 0, False)
