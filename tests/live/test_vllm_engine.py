"""Real vLLM engines, asked directly: what they report as cached is what our blocks, events and tokens predict."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from prefixwatch.engines.fleet import EngineHandle, reset_caches
from prefixwatch.engines.process import ProcessFailed, group_members
from prefixwatch.kvcache.blocks import Hashes, block_hashes, namespace_root
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.events.subscriber import KvEventSubscriber
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer

pytestmark = pytest.mark.vllm

BLOCK = 32
USABLE_BLOCKS = 299  # of 300: vLLM keeps one as a placeholder

Complete = Callable[..., Awaitable[Any]]
MakePrompt = Callable[[int], str]


def cacheable_tokens(prompt_tokens: int) -> int:
    """Most that an engine can report as cached: whole blocks, and the last token is always computed."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


class CacheView:
    """An engine's cache as its events tell it."""

    def __init__(self, engine: EngineHandle, tokenizer: Tokenizer, complete: Complete, make_prompt: MakePrompt) -> None:
        self.index = BlockIndex()
        self.feed = WorkerFeed(engine.name, self.index, BLOCK)
        self.changed = asyncio.Event()
        self._engine, self._tokenizer = engine, tokenizer
        self._complete, self._make_prompt = complete, make_prompt

    def blocks(self, prompt: str, salt: str | None = None) -> Hashes:
        return block_hashes(self._tokenizer.encode(prompt), BLOCK, root=namespace_root(salt))

    def depth(self, prompt: str, salt: str | None = None) -> int:
        """Leading blocks of the prompt that the engine holds; the bisecting lookup must agree with the walk."""
        blocks = self.blocks(prompt, salt)
        found = self.index.depths(blocks)
        assert found == self.index.depths_by_walk(blocks)
        return found.get(self._engine.name, 0)

    def predicted_tokens(self, prompt: str, salt: str | None = None) -> int:
        """What the engine should report as cached for this prompt."""
        return min(self.depth(prompt, salt) * BLOCK, cacheable_tokens(len(self._tokenizer.encode(prompt))))

    async def settle(self) -> None:
        """Returns once all events so far are in: events are ordered, so a block sent last is seen last."""
        last = self._make_prompt(BLOCK)
        await self._complete(self._engine.url, last)
        async with asyncio.timeout(60):
            while self.depth(last) == 0:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def watch(
    engine: EngineHandle, tokenizer: Tokenizer, complete: Complete, make_prompt: MakePrompt
) -> AsyncIterator[CacheView]:
    view = CacheView(engine, tokenizer, complete, make_prompt)
    subscriber = KvEventSubscriber(
        engine.name,
        engine.kv_events_endpoint,
        engine.replay_endpoint,
        view.feed,
        on_applied=lambda _: view.changed.set(),
    )
    task = asyncio.create_task(subscriber.run())
    try:
        await view.settle()
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture
async def view(
    engines: list[EngineHandle], tokenizer: Tokenizer, complete: Complete, make_prompt: MakePrompt
) -> AsyncIterator[CacheView]:
    """The first engine's cache."""
    async with watch(engines[0], tokenizer, complete, make_prompt) as view:
        yield view


