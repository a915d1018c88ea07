"""A feed, its index, and an engine's payloads for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixwatch.kvcache.blocks import as_tokens, block_hashes, namespace_root
from prefixwatch.kvcache.events.feed import Applied, WorkerFeed
from prefixwatch.kvcache.events.wire import Tier
from prefixwatch.kvcache.index.block_index import BlockIndex

PROMPT = list(range(1, 161))
OURS = block_hashes(as_tokens(PROMPT)).tolist()


class Bench:
    """A feed, its index and the engine's payloads, numbered as they are made."""

    def __init__(self, wire: Any, block_size: int = 16, tiers: dict[Tier, BlockIndex] | None = None) -> None:
        self.wire, self.index, self.block_size = wire, BlockIndex(), block_size
        self.feed = WorkerFeed("w", self.index, block_size, tiers=tiers)
        self.next = 0

    def send(self, *events: Any, at: float = 0.0) -> Applied:
        self.next += 1
        return self.feed.apply(self.next - 1, self.wire.batch(*events), at)

    def run(self, first: int, last: int, block_size: int = 16, base: int = 100, **fields: Any) -> dict[str, Any]:
        """Engine blocks first … last-1 of PROMPT, named base + position."""
        tokens = PROMPT[first * block_size : last * block_size]
        parent = base + first - 1 if first else None
        event = self.wire.stored(range(base + first, base + last), tokens, parent, block_size, **fields)
        return dict(event)

    def depth(self, tokens: Sequence[int] = PROMPT, **namespace: str) -> int:
        root = namespace_root(**namespace)
        blocks = block_hashes(as_tokens(tokens), self.block_size, root=root)
        assert self.index.depths(blocks) == self.index.depths_by_walk(blocks)
        return self.index.depths(blocks).get("w", 0)
