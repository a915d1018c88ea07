"""Which worker holds which block: one map from chain hash to a bit per worker.

Lookups bisect: if a worker holds block k of a prompt it holds every block before it (engines evict tails
first), so a worker's bit over depth is 1…1 0…0 and one bisection per distinct set of workers finds every
depth. `depths_by_walk` makes no such assumption and is the reference that lookups are audited against.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcache.blocks import Hashes


class BlockIndex:
    """Blocks by worker. Hashes are chain hashes (u64); depths are counted in blocks."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._held: dict[str, set[int]] = {}
        self._bit: dict[str, int] = {}
        self._name: dict[int, str] = {}
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def workers(self) -> Sequence[str]:
        return tuple(self._bit)

    def block_count(self, worker: str) -> int:
        return len(self._held.get(worker, ()))

    def holders(self, block: int) -> list[str]:
        """Workers that hold this block."""
        return self._names(self._holders.get(block, 0))

    def store(self, worker: str, blocks: Iterable[int]) -> None:
        bit = self._bit_of(worker)
        held, holders = self._held[worker], self._holders
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit
            held.add(block)

    def remove(self, worker: str, blocks: Iterable[int]) -> None:
        """Forget blocks of a worker; unknown blocks and workers are no error: removals may arrive twice."""
        bit, held = self._bit.get(worker), self._held.get(worker)
        if bit is None or held is None:
            return
        for block in blocks:
            if block in held:
                held.discard(block)
                self._drop_bit(block, bit)

    def clear(self, worker: str) -> None:
        """The worker holds nothing any more."""
        bit, held = self._bit.get(worker), self._held.get(worker)
        if bit is None or held is None:
            return
        for block in held:
            self._drop_bit(block, bit)
        held.clear()

    def forget(self, worker: str) -> None:
        """The worker has left the fleet: clear it and give its bit away."""
        self.clear(worker)
        bit = self._bit.pop(worker, None)
        if bit is not None:
            del self._name[bit]
            self._held.pop(worker, None)
            self._free_bits.append(bit)

    def depths(self, blocks: Hashes) -> dict[str, int]:
        """Leading blocks of this prompt that each worker holds; workers that hold none are left out."""
        count = len(blocks)
        if not count:
            return {}
        get = self._holders.get
        alive = get(int(blocks[0]), 0)
        found: dict[str, int] = {}
        low = 1  # every worker in `alive` holds at least `low` blocks
        while alive:
            low, survivors = self._bisect(blocks, low, count, alive)
            for name in self._names(alive & ~survivors):
                found[name] = low
            alive, low = survivors, low + 1
        return found

    def depths_by_walk(self, blocks: Hashes) -> dict[str, int]:
        """`depths`, block by block: right even when a worker holds a block without its predecessors."""
        found: dict[str, int] = {}
        alive = -1
        for depth, block in enumerate(blocks.tolist() if isinstance(blocks, np.ndarray) else blocks):
            still = alive & self._holders.get(block, 0)
            if depth:
                for name in self._names(alive & ~still):
                    found[name] = depth
            alive = still
            if not alive:
                return found
        for name in self._names(alive if alive > 0 else 0):
            found[name] = len(blocks)
        return found

    def _bisect(self, blocks: Hashes, low: int, count: int, alive: int) -> tuple[int, int]:
        """Deepest depth that all of `alive` reach, and who of them reaches further."""
        get = self._holders.get
        high = count + 1  # the first depth not reached by all; count + 1 is past the prompt
        while high - low > 1:
            middle = (low + high) // 2
            if get(int(blocks[middle - 1]), 0) & alive == alive:
                low = middle
            else:
                high = middle
        survivors = get(int(blocks[low]), 0) & alive if low < count else 0
        return low, survivors

    def _bit_of(self, worker: str) -> int:
        bit = self._bit.get(worker)
        if bit is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bit)
            self._bit[worker], self._name[bit], self._held[worker] = bit, worker, set()
        return bit

    def _drop_bit(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def _names(self, mask: int) -> list[str]:
        names = []
        while mask:
            bit = mask & -mask
            names.append(self._name[bit])
            mask ^= bit
        return names
