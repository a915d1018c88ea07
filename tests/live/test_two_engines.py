"""Router and exporter in front of two real vLLM engines: what they predict and count is what the engines did."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.kvcache.blocks import block_hashes, namespace_root
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import CacheViewConfig
from prefixwatch.stack.local.fleet import as_workers
from tests.live.chats import BLOCK, Answer, Client, Writer, routed

pytestmark = pytest.mark.vllm

HIT_AT_MOST_OF_MISS = 0.5
"""TTFT of a 2,000-token hit as a share of a miss's; 0.08 was measured, the margin is for noisy neighbours."""


@pytest_asyncio.fixture
async def client(engines: list[EngineHandle], model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    """A fresh `cache_aware` router, fed by the engines' KV events."""
    view = CacheViewConfig(source="events")
    async with routed(as_workers(engines), model_dir, tmp_path, policy="cache_aware", cache_view=view) as client:
        yield client


async def test_reported_hits_are_what_block_hashes_predict(
    client: Client, writer: Writer, tokenizer: Tokenizer
) -> None:
    """The index here is filled with our own hashes only; the router's is fed by the engines' events."""
    ours = BlockIndex()
    systems = [writer.text(n) for n in (300, 700, 1500)]
    hits = 0
    for turn in range(12):
        messages = writer.conversation(systems[turn % 3])
        tokens = tokenizer.encode_chat(messages)
        blocks = block_hashes(tokens, BLOCK, root=namespace_root("acme"))
        answer = await client.chat(messages, cache_salt="acme")
        expected = ours.depths(blocks).get(answer.worker, 0) * BLOCK
        assert answer.cached_tokens is not None
        assert abs(answer.cached_tokens - expected) <= BLOCK
        assert answer.predicted_tokens is not None
        assert abs(answer.cached_tokens - answer.predicted_tokens) <= BLOCK
        ours.store(answer.worker, blocks.tolist())
        hits += answer.cached_tokens > 0
        await asyncio.sleep(0.5)  # the engine publishes its events after the answer, on a busy core a while after
    assert hits >= 9  # every prompt after the first of its three openings


async def test_a_hit_answers_sooner_than_a_miss(client: Client, writer: Writer) -> None:
    misses: list[float] = []
    hits: list[float] = []
    for _ in range(5):
        messages = writer.conversation(writer.text(2000))
        for seconds in (misses, hits):
            answer = await client.chat(messages)
            assert answer.ttft_seconds is not None
            seconds.append(answer.ttft_seconds)
    assert statistics.median(hits) < HIT_AT_MOST_OF_MISS * statistics.median(misses)


async def test_another_salt_never_hits(client: Client, writer: Writer) -> None:
    messages = writer.conversation(writer.text(600))
    await client.chat(messages, cache_salt="acme")
    again = await client.chat(messages, cache_salt="acme")
    assert again.cached_tokens
    for salt in ("globex", "initech"):
        other = await client.chat(messages, cache_salt=salt)
        assert (other.cached_tokens, other.predicted_tokens) == (0, 0)


async def test_the_exporter_counts_the_tokens_that_engines_report(
    client: Client, writer: Writer, engines: list[EngineHandle]
) -> None:
    settings = ExporterConfig(
        targets=tuple(TargetConfig(name=engine.name, url=engine.url) for engine in engines), listen="127.0.0.1:0"
    )
    async with running(settings) as exporter:
        await exporter.scrape_all()
        before = _hit_tokens(exporter.targets)
        system = writer.text(800)
        answers = [await client.chat(writer.conversation(system)) for _ in range(8)]
        reported = sum(answer.cached_tokens or 0 for answer in answers)
        counted = 0.0
        for _ in range(100):  # vLLM logs its statistics after the step, on a busy core a while after
            await exporter.scrape_all()
            counted = _hit_tokens(exporter.targets) - before
            if counted >= reported:
                break
            await asyncio.sleep(0.2)
    assert counted == reported > 0


async def test_killing_an_engine_loses_no_request_that_had_not_begun_to_stream(
    client: Client, writer: Writer, engines: list[EngineHandle]
) -> None:
    async def one(position: int) -> Answer:
        await asyncio.sleep(0.1 * position)
        return await client.chat(writer.conversation(writer.text(400)), max_tokens=300, ignore_eos=True)

    async def kill_once_streaming() -> None:
        """With 299 tokens of an answer still to come from it, whatever the machine's speed."""
        await client.streaming[engines[0].name].wait()
        await asyncio.to_thread(engines[0].process.kill)

    killing = asyncio.create_task(kill_once_streaming())
    answers = await asyncio.gather(*(one(position) for position in range(20)))
    await killing
    lost = [answer for answer in answers if not answer.tokens_seen]
    cut = [answer for answer in answers if answer.tokens_seen and answer.error]
    whole = [answer for answer in answers if answer.done and not answer.error]
    assert lost == []
    assert len(cut) + len(whole) == 20
    assert all(answer.worker == engines[0].name and not answer.done for answer in cut)
    assert cut, "the engine was killed while nothing streamed from it: the test showed nothing"
    with pytest.raises(Exception, match=f"{engines[0].name} was killed by SIGKILL"):
        engines[0].process.check()


def _hit_tokens(targets: Any) -> float:
    totals = [target.store.total("prefix_hit_tokens") for target in targets]
    assert all(total is not None for total in totals)
    return float(sum(totals))
