"""KV events on the wire as vLLM publishes them: what an engine stored and evicted, over ZMQ.

A PUB socket sends `[topic, sequence, payload]`: the sequence is 8 bytes big-endian from 0, the payload msgpack
`[timestamp, [event, …], data_parallel_rank]`, an event a map with its `type`. A ROUTER socket replays the last
10,000 batches to whoever sends it the first sequence wanted. As in vLLM an address with `*`, `::`, `ipc://` or
`inproc://` is bound, any other is connected to.

Published block ids are mixed with a constant of this process: like a real engine's they mean nothing outside,
and consumers must hash the token ids themselves. Token ids and salts are plain text in events.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from prefixwatch.engines.model.accounts import BlockEvent, BlockEvicted, BlocksStored
from prefixwatch.engines.model.kinds import EngineKind
from prefixwatch.kvcache.blocks import Tokens

REPLAY_BATCHES = 10_000
_HIGH_WATER_MARK = 100_000
_END_OF_REPLAY = b"\xff" * 8


class PublisherError(Exception):
    """The events can't be published on this address."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The fields of an event about a request, besides its blocks."""

    tokens: Tokens
    blocks: list[int]
    salt: str | None


class EventEncoder:
    """Block events → vLLM's event maps, or SGLang's arrays: a tag, then the fields, and one event per page.

    `constant` (u64) makes the ids this process's own. SGLang's events don't say what separates namespaces.
    """

    def __init__(self, block_size: int, constant: int, kind: EngineKind = "vllm") -> None:
        self._block_size = block_size
        self._constant = constant
        self._sglang = kind == "sglang"

    def engine_id(self, block: int) -> int:
        """The id that this engine publishes for a chain hash."""
        return xxh3_64_intdigest(block.to_bytes(8, "little"), self._constant)

    def encode(self, events: Iterable[BlockEvent], prompts: Mapping[str, Prompt]) -> list[Any]:
        """In order; `prompts` has every request that an event names."""
        if self._sglang:
            return [array for event in events for array in self._arrays(event, prompts)]
        return [self._map(event, prompts) for event in events]

    def _arrays(self, event: BlockEvent, prompts: Mapping[str, Prompt]) -> list[list[Any]]:
        if isinstance(event, BlocksStored):
            prompt, size = prompts[event.request_id], self._block_size
            ids = [self.engine_id(block) for block in prompt.blocks]
            return [
                [
                    *("BlockStored", [ids[k]], ids[k - 1] if k else None),
                    *(prompt.tokens[k * size : (k + 1) * size].tolist(), size, None, "GPU"),
                ]
                for k in range(event.first, event.first + event.count)
            ]
        if isinstance(event, BlockEvicted):
            return [["BlockRemoved", [self.engine_id(event.block)], "GPU"]]
        return [["AllBlocksCleared"]]

    def _map(self, event: BlockEvent, prompts: Mapping[str, Prompt]) -> dict[str, Any]:
        if isinstance(event, BlocksStored):
            return self._stored(event, prompts[event.request_id])
        if isinstance(event, BlockEvicted):
            ids = [self.engine_id(event.block)]
            return {"type": "BlockRemoved", "block_hashes": ids, "medium": "GPU", "group_idx": 0}
        return {"type": "AllBlocksCleared"}

    def _stored(self, event: BlocksStored, prompt: Prompt) -> dict[str, Any]:
        first, end, size = event.first, event.first + event.count, self._block_size
        extra_keys: list[list[str] | None] = [None] * event.count
        if first == 0 and prompt.salt is not None:
            extra_keys[0] = [prompt.salt]
        return {
            "type": "BlockStored",
            "block_hashes": [self.engine_id(block) for block in prompt.blocks[first:end]],
            "parent_block_hash": self.engine_id(prompt.blocks[first - 1]) if first else None,
            "token_ids": prompt.tokens[first * size : end * size].tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


class KvEventPublisher:
    """The two sockets. Raises PublisherError where an address can't be used."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._topic = topic.encode()
        self._sequence = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_HIGH_WATER_MARK)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            self.endpoint = _attach(self._pub, endpoint)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
                self.replay_endpoint = _attach(self._replay, replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise PublisherError(
                f"KV events can't be published on {endpoint} (replay: {replay_endpoint}): {error}; choose a free one"
            ) from error

    def publish(self, events: list[Any]) -> None:
        """Send one batch; an empty one is not sent."""
        if not events:
            return
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._sent.append((sequence, payload))
        with contextlib.suppress(zmq.Again):  # nobody reads fast enough: subscribers see the gap and ask for a replay
            self._pub.send_multipart([self._topic, sequence, payload], zmq.NOBLOCK)

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled; a malformed one gets no answer."""
        if self._replay is None:
            await asyncio.Event().wait()
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, _, start = frames
            for sequence, payload in list(self._sent):
                if sequence >= start:
                    await self._replay.send_multipart([client, b"", self._topic, sequence, payload])
            await self._replay.send_multipart([client, b"", b"", _END_OF_REPLAY, b""])

    def close(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()


def _attach(socket: zmq.Socket[Any], endpoint: str) -> str:
    """Bind or connect by vLLM's rule; returns the address in use (a `*` port resolved)."""
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        socket.bind(endpoint)
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    socket.connect(endpoint)
    return endpoint
