"""A drain with two real vLLM engines: its sessions move, with prices in the record; each miss has its three parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.kvcache.request_record import RequestPage, RequestRecord
from prefixwatch.router.config import CacheViewConfig, MovesConfig
from prefixwatch.stack.local.fleet import as_workers
from tests.live.chats import BLOCK, Client, Writer, routed

pytestmark = pytest.mark.vllm

SESSIONS = 8


@pytest_asyncio.fixture
async def client(engines: list[EngineHandle], model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    """A fresh router that moves sessions, fed by the engines' KV events."""
    settings: dict[str, Any] = {
        "cache_view": CacheViewConfig(source="events"),
        "session_keys": ["user"],
        "moves": MovesConfig(enabled=True, kv_bytes_per_token=131_072),
    }
    async with routed(as_workers(engines), model_dir, tmp_path, policy="session", **settings) as client:
        yield client


async def records(client: Client, count: int) -> list[RequestRecord]:
    async with asyncio.timeout(30):
        while True:
            async with client.session.get(f"{client.url}/router/requests") as answer:
                found = msgspec.json.decode(await answer.read(), type=RequestPage).records
            if len(found) >= count:
                return found
            await asyncio.sleep(0.1)


async def test_the_sessions_of_a_drained_engine_go_to_the_other_one_at_a_recorded_price(
    client: Client, writer: Writer
) -> None:
    chats: dict[str, list[dict[str, Any]]] = {
        f"s{k}": writer.conversation(writer.text(300 + 60 * k)) for k in range(SESSIONS)
    }
    home: dict[str, str] = {}
    for _ in range(2):
        for name, messages in chats.items():
            answer = await client.chat(messages, user=name)
            assert home.setdefault(name, answer.worker) == answer.worker
            messages += [
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": writer.text(40)},
            ]
    drained = home["s0"]
    leaving = [name for name in chats if home[name] == drained]

    async with client.session.post(f"{client.url}/router/workers/{drained}/drain") as response:
        moves = (await response.json())["moves"]
    assert moves == {"sessions": len(leaving), "hard": len(leaving), "why": {"no_connector": len(leaving)}}
    later = {name: await client.chat(messages, user=name) for name, messages in chats.items()}

    found = (await records(client, 3 * SESSIONS))[2 * SESSIONS :]
    by_session = dict(zip(chats, found, strict=True))
    for name, record in by_session.items():
        assert later[name].worker != drained
        parts = record.miss_prefill_seconds, record.miss_queue_seconds, record.miss_migrate_seconds
        assert sum(part for part in parts if part is not None) == pytest.approx(record.ttft_seconds)
        if name in leaving:
            assert (record.move, record.move_why, record.move_trigger) == ("hard", "no_connector", "drain")
            assert record.reason == "moved_hard"
            assert record.move_hard_seconds is not None
            assert record.cached_tokens is not None
            assert record.cached_tokens < BLOCK * 4  # the chat template's own opening, at most
        else:
            assert record.move == ""
            assert record.cached_tokens is not None
            assert record.cached_tokens >= 300
