"""What other evictions than LRU would reuse: the clairvoyant bound, and one that goes by frequency. Pure.

Prompts are served one after another; a prompt reuses the leading blocks that the cache holds and leaves all of its own
there. When the cache is full, one block after another is evicted: for Belady's bound the one that is needed again last
(Belady, IBM Systems Journal 5, 1966), for frequency the one that was used least often, the oldest of these first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Literal

from prefixwatch.kvcache.blocks import Hashes

Eviction = Literal["clairvoyant", "frequency"]
_NEVER = 1 << 60


def hit_blocks(prompts: Sequence[Hashes], capacity_blocks: int, eviction: Eviction) -> int:
    """Blocks that a cache of this size reuses under this eviction.

    A block is needed again no sooner, and used no more often, than the one before it. So among equals the deepest goes
    first, and no held block ever lacks the one before it.
    """
    rows = [prompt.tolist() for prompt in prompts]
    upcoming = _next_uses(rows) if eviction == "clairvoyant" else None
    held: dict[int, tuple[int, int]] = {}
    uses: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for position, row in enumerate(rows):
        hits += next((k for k, block in enumerate(row) if block not in held), len(row))
        for depth, block in enumerate(row):
            uses[block] = uses.get(block, 0) + 1
            rank = -upcoming[position][depth] if upcoming is not None else uses[block] * _NEVER + position
            held[block] = (rank, -depth)
            heapq.heappush(heap, (rank, -depth, block))
        while len(held) > capacity_blocks:
            rank, depth, block = heapq.heappop(heap)
            if held.get(block) == (rank, depth):
                del held[block]
    return hits


def _next_uses(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block of each prompt the number of the next prompt that has it."""
    following: dict[int, int] = {}
    found: list[list[int]] = []
    for position in range(len(rows) - 1, -1, -1):
        found.append([following.get(block, _NEVER) for block in rows[position]])
        following.update(dict.fromkeys(rows[position], position))
    return found[::-1]


def curve(
    prompts: Sequence[Hashes], capacities: Sequence[int], lru: Callable[[int], float | None]
) -> list[dict[str, float | int | None]]:
    """Shares of all blocks reused at each capacity: by LRU, by frequency, and at most by any eviction."""
    total = sum(len(prompt) for prompt in prompts)
    return [
        {
            "capacity_blocks": capacity,
            "lru": lru(capacity),
            "frequency": hit_blocks(prompts, capacity, "frequency") / total if total else None,
            "clairvoyant": hit_blocks(prompts, capacity, "clairvoyant") / total if total else None,
        }
        for capacity in capacities
    ]
