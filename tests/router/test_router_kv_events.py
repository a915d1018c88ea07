"""The router's cache view fed by an engine's own KV events, over a real socket."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from tests.router.fake_engine import FakeEngine, until

Start = Any  # a coroutine function, see conftest.start


class Publisher:
    """An engine's event socket; batches are numbered from 0."""

    def __init__(self) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.XPUB)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._sequence = 0

    async def subscribed(self) -> None:
        assert (await self._socket.recv())[:1] == b"\x01"

    async def stored(self, tokens: list[int], block_size: int = 16) -> None:
        blocks = range(100, 100 + len(tokens) // block_size)
        event = {
            "type": "BlockStored",
            "block_hashes": list(blocks),
            "parent_block_hash": None,
            "token_ids": tokens[: len(blocks) * block_size],
            "block_size": block_size,
        }
        await self._publish(event)

    async def cleared(self) -> None:
        await self._publish({"type": "AllBlocksCleared"})

    async def _publish(self, event: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        await self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    socket = Publisher()
    yield socket
    socket.close()


async def test_the_router_predicts_what_the_engine_says_it_holds(
    engines: list[FakeEngine], start: Start, tokenizer: Tokenizer, publisher: Publisher
) -> None:
    """A cleared cache is forgotten at once: vllm-project/aibrix#2287 (RT16)."""
    worker = {"name": "a", "url": engines[0].url, "kv_events": publisher.endpoint}
    client = await start([], policy="cache_aware", workers=[worker], cache_view={"source": "events"})
    await publisher.subscribed()
    text = "x" * 60

    async def predicted() -> str:
        async with client.chat(text) as answer:
            await answer.read()
            return str(answer.headers["x-prefixwatch-predicted-tokens"])

    assert await predicted() == "0"
    assert await predicted() == "0"  # having routed it there proves nothing
    await publisher.stored(tokenizer.encode_chat([{"role": "user", "content": text}]).tolist())
    await until(lambda: client.value("believed_blocks", worker="a") == 4)
    assert await predicted() == "64"
    assert client.value("kv_events_stored_blocks_total", worker="a") == 4
    assert client.value("kv_events_connected", worker="a") == 1
    assert 0 <= client.value("kv_events_lag_seconds", worker="a") < 5
    await publisher.cleared()
    await until(lambda: client.value("believed_blocks", worker="a") == 0)
    assert await predicted() == "0"
