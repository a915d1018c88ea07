"""The exporter in front of two real vLLM engines and our router: its numbers against the test's own books."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import free_port
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.kvcache.index.block_table import warm_up
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import CacheViewConfig, PolicyConfig, RouterConfig
from prefixwatch.stack.local.fleet import as_workers, start_router
from tests.live.chats import Answer, Client, Writer
from tests.live.conftest import Complete, MakePrompt

pytestmark = pytest.mark.vllm

BLOCK = 32
CAPACITY_BLOCKS = 300
SETTLE_SECONDS = 10.0
"""The engine publishes its events and its statistics after the answer; on a busy core well after."""


class EventBook:
    """KV events of an engine as they come from its socket, counted without any of our code."""

    def __init__(self, engine: EngineHandle, context: zmq.asyncio.Context) -> None:
        self.stored = self.removed = 0
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(engine.kv_events.publish)
        self._socket.subscribe(b"")

    async def keep(self) -> None:
        while True:
            *_, payload = await self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    self.stored += len(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    self.removed += len(event["block_hashes"])


@contextlib.asynccontextmanager
async def event_books(engines: Sequence[EngineHandle]) -> AsyncIterator[dict[str, EventBook]]:
    context = zmq.asyncio.Context()
    books = {engine.name: EventBook(engine, context) for engine in engines}
    tasks = [asyncio.create_task(book.keep()) for book in books.values()]
    try:
        yield books
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


def exporting(engines: Sequence[EngineHandle], router: str | None = None) -> ExporterConfig:
    """Scrapes on demand only, so that a window is from one of the test's scrapes to the next."""
    targets = [
        TargetConfig(name=one.name, url=one.url, kv_events=(one.kv_events.publish,), kv_replay=(one.kv_events.replay,))
        for one in engines
    ]
    if router:
        targets.append(TargetConfig(name="router", url=router))
    return ExporterConfig(targets=tuple(targets), listen="127.0.0.1:0", interval_seconds=3600.0, window_seconds=7200.0)


def totals(exporter: Exporter, signal: str) -> dict[str, float]:
    return {target.name: target.store.total(signal) or 0.0 for target in exporter.targets if target.store}


async def until(reached: Callable[[], bool], exporter: Exporter) -> None:
    """Scrape until this is so, or the time to settle is over; the assertions that follow say what is wrong."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not reached() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        await exporter.scrape_all()


async def test_tokens_and_evictions_are_what_the_answers_and_the_events_say(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    """More prompts than the cache holds, each sent twice in a row: hits, and evictions of what came before."""
    prompt_tokens, cached_tokens = Counter[str](), Counter[str]()
    async with event_books(engines) as books, running(exporting(engines)) as exporter:
        await exporter.scrape_all()
        before = {signal: totals(exporter, signal) for signal in ("prefix_query_tokens", "prefix_hit_tokens")}
        started = {name: (book.stored, book.removed) for name, book in books.items()}
        for round_ in range(7):
            for engine in engines:
                prompt = make_prompt(1800 + 32 * round_)
                for _ in range(2):
                    answer = await complete(engine.url, prompt)
                    prompt_tokens[engine.name] += answer.prompt_tokens
                    cached_tokens[engine.name] += answer.cached_tokens

        def grown(signal: str) -> dict[str, float]:
            return {name: total - before[signal][name] for name, total in totals(exporter, signal).items()}

        def counts() -> dict[str, tuple[int, int]]:
            known = {target.name: target.kv_events.counts() for target in exporter.targets if target.kv_events}
            return {name: (one.stored_blocks, one.evicted_blocks) for name, one in known.items() if one}

        def booked() -> dict[str, tuple[int, int]]:
            return {name: (book.stored - started[name][0], book.removed - started[name][1])
                    for name, book in books.items()}  # fmt: skip

        await until(lambda: grown("prefix_query_tokens") == dict(prompt_tokens) and counts() == booked(), exporter)
        assert grown("prefix_query_tokens") == dict(prompt_tokens)
        assert grown("prefix_hit_tokens") == dict(cached_tokens)
        assert all(cached_tokens[engine.name] > 0 for engine in engines)
        assert counts() == booked()
        assert all(evicted > 50 for _, evicted in booked().values())
        for target in exporter.targets:
            assert target.numbers is not None
            assert target.numbers.raw_hit_ratio == cached_tokens[target.name] / prompt_tokens[target.name]
            assert target.numbers.flags["preemption_inflated"] is False


async def test_what_salts_cost_is_what_the_same_prompts_hit_without_them(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt, tokenizer: Tokenizer
) -> None:
    """vllm-project/vllm#52655 (IS08) on a real engine: the salts that its events name, and hits by its answers."""

    def prompts() -> list[list[int]]:
        opening = tokenizer.encode(make_prompt(640)).tolist()
        return [opening + tokenizer.encode(make_prompt(100)).tolist() for _ in range(4)]

    shared_tokens = 3 * 640  # of all but the first
    await asyncio.to_thread(warm_up)
    async with running(exporting(engines[:1])) as exporter:
        (target,) = exporter.targets
        await exporter.scrape_all()

        def lost() -> int:
            counts = target.kv_events.counts() if target.kv_events else None
            return counts.lost_hit_tokens if counts else 0

        salted = [await complete(engines[0].url, p, cache_salt=f"s {k}") for k, p in enumerate(prompts())]
        await until(lambda: lost() >= shared_tokens, exporter)
        cost = lost()
        counts = target.kv_events.counts() if target.kv_events else None
        unsalted = [await complete(engines[0].url, p) for p in prompts()]
    assert [answer.cached_tokens for answer in salted] == [0, 0, 0, 0]
    assert cost == shared_tokens == sum(answer.cached_tokens for answer in unsalted)
    assert counts is not None
    assert (counts.tells_salts, counts.duplicate_tokens) == (True, shared_tokens)


