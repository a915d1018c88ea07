"""KV-event payloads as vLLM writes them, for the tests of decoding, feed and subscriber."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.kvcache.feed_bench import Bench


class Wire:
    """Builds the msgpack payloads of one engine; every batch has its own timestamp, as in reality."""

    def __init__(self) -> None:
        self.timestamp = 1000.0

    def stored(
        self, ids: Sequence[Any], tokens: Sequence[int], parent: Any = None, block_size: int = 16, **fields: Any
    ) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": list(ids),
            "parent_block_hash": parent,
            "token_ids": list(tokens),
            "block_size": block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            **fields,
        }

    def removed(self, ids: Sequence[Any], **fields: Any) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": list(ids), "medium": "GPU", **fields}

    def cleared(self) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"}

    def batch(self, *events: Any, rank: int | None = 0) -> bytes:
        self.timestamp += 0.5
        return msgspec.msgpack.encode([self.timestamp, list(events), rank])


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def bench(wire: Wire) -> Bench:
    return Bench(wire)