async def test_serves_the_model_under_its_name(engines: list[EngineHandle], session: aiohttp.ClientSession) -> None:
    for engine in engines:
        async with session.get(f"{engine.url}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == [engine.model] == ["tiny"]


async def test_a_repeat_is_cached_in_whole_blocks_but_for_the_last_token(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    for tokens, cached in [(2048, 2016), (2049, 2048), (2047, 2016), (31, 0), (33, 32)]:
        prompt = make_prompt(tokens)
        first, again = await complete(engines[0].url, prompt), await complete(engines[0].url, prompt)
        assert (first.prompt_tokens, first.cached_tokens) == (tokens, 0)
        assert (again.prompt_tokens, again.cached_tokens) == (tokens, cached)
    elsewhere = await complete(engines[1].url, prompt)
    assert elsewhere.cached_tokens == 0


async def test_a_hit_answers_in_less_than_half_the_time_of_a_miss(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    """2,048 tokens: about 25 against 400 ms on two cores."""
    misses, hits = [], []
    await complete(engines[0].url, make_prompt(64))
    for _ in range(5):
        prompt = make_prompt(2048)
        misses.append((await complete(engines[0].url, prompt)).ttft_seconds)
        hits.append((await complete(engines[0].url, prompt)).ttft_seconds)
    assert statistics.median(hits) < statistics.median(misses) / 2


async def test_a_salt_shares_nothing_with_another_or_with_none(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(1024)
    namespaces: list[dict[str, str]] = [{}, {"cache_salt": "tenant-a"}, {"cache_salt": "tenant-b"}]
    first = [(await complete(engines[0].url, prompt, **salt)).cached_tokens for salt in namespaces]
    again = [(await complete(engines[0].url, prompt, **salt)).cached_tokens for salt in namespaces]
    assert first == [0, 0, 0]
    assert again == [992, 992, 992]


async def test_events_predict_exactly_what_is_reported(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt, view: CacheView
) -> None:
    """Shared openings of many lengths, in two namespaces; predictions come from events and our hashes alone."""
    opening = make_prompt(1536).split()
    sent: set[int] = set()
    before = view.index.block_count(engines[0].name)
    for salt in (None, "tenant-a"):
        fields = {"cache_salt": salt} if salt else {}
        for shared in (1536, 1536, 1000, 64, 31):
            prompt = "".join(f" {word}" for word in opening[:shared]) + make_prompt(200)
            predicted = view.predicted_tokens(prompt, salt)
            assert (await complete(engines[0].url, prompt, **fields)).cached_tokens == predicted
            await view.settle()
            sent.update(view.blocks(prompt, salt).tolist())
    assert predicted == 0
    assert view.index.block_count(engines[0].name) == before + len(sent) + 10, "ten more to settle"
    counters = view.feed.counters
    assert (counters.malformed_batches, counters.unknown_parents, counters.ignored_events) == (0, 0, 0)


async def test_events_follow_evictions(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt, view: CacheView
) -> None:
    """Eight prompts of 64 blocks in turn through 299 blocks: what was pushed out is neither claimed nor found."""
    prompts = [make_prompt(2048) for _ in range(8)]
    reported = []
    for prompt in [*prompts, *reversed(prompts)]:
        predicted = view.predicted_tokens(prompt)
        reported.append((await complete(engines[0].url, prompt)).cached_tokens)
        assert reported[-1] == predicted
        await view.settle()
        assert view.index.block_count(engines[0].name) <= USABLE_BLOCKS
    assert reported[:12] == [0] * 8 + [2016] * 4
    assert 0 < reported[12] < 2016
    assert reported[13:] == [0] * 3


async def test_a_block_that_was_evicted_once_may_have_another_copy(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt, view: CacheView
) -> None:
    """vLLM computes the last block of a repeated prompt again, stores it beside the first and says so twice.

    When the idle copy goes it says "removed" once, while the other one still serves what was built on it.
    """
    url, prompt = engines[0].url, make_prompt(512)
    longer = prompt + make_prompt(512)
    for each in (prompt, prompt, longer):
        await complete(url, each)
    for _ in range(4):
        await complete(url, make_prompt(1984))
    used_blocks = 1 + 16 + 1 + 16 + 4 * 62  # the first is the one that settled the view
    for _ in range(USABLE_BLOCKS - used_blocks + 2):  # two more than fit: that first one goes, then the idle copy
        await view.settle()
    assert view.predicted_tokens(longer + " more") == 1024
    assert (await complete(url, longer + " more")).cached_tokens == 1024


async def test_a_late_subscriber_learns_what_was_cached_before(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt, tokenizer: Tokenizer
) -> None:
    prompt = make_prompt(640)
    await complete(engines[1].url, prompt)
    async with watch(engines[1], tokenizer, complete, make_prompt) as view:
        assert view.depth(prompt) == 20


async def test_after_a_reset_the_next_request_misses(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt, view: CacheView
) -> None:
    prompt = make_prompt(640)
    await complete(engines[0].url, prompt)
    await view.settle()
    assert view.depth(prompt) == 20
    await reset_caches(engines)
    await view.settle()  # the engine says with its next request that it was cleared
    assert view.depth(prompt) == 0
    assert view.index.block_count(engines[0].name) == 1
    assert (await complete(engines[0].url, prompt)).cached_tokens == 0


@pytest.mark.parametrize(
    "text",
    [
        " hello world",
        "The quick brown fox: 42 µs — naïve 東京 🦊\n\n\ttabs",
        "<|im_start|>system\nan injected turn<|im_end|>\n",
        "   leading and trailing   ",
    ],
)
async def test_our_tokens_are_the_engine_s(
    engines: list[EngineHandle], session: aiohttp.ClientSession, tokenizer: Tokenizer, text: str
) -> None:
    conversation = [
        {"role": "system", "content": "answer in one word"},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": f"{text}{text}"},
    ]

    async def engine_tokens(**body: Any) -> list[int]:
        async with session.post(f"{engines[0].url}/tokenize", json={"model": "tiny", **body}) as response:
            tokens: list[int] = (await response.json())["tokens"]
            return tokens

    assert tokenizer.encode_chat(conversation).tolist() == await engine_tokens(messages=conversation)
    assert tokenizer.encode(text, add_special_tokens=True).tolist() == await engine_tokens(prompt=text)


async def test_output_is_printable_to_its_full_length_and_equal_on_both_engines(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    """So no stream ends early or holds back half a character; engines may put several tokens into one delta."""
    prompt = make_prompt(100)
    answers = [await complete(engine.url, prompt, max_tokens=100, temperature=0) for engine in engines]
    sampled = await complete(engines[0].url, prompt, max_tokens=300)
    texts = ["".join(answer.deltas) for answer in [*answers, sampled]]
    assert texts[0] == texts[1]
    assert all(text.isascii() and text.isprintable() for text in texts)
    assert [answer.output_tokens for answer in [*answers, sampled]] == [100, 100, 300]
    assert sampled.finish_reason == "length"


async def test_a_killed_engine_is_reported_and_leaves_nothing_behind(engines: list[EngineHandle]) -> None:
    """Killing the API server orphans its core and worker processes."""
    process = engines[1].process
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessFailed) as caught:
        await process.wait_ready(f"{engines[1].url}/no-such-page", timeout_seconds=10)
    message = str(caught.value)
    assert message.startswith("vllm-1 was killed by SIGKILL before it was ready; the end of its log ")
    assert str(process.log_file) in message
    process.stop(grace_seconds=1)
    assert list(group_members(process.pid)) == []
    _, alive = psutil.wait_procs(children, timeout=5)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    with pytest.raises(ProcessFailed, match="vllm-1 was killed by SIGKILL"):
        process.check()
    assert engines[0].process.alive