async def test_usage_of_the_cache_is_the_blocks_of_what_runs(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    """While one request runs its own blocks are in use; afterwards none, though they stay cached."""
    engine, prompt, output = engines[0], 2000, 1600
    most = math.ceil((prompt + output) / BLOCK)
    seen: list[float] = []
    async with running(exporting([engine])) as exporter:
        (target,) = exporter.targets
        for _ in range(8):
            answer = asyncio.ensure_future(
                complete(engine.url, make_prompt(prompt), max_tokens=output, ignore_eos=True)
            )
            of_one: list[float] = []
            while not answer.done():
                await exporter.scrape_all()
                if target.numbers and target.numbers.running == 1 and target.numbers.kv_usage_max_ratio:
                    of_one.append(target.numbers.kv_usage_max_ratio * CAPACITY_BLOCKS)
                await asyncio.sleep(0.02)
            assert (await answer).output_tokens == output
            await until(lambda: target.numbers is not None and target.numbers.kv_usage_max_ratio == 0.0, exporter)
            assert target.numbers is not None
            assert target.numbers.kv_usage_max_ratio == 0.0
            assert of_one == sorted(of_one)
            seen += of_one
            if len(seen) >= 3:  # an engine that computes may take seconds to give its page
                break
    assert len(seen) >= 3
    assert all(blocks <= most + 2 for blocks in seen), seen
    assert max(seen) >= math.ceil(prompt / BLOCK) - 1, seen


async def test_the_split_of_first_tokens_is_what_the_client_saw(
    engines: list[EngineHandle], writer: Writer, model_dir: Path, tmp_path: Path
) -> None:
    """Misses, and hits of prompts sent again, or sent again with more behind them; times from the client's clock."""
    config = RouterConfig(
        port=free_port(), workers=as_workers(engines), policy=PolicyConfig(name="cache_aware", seed=1),
        model_dir=model_dir, block_size=BLOCK, cache_view=CacheViewConfig(source="events"),
    )  # fmt: skip
    router = await start_router(config, tmp_path)
    url = f"http://127.0.0.1:{config.port}"
    seen: dict[str, list[float]] = defaultdict(list)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            running(exporting(engines, url)) as exporter,
        ):
            client = Client(url, session)
            await exporter.scrape_all()
            for _ in range(4):
                messages = writer.conversation(writer.text(1500))
                seen["miss"].append(_seconds(await client.chat(messages)))
                await asyncio.sleep(0.3)
                seen["hit"].append(_seconds(await client.chat(messages)))
                longer = [*messages, {"role": "user", "content": writer.text(700)}]
                await asyncio.sleep(0.3)
                seen["hit"].append(_seconds(await client.chat(longer)))  # all that was sent before is reused
            await exporter.scrape_all()
            async with session.get(f"{exporter.url}/metrics") as response:
                page = await response.text()
    finally:
        router.stop()
    counted = _by_cache(page, "count")
    assert {name: count for name, count in counted.items() if count} == {"miss": 4.0, "hit": 8.0}
    for cache, seconds in _by_cache(page, "sum").items():
        if not counted[cache]:
            continue
        # The client's clock starts before the router has read the request, and stops after it has sent the token.
        assert 0 < seconds <= sum(seen[cache])
        assert sum(seen[cache]) - seconds < max(0.05 * len(seen[cache]), 0.25 * sum(seen[cache])), (
            cache,
            seconds,
            seen,
        )
    mean = {cache: _by_cache(page, "sum")[cache] / counted[cache] for cache in ("hit", "miss")}
    assert mean["hit"] < 0.5 * mean["miss"]


def _seconds(answer: Answer) -> float:
    assert answer.ttft_seconds is not None
    return answer.ttft_seconds


def _by_cache(page: str, part: str) -> dict[str, float]:
    name = f"prefixwatch_ttft_seconds_{part}"
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.labels["cache"]: sample.value for sample in samples if sample.name == name and sample.value}
