"""The paged KV cache of one engine: a fixed number of blocks, shared by reference count, reused by content.

A block that holds a computed part of a prompt is known by its chain hash. A block that is being filled, or
holds generated tokens, is *blank*: it can't be distinguished from any other, so blanks are counted, not named.

Released blocks keep their content and queue up for eviction, a request's tail before its head, so the least
recently used block goes first and a block never outlives the blocks before it. Blanks are reused before
anything is evicted. All of this is what vLLM's block pool does; unlike vLLM, a block that two requests computed at
the same time is kept once (the second copy becomes a free blank).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks with reference counts. Every operation costs O(1) a block; hashes are chain hashes (u64).

    `capacity_blocks` None means that nothing is ever evicted. Raises ValueError for a capacity below 1.
    """

    __slots__ = ("_free_blanks", "_held_blanks", "_idle", "_references", "capacity_blocks", "evicted_blocks")

    def __init__(self, capacity_blocks: int | None = None) -> None:
        if capacity_blocks is not None and capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1 block, or absent for no limit; got {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        """Blocks ever evicted; a `clear` is not an eviction."""
        self._references: dict[int, int] = {}  # every cached block; 0 while no request uses it
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks with 0 references, next to evict first
        self._held_blanks = 0
        self._free_blanks = capacity_blocks or 0

    def __contains__(self, block: int) -> bool:
        return block in self._references

    @property
    def cached_blocks(self) -> int:
        """Blocks with known content, in use or not."""
        return len(self._references)

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold now."""
        return self._held_blanks + len(self._references) - len(self._idle)

    @property
    def usage_ratio(self) -> float:
        """Used blocks of all blocks, 0 to 1; 0 without a limit. Content kept for reuse is not use (as vLLM counts)."""
        return self.used_blocks / self.capacity_blocks if self.capacity_blocks else 0.0

    @property
    def free_blocks(self) -> int | None:
        """Blocks that can be held without an eviction; None without a limit."""
        return None if self.capacity_blocks is None else self._free_blanks

    @property
    def available_blocks(self) -> int | None:
        """Blocks that can be held, evictions included; None without a limit."""
        return None if self.capacity_blocks is None else self._free_blanks + len(self._idle)

    def blocks(self) -> list[int]:
        """The blocks with known content, in no particular order."""
        return list(self._references)

    def references(self, block: int) -> int:
        """Requests that hold this block; 0 also for a block that is not cached."""
        return self._references.get(block, 0)

    def eviction_order(self) -> list[int]:
        """Cached blocks that no request holds, the next to be evicted first."""
        return list(self._idle)

    def match(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, are cached without a gap."""
        cached = self._references
        for depth, block in enumerate(blocks):
            if block not in cached:
                return depth
        return len(blocks)

    def allocate(self, blanks: int, blocks: Sequence[int] = ()) -> list[int] | None:
        """Hold these cached blocks and as many blanks more, all or nothing.

        Return the blocks evicted for it, or None (and no change) where it doesn't fit. Raises KeyError for a block
        that is not cached.
        """
        references, idle = self._references, self._idle
        evicted: list[int] = []
        missing = 0
        if self.capacity_blocks is not None:
            missing = blanks - self._free_blanks
            if missing > 0 and missing > len(idle) - sum(1 for block in blocks if references[block] == 0):
                return None
        for block in blocks:
            count = references[block]
            if count == 0:
                del idle[block]
            references[block] = count + 1
        if self.capacity_blocks is not None:
            evicted = [self._evict() for _ in range(missing)]
            self._free_blanks += len(evicted) - blanks
        self._held_blanks += blanks
        return evicted

    def commit(self, blocks: Sequence[int]) -> list[int]:
        """As many held blanks now hold these blocks' content, and the caller holds those blocks instead.

        Return the blocks that were not cached before.
        """
        references, idle = self._references, self._idle
        stored = []
        for block in blocks:
            count = references.get(block)
            if count is None:
                stored.append(block)
                count = 0
            elif count == 0:
                del idle[block]
            references[block] = count + 1
        self._held_blanks -= len(blocks)
        if self.capacity_blocks is not None:
            self._free_blanks += len(blocks) - len(stored)
        return stored

    def release(self, blocks: Sequence[int], blanks: int = 0) -> None:
        """A request lets go of what it holds: these blocks, given head first, and some blanks."""
        references, idle = self._references, self._idle
        for block in reversed(blocks):
            count = references[block] - 1
            references[block] = count
            if count == 0:
                idle[block] = None
        self._held_blanks -= blanks
        if self.capacity_blocks is not None:
            self._free_blanks += blanks

    def clear(self) -> bool:
        """Forget all content; False (and no change) while a request holds a block."""
        if self.used_blocks:
            return False
        self._references.clear()
        self._idle.clear()
        self._free_blanks = self.capacity_blocks or 0
        return True

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._references[block]
        self.evicted_blocks += 1
        return block
