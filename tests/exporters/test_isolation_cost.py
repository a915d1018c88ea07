"""What salts cost a cache, from the engine's events to the metrics page: copies, and hits that would have been."""

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
from prefixwatch.engines.simulated.kv_event_publisher import KvEventPublisher
from prefixwatch.engines.simulated.server import SimulatedEngine
from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.exporters.app import running
from prefixwatch.exporters.caches.kv_events import KvEventWatcher
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.kvcache.blocks import as_tokens, block_hashes, namespace_root

TIMEOUT_SECONDS = 20.0
SYSTEM_PROMPT = list(range(1000, 7000))
PAGE = b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"


def stored(tokens: list[int], salt: str | None = None, lora: str | None = None, **fields: Any) -> dict[str, Any]:
    """A whole prompt's blocks as vLLM 0.24 and newer publish them, named by what the engine hashes."""
    names = (block_hashes(as_tokens(tokens), root=namespace_root(salt, lora)) ^ 1).tolist()
    extra_keys: list[list[str] | None] = [[lora] if lora else None for _ in names]
    if salt:
        extra_keys[0] = [*(extra_keys[0] or []), salt]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 16,
        "lora_id": 1 if lora else None,
        "medium": "GPU",
        "lora_name": lora,
        "extra_keys": extra_keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **fields,
    }


def removed(*events: dict[str, Any], keep: int = 0) -> list[dict[str, Any]]:
    """An event a block, as vLLM evicts, of all but each prompt's first so many blocks."""
    names = [name for event in events for name in event["block_hashes"][keep:]]
    return [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0} for name in names]


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            if reached():
                return
            await asyncio.sleep(0.01)


class Rig:
    """An exporter that hears one engine's events."""

    def __init__(self, exporter: Exporter, publisher: KvEventPublisher) -> None:
        self.exporter = exporter
        self._publisher = publisher

    async def hear(self, *events: dict[str, Any]) -> None:
        """Publishes these in one batch, and waits until they are read."""
        await until(self._joined)
        self._publisher.publish(list(events))
        await until(lambda: self._heard() == self._publisher._sequence - 1)

    def _joined(self) -> bool:
        self._publisher.publish([{"type": "Hello"}])
        return self._heard() is not None

    def _heard(self) -> int | None:
        watcher = self.exporter.targets[0].kv_events
        return watcher._feeds[0].last_sequence if isinstance(watcher, KvEventWatcher) else None

    async def page(self) -> dict[str, float]:
        return await page(self.exporter)

    async def document(self) -> dict[str, Any]:
        return await document(self.exporter)


