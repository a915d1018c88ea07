"""Prefill at one real vLLM engine, decode at another: KV goes through the folder that their connectors share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.router.config import SplitConfig
from prefixwatch.stack.local.fleet import as_workers
from tests.live.chats import BLOCK, Client, Writer, routed

pytestmark = pytest.mark.vllm

PROMPT_TOKENS = 1500


@pytest_asyncio.fixture
async def client(sharing: list[EngineHandle], model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    roles = ("prefill", "decode")
    workers = [w.model_copy(update={"role": role}) for w, role in zip(as_workers(sharing), roles, strict=True)]
    split = SplitConfig(enabled=True, prefill_from_tokens=512)
    async with routed(workers, model_dir, tmp_path, policy="cache_aware", split=split) as client:
        yield client


async def test_the_answering_engine_loads_what_the_prefill_engine_computed_and_computes_alone_when_that_is_gone(
    client: Client, sharing: list[EngineHandle]
) -> None:
    prefill, decode = sharing
    writer = Writer("split")
    answer = await client.chat(writer.conversation(writer.text(PROMPT_TOKENS)))
    assert (answer.worker, answer.error, answer.done) == (decode.name, "", True)
    assert answer.cached_tokens is not None
    assert answer.cached_tokens >= PROMPT_TOKENS // BLOCK * BLOCK
    assert await split_prefills(client, "remote") == 1

    short = await client.chat(writer.conversation(writer.text(100)))
    assert (short.worker, short.cached_tokens or 0) == (decode.name, 0)
    assert await split_prefills(client, "local") == 1

    prefill.process.stop()
    alone = await client.chat(writer.conversation(writer.text(PROMPT_TOKENS)))
    assert (alone.worker, alone.error, alone.done, alone.cached_tokens or 0) == (decode.name, "", True, 0)
    assert await split_prefills(client, "failed") + await split_prefills(client, "no_worker") == 1


async def split_prefills(client: Client, outcome: str) -> float:
    async with client.session.get(f"{client.url}/metrics") as page:
        text = await page.text()
    start = f'prefixwatch_router_split_prefills_total{{outcome="{outcome}"}} '
    return sum(float(line.removeprefix(start)) for line in text.splitlines() if line.startswith(start))
