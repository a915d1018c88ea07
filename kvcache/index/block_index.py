"""Which worker holds which block: one map from chain hash to a bit per worker.

Lookups bisect: if a worker holds block k of a prompt it holds every block before it (engines evict tails
first), so a worker's bit over depth is 1…1 0…0 and one bisection per distinct set of workers finds every
depth. `depths_by_walk` makes no such assumption and is the reference that lookups are audited against.

Clearing a worker takes its bit away at once; the entries that still carry the dead bit are swept a few at a
time by later stores and removals, so that a worker of 400,000 blocks never holds up a decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from prefixwatch.kvcache.blocks import Hashes

_SWEPT_AT_ONCE = 512
_FEW_BITS = 8


class BlockIndex:
    """Blocks by worker. Hashes are chain hashes (u64); depths are counted in blocks."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._held: dict[str, set[int]] = {}
        self._bit: dict[str, int] = {}
        self._name_at: list[str] = []  # by position of the bit; empty where no worker has it
        self._live = 0
        self._free_bits: list[int] = []
        self._dead: deque[tuple[int, set[int]]] = deque()
        self._unit: dict[str, int] = {}

    def __len__(self) -> int:
        """Distinct blocks, those of cleared workers included until they are swept."""
        return len(self._holders)

    @property
    def workers(self) -> Sequence[str]:
        return tuple(self._bit)

    def block_count(self, worker: str) -> int:
        return len(self._held.get(worker, ()))

    def holds(self, worker: str, block: int) -> bool:
        return block in self._held.get(worker, ())

    def holders(self, block: int) -> list[str]:
        """Workers that hold this block."""
        return self._names(self._holders.get(block, 0) & self._live)

    def set_retrieval_unit(self, worker: str, blocks: int) -> None:
        """This worker can only reuse whole groups of this number of blocks: its own blocks are that much larger.

        Its depths are rounded down accordingly. The unit outlives `clear` and ends with `forget`.
        """
        if blocks < 1:
            raise ValueError(f"a retrieval unit is at least 1 block, got {blocks}")
        if blocks == 1:
            self._unit.pop(worker, None)
        else:
            self._unit[worker] = blocks

    def store(self, worker: str, blocks: Collection[int]) -> None:
        bit = self._bit_of(worker)
        held, holders = self._held[worker], self._holders
        before, known = len(held), holders.get
        held.update(blocks)
        for block in blocks:
            others = known(block)
            holders[block] = bit if others is None else others | bit  # sharing one int: most blocks have one holder
        self._sweep(max(_SWEPT_AT_ONCE, 2 * (len(held) - before)))

    def remove(self, worker: str, blocks: Iterable[int]) -> None:
        """Forget blocks of a worker; unknown blocks and workers are no error: removals may arrive twice."""
        bit, held = self._bit.get(worker), self._held.get(worker)
        if bit is not None and held is not None:
            holders, others = self._holders, ~bit
            for block in blocks:
                if block in held:
                    held.discard(block)
                    if holders[block] == bit:
                        del holders[block]
                    else:
                        holders[block] &= others
        self._sweep(_SWEPT_AT_ONCE)

    def clear(self, worker: str) -> None:
        """The worker holds nothing any more."""
        if self._held.get(worker):
            self._retire_bit(worker)
            self._bit_of(worker)

    def forget(self, worker: str) -> None:
        """The worker has left the fleet: clear it and give its bit away."""
        self._unit.pop(worker, None)
        if worker in self._bit:
            self._retire_bit(worker)

    def depths(self, blocks: Hashes) -> dict[str, int]:
        """Leading blocks of this prompt that each worker can reuse; workers with none are left out."""
        if not len(blocks):
            return {}
        holders, block_at = self._holders.get, blocks.item
        alive = holders(block_at(0), 0) & self._live
        found: dict[str, int] = {}
        low = 1  # every worker in `alive` holds at least `low` blocks
        missed: list[tuple[int, int]] = []  # depths that some didn't reach and who did, the shallowest last
        while alive:
            while missed and missed[-1][1] & alive == alive:  # a probe for others has answered for these
                low = missed.pop()[0]
            high = missed[-1][0] if missed else len(blocks) + 1
            while high - low > 1:
                middle = (low + high) // 2
                reached_by = holders(block_at(middle - 1), 0)
                if reached_by & alive == alive:
                    low = middle
                else:
                    high = middle
                    missed.append((middle, reached_by))
            survivors = missed[-1][1] & alive if missed else 0
            for name in self._names(alive & ~survivors):
                found[name] = low
            alive = survivors
        return self._in_units(found)

    def depths_by_walk(self, blocks: Hashes) -> dict[str, int]:
        """`depths`, block by block: right even when a worker holds a block without its predecessors."""
        found: dict[str, int] = {}
        alive, holders = self._live, self._holders.get
        for depth, block in enumerate(blocks.tolist()):
            still = alive & holders(block, 0)
            if still == alive:
                continue
            if depth:
                for name in self._names(alive & ~still):
                    found[name] = depth
            alive = still
            if not alive:
                break
        if len(blocks):
            for name in self._names(alive):
                found[name] = len(blocks)
        return self._in_units(found)

    def _in_units(self, found: dict[str, int]) -> dict[str, int]:
        if not self._unit:
            return found
        rounded = {name: depth - depth % self._unit.get(name, 1) for name, depth in found.items()}
        return {name: depth for name, depth in rounded.items() if depth}

    def _bit_of(self, worker: str) -> int:
        bit = self._bit.get(worker)
        if bit is None:
            if self._free_bits:
                bit = self._free_bits.pop()
            else:
                bit = 1 << len(self._name_at)
                self._name_at.append(worker)
            self._name_at[bit.bit_length() - 1] = worker
            self._bit[worker], self._held[worker] = bit, set()
            self._live |= bit
        return bit

    def _retire_bit(self, worker: str) -> None:
        """Take the worker's bit out of every answer now, and out of the map piece by piece."""
        bit = self._bit.pop(worker)
        self._live &= ~bit
        self._name_at[bit.bit_length() - 1] = ""
        self._dead.append((bit, self._held.pop(worker)))

    def _sweep(self, budget: int) -> None:
        """Take up to `budget` dead entries out; more than stores put in, so that dead ones never pile up."""
        while self._dead and budget > 0:
            bit, held = self._dead[0]
            for _ in range(min(budget, len(held))):
                self._drop_bit(held.pop(), bit)
                budget -= 1
            if not held:
                self._dead.popleft()
                self._free_bits.append(bit)

    def _drop_bit(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def _names(self, mask: int) -> list[str]:
        name_at = self._name_at
        if mask.bit_count() > _FEW_BITS:  # cheaper from an array than taking bits off one by one
            packed = np.frombuffer(mask.to_bytes(-(-len(name_at) // 8), "little"), dtype=np.uint8)
            return [name_at[place] for place in np.unpackbits(packed, bitorder="little").nonzero()[0].tolist()]
        names = []
        while mask:
            bit = mask & -mask
            names.append(name_at[bit.bit_length() - 1])
            mask ^= bit
        return names
