"""A store of KV blocks beside the GPUs: a number of blocks, of which the longest unused leaves first."""

from __future__ import annotations

from collections.abc import Sequence

from prefixwatch.engines.model.block_pool import BlockPool


class BlockStore:
    """Blocks by chain hash. `capacity_blocks` None: no limit; 0: it holds nothing."""

    def __init__(self, capacity_blocks: int | None) -> None:
        self._pool = BlockPool(capacity_blocks) if capacity_blocks != 0 else None

    def __contains__(self, block: int) -> bool:
        return self._pool is not None and block in self._pool

    def __len__(self) -> int:
        return 0 if self._pool is None else self._pool.cached_blocks

    def put(self, blocks: Sequence[int]) -> list[int]:
        """Hold these, given head first; returns the blocks that must go for it, these included where they don't
        fit."""
        if self._pool is None:
            return list(blocks)
        gone: list[int] = []
        for block in reversed(blocks):  # the head last, as it is used longest
            if block in self._pool:
                self.touch([block])
                continue
            gone += self._pool.allocate(1) or []
            self._pool.commit([block])
            self._pool.release([block])
        return gone

    def touch(self, blocks: Sequence[int]) -> None:
        """These are used now, as far as they are here."""
        if self._pool is not None:
            here = [block for block in blocks if block in self._pool]
            self._pool.allocate(0, here)
            self._pool.release(here)

    def clear(self) -> None:
        """All is lost."""
        if self._pool is not None:
            self._pool.clear()