async def page(exporter: Exporter) -> dict[str, float]:
    """The isolation families of target a, by name without their common parts."""
    async with aiohttp.ClientSession() as session, session.get(f"{exporter.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    head = "prefixwatch_isolation_"
    samples = (line.removeprefix(head).rsplit(" ", 1) for line in lines if line.startswith(head))
    return {name.partition("_tokens")[0]: float(value) for name, value in samples if 'target="a"}' in name}


async def document(exporter: Exporter) -> dict[str, Any]:
    """The fleet API's section on caches."""
    async with aiohttp.ClientSession() as session, session.get(f"{exporter.url}/api/v1/fleet") as answer:
        found: dict[str, Any] = (await answer.json())["cache"]
    return found


@pytest.fixture
async def rig(serve_pages: Callable[..., Any]) -> AsyncIterator[Rig]:
    publisher = KvEventPublisher("tcp://127.0.0.1:*")
    base = await serve_pages({"/metrics": PAGE})
    target = TargetConfig(name="a", url=f"{base}/metrics", kv_events=(publisher.endpoint,))
    try:
        async with running(ExporterConfig(targets=(target,), listen="127.0.0.1:0", interval_seconds=0.1)) as exporter:
            yield Rig(exporter, publisher)
    finally:
        publisher.close()


async def test_ten_tenants_salts_make_54_000_of_60_000_tokens_copies(rig: Rig) -> None:
    """vllm-project/vllm#52655 (IS08): a common system prompt of 6000 tokens, ten tenants, a salt each."""
    salts = [f"salt-of-tenant-{k}" for k in range(10)]
    await rig.hear(*(stored(SYSTEM_PROMPT, salt) for salt in salts))
    assert await rig.page() == {"cached": 60_000, "duplicate": 54_000, "lost_hit": 54_000}
    told = await rig.document()
    assert told["isolation"] == {"a": {"cached_tokens": 60_000, "duplicate_tokens": 54_000, "lost_hit_tokens": 54_000}}
    assert "salt-of" not in str(told)


async def test_what_is_evicted_is_no_copy_any_more_and_lost_hits_stay_counted(rig: Rig) -> None:
    prompts = [stored(SYSTEM_PROMPT[:160], f"salt {k}") for k in range(3)]
    await rig.hear(*prompts)
    await rig.hear(*removed(prompts[0], keep=4))
    assert await rig.page() == {"cached": 384, "duplicate": 224, "lost_hit": 320}
    await rig.hear(*removed(*prompts[:2]))
    assert await rig.page() == {"cached": 160, "duplicate": 0, "lost_hit": 320}
    await rig.hear({"type": "AllBlocksCleared"})
    assert await rig.page() == {"cached": 0, "duplicate": 0, "lost_hit": 320}


async def test_only_equal_openings_are_copies(rig: Rig) -> None:
    """What follows a common opening is each tenant's own; and so is what is equal behind another opening."""
    tail = list(range(64))
    await rig.hear(*(stored([*SYSTEM_PROMPT[:160], *[9000 + k] * 16, *tail], f"salt {k}") for k in range(4)))
    assert await rig.page() == {"cached": 960, "duplicate": 480, "lost_hit": 480}


async def test_adapters_and_pictures_are_not_kept_apart_by_salts(rig: Rig) -> None:
    pictured = stored(SYSTEM_PROMPT[:64], "salt")
    pictured |= {"extra_keys": [["salt"], [["sha of a picture", 3]], None, None], "block_hashes": [1, 2, 3, 4]}
    await rig.hear(*(stored(SYSTEM_PROMPT[:160], lora=name) for name in (None, "ada", "bob")), pictured)
    assert await rig.page() == {"cached": 544, "duplicate": 16, "lost_hit": 16}  # before the picture
    await rig.hear(*(stored(SYSTEM_PROMPT[:160], f"salt {k}", "ada") for k in range(2)))
    assert await rig.page() == {"cached": 864, "duplicate": 336, "lost_hit": 336}


async def test_without_salts_there_is_no_cost(rig: Rig) -> None:
    await rig.hear(stored(SYSTEM_PROMPT), stored(SYSTEM_PROMPT[:160]), stored(list(range(32))))
    assert await rig.page() == {"cached": 6032, "duplicate": 0, "lost_hit": 0}


async def test_sglangs_salts_are_named_once_there_is_one_and_its_extra_key_may_be_an_adapter(rig: Rig) -> None:
    def sglang(first: int, **fields: Any) -> dict[str, Any]:
        event = stored(SYSTEM_PROMPT[:160], block_hashes=list(range(first, first + 10)), **fields)
        return {key: value for key, value in event.items() if key != "extra_keys"}

    await rig.hear(sglang(100), sglang(200, extra_key="ada"))
    assert await rig.page() == {}
    await rig.hear(sglang(300, cache_salt="acme", extra_key="ada"), sglang(400, cache_salt="bolt", extra_key="ada"))
    assert await rig.page() == {"cached": 640, "duplicate": 320, "lost_hit": 320}


async def test_events_that_name_no_salts_tell_nothing_and_the_reason_is_given(rig: Rig) -> None:
    """vLLM before it published extra_keys: two tenants' copies could as well be two pictures' blocks."""
    event = stored(SYSTEM_PROMPT[:160])
    del event["extra_keys"]
    await rig.hear(event, event | {"block_hashes": list(range(500, 510))})
    assert await rig.page() == {}
    told = await rig.document()
    assert "isolation" not in told
    assert "name no salts" in told["absent"]["isolation.a"]


async def test_without_events_nothing_is_told_and_the_reason_is_given(serve_pages: Callable[..., Any]) -> None:
    base = await serve_pages({"/metrics": PAGE})
    target = TargetConfig(name="a", url=f"{base}/metrics")
    async with running(ExporterConfig(targets=(target,), listen="127.0.0.1:0", interval_seconds=0.1)) as exporter:
        assert await page(exporter) == {}
        assert "set kv_events" in (await document(exporter))["absent"]["isolation"]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SimulatedEngine]:
    config = SimulatedEngineConfig(
        model_dir=make_tiny_model(tmp_path / "tiny"),
        step_time=StepTime(0.0005),
        capacity_blocks=512,
        max_model_len=1024,
        kv_events_endpoint=f"ipc://{tmp_path}/kv",
    )
    engine = SimulatedEngine(config)
    await engine.start()
    yield engine
    await engine.stop()


async def test_what_salts_cost_an_engine_is_what_it_hits_without_them(engine: SimulatedEngine, tmp_path: Path) -> None:
    """vllm-project/vllm#52655 (IS08), to the token: ten tenants' prompts share 320 of their 328 tokens."""
    rng = random.Random(1)
    opening = [rng.randrange(300, 900) for _ in range(320)]
    prompts = [[*opening, *(rng.randrange(300, 900) for _ in range(8))] for _ in range(10)]
    target = TargetConfig(name="a", url=f"{engine.url}/metrics", kv_events=(f"ipc://{tmp_path}/kv",))
    config = ExporterConfig(targets=(target,), listen="127.0.0.1:0", interval_seconds=0.1)
    async with running(config) as exporter, aiohttp.ClientSession() as http:

        async def hits(prompt: list[int], **salt: str) -> int:
            body = {"prompt": prompt, "max_tokens": 1, **salt}
            async with http.post(f"{engine.url}/v1/completions", json=body) as answer:
                cached: int = (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        def heard() -> int | None:
            events = exporter.targets[0].kv_events
            counts = events.counts() if events else None
            return counts.resident_blocks if counts else None

        await until(lambda: heard() is not None)
        salted = [await hits(prompt, cache_salt=f"tenant {k}") for k, prompt in enumerate(prompts)]
        await until(lambda: heard() == engine.model.pool.cached_blocks)
        told = await page(exporter)
        unsalted = [await hits(prompt) for prompt in prompts]
    assert salted == [0] * 10
    assert told == {"cached": 3200, "duplicate": 2880, "lost_hit": 2880}
    assert sum(unsalted) == told["lost_hit"]
