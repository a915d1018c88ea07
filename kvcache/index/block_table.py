"""All blocks of a fleet in columns: which exist, what each continues, how many workers hold it and since when.

What a router's index answers is "who holds this prompt?"; this table answers "what is cached where, and how does it
hang together?", for tens of bytes a block. A block is a row, named by its chain hash (`kvcache.blocks`); its parent is
the block before it. A block that every worker has evicted stays as long as blocks that continue it do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from types import ModuleType

import numpy as np
import numpy.typing as npt

from prefixwatch.kvcache.blocks import Hashes, as_tokens, block_hashes
from prefixwatch.kvcache.index.table_layout import (
    BLOCK,
    DUPLICATE_TOKENS,
    EVICTED,
    EVICTED_ENTRY,
    FRESH_ROW,
    HELD_ROWS,
    LOST_TOKENS,
    OPENING_ENTRY,
    ORPHAN,
    REGRETTED,
    REMEMBERED,
    REMOVED,
    RESIDENT,
    ROW_ENTRY,
    STORED,
    STORED_BARE,
    STORED_UNDER,
    WORKER_ENTRY,
    Batch,
    Fleet,
    Worker,
)

REGRET_SECONDS = 300.0
"""A block that is stored again within this time after its eviction was evicted too early."""

LIFETIME_BOUNDS_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)

_EVICTIONS_REMEMBERED = 2**18
"""Of one worker; one that evicts more than that in `REGRET_SECONDS` regrets more than is counted."""
_SMALLEST = 16
_FULLEST = 0.75

_NONE = np.zeros(0, dtype=np.uint64)
_WARMING_UP = Lock()


@cache
def _kernel() -> ModuleType:
    """The loops, compiled (seconds, once per machine) or loaded from the cache, for the types of a table alone."""
    from prefixwatch.kvcache.index import table_kernel  # noqa: PLC0415  # numba takes 60 MB

    return table_kernel


Records = npt.NDArray[np.void]
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Runs:
    """What a batch of events says, block by block: see `kvcache.index.table_kernel.apply_runs`."""

    kinds: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    parents: npt.NDArray[np.uint64]
    openings: npt.NDArray[np.uint64]
    ids: npt.NDArray[np.uint64]
    contents: Hashes
    block_tokens: int
    removals: int
    salted: bool = False
    """Whether a run begins under a salt: then its opening isn't its parent."""

    @classmethod
    def of(
        cls,
        runs: Sequence[tuple[int, int, int]],
        ids: Hashes,
        contents: Hashes = _NONE,
        block_tokens: int = 16,
        openings: Sequence[int] | None = None,
    ) -> Runs:
        """Of (kind, size, parent) a run; without `openings` none has a salt."""
        kinds, sizes, parents = zip(*runs, strict=True)
        return cls(
            np.array(kinds, dtype=np.int32),
            np.array(sizes, dtype=np.int32),
            np.array(parents, dtype=np.uint64),
            np.array(parents if openings is None else openings, dtype=np.uint64),
            ids,
            contents,
            block_tokens,
            sum(size for kind, size, _ in runs if kind == REMOVED),
            salted=openings is not None,
        )


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """The table at one moment, in arrays of its own."""

    version: int
    blocks: Records
    """Rows, free ones included: `kvcache.index.table_layout.BLOCK`."""
    held: Mapping[str, Records]
    """By worker, its whole table: copied as it stands, which is quickest."""

    @property
    def rows_held(self) -> Mapping[str, Rows]:
        """By worker: the rows of the blocks that it holds."""
        return {name: held["row"][held["key"] != 0] for name, held in self.held.items()}


class BlockTable:
    """The blocks of all workers. `version` changes with its content."""

    def __init__(self) -> None:
        self.version = 0
        self.workers: dict[str, WorkerBlocks] = {}
        self.blocks = np.zeros(_SMALLEST, dtype=BLOCK)
        self.rows = np.zeros(_SMALLEST, dtype=ROW_ENTRY)
        self.counts = np.array([0, -1, 0], dtype=np.int64)

    def __len__(self) -> int:
        """Distinct blocks that some worker holds."""
        return int(self.counts[HELD_ROWS])

    @property
    def nbytes(self) -> int:
        """Memory of the table, its workers' parts included."""
        return self.blocks.nbytes + self.rows.nbytes + sum(worker.nbytes for worker in self.workers.values())

    def join(self, name: str) -> WorkerBlocks:
        """A worker's part, empty; one that was there under this name is gone."""
        if name in self.workers:
            self.leave(name, self.workers[name])
        self.workers[name] = WorkerBlocks(self)
        return self.workers[name]

    def leave(self, name: str, worker: WorkerBlocks) -> None:
        """The worker has left the fleet; another that took its name meanwhile stays."""
        worker.clear()
        if self.workers.get(name) is worker:
            del self.workers[name]
            self.version += 1

    def make_room(self, blocks: int) -> None:
        """Make room for this number of new rows."""
        used = int(self.counts[FRESH_ROW]) + blocks  # free rows are not counted on, so this is more than is needed
        if used > len(self.blocks):
            grown = np.zeros(max(used, len(self.blocks) * 5 // 4), dtype=BLOCK)
            grown[: len(self.blocks)] = self.blocks
            self.blocks = grown
        self.rows = roomy(self.rows, used)

    def arrays(self) -> Fleet:
        """As the kernels take them."""
        return Fleet(self.blocks, self.rows, self.counts)

    def snapshot(self) -> TableSnapshot:
        """A copy; some milliseconds for a million blocks."""
        held = {name: worker.entries() for name, worker in self.workers.items()}
        return TableSnapshot(self.version, self.blocks[: int(self.counts[FRESH_ROW])].copy(), held)


class WorkerBlocks:
    """One worker's blocks, and those that it evicted."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._held = np.zeros(_SMALLEST, dtype=WORKER_ENTRY)
        self._evicted = np.zeros(_SMALLEST, dtype=EVICTED_ENTRY)
        self._openings = np.zeros(0, dtype=OPENING_ENTRY)
        self._counts = np.zeros(8, dtype=np.int64)
        self._ages = np.zeros(len(LIFETIME_BOUNDS_SECONDS) + 1, dtype=np.int64)
        self._ages_sum = np.zeros(1)

    @property
    def stored_blocks(self) -> int:
        return int(self._counts[STORED])

    @property
    def evicted_blocks(self) -> int:
        """Evicted one by one; a cache that is dropped as a whole is none."""
        return int(self._counts[EVICTED])

    @property
    def regretted_blocks(self) -> int:
        """Stored again within `REGRET_SECONDS` of their eviction."""
        return int(self._counts[REGRETTED])

    @property
    def resident_blocks(self) -> int:
        return int(self._counts[RESIDENT])

    @property
    def duplicate_tokens(self) -> int:
        """Tokens of the blocks held that differ from another one held only by their salt: what sharing would free.

        Of ten tenants' copies of a block nine count. An adapter's or a picture's blocks are no copies of another's.
        """
        return int(self._counts[DUPLICATE_TOKENS])

    @property
    def lost_tokens(self) -> int:
        """Tokens of the blocks stored while one was held that differs only by its salt: hits, without salts."""
        return int(self._counts[LOST_TOKENS])

    @property
    def lifetimes(self) -> tuple[list[int], float]:
        """Evictions by how long after its storing: up to each of `LIFETIME_BOUNDS_SECONDS` and above (not cumulative),
        and the sum of these times in seconds."""
        return self._ages.tolist(), float(self._ages_sum[0])

    @property
    def nbytes(self) -> int:
        return self._held.nbytes + self._evicted.nbytes + self._openings.nbytes

    @property
    def evicted_nbytes(self) -> int:
        """Of this, what remembers evictions."""
        return self._evicted.nbytes

    def entries(self) -> Records:
        """A copy of its table."""
        return self._held.copy()

    def apply(self, said: Runs, at_seconds: float, *, counting: bool = True) -> npt.NDArray[np.int64]:
        """Take a batch of events that happened at `at_seconds`; return the positions of its orphans: stored runs
        whose parent this worker doesn't hold, and which changed nothing.

        What isn't `counting` changes what is held, but no total.
        """
        table = self._table
        new = len(said.contents)
        if new:
            table.make_room(new)
            self._held = roomy(self._held, self.resident_blocks + new)
            self._make_openings(said, self.resident_blocks + new)
        if said.removals:
            remembered = min(int(self._counts[REMEMBERED]) + said.removals, _EVICTIONS_REMEMBERED)
            self._evicted = roomy(self._evicted, remembered)
        outcomes = np.zeros(len(said.kinds), dtype=np.int8)
        batch = Batch(
            said.kinds,
            said.sizes,
            said.parents,
            said.openings,
            said.ids,
            said.contents,
            said.block_tokens,
            float(at_seconds),
            REGRET_SECONDS,
            counting,
        )
        openings = self._openings if len(self._openings) else None
        _kernel().apply_runs(batch, outcomes, self._arrays(), openings, table.arrays())
        table.version += 1
        return np.flatnonzero(outcomes == ORPHAN)

    def clear(self) -> None:
        """The cache was dropped as a whole: its blocks weren't evicted, and what is stored next is not a regret."""
        if self._counts[RESIDENT]:
            _kernel().release_all(self._held, self._table.arrays())
            self._table.version += 1
        self._held = np.zeros(_SMALLEST, dtype=WORKER_ENTRY)
        self._evicted = np.zeros(_SMALLEST, dtype=EVICTED_ENTRY)
        self._openings = np.zeros(0, dtype=OPENING_ENTRY)
        self._counts[RESIDENT:] = 0

    def _make_openings(self, said: Runs, blocks: int) -> None:
        """Make room for this number of blocks; a worker that never salts keeps no such table."""
        if len(self._openings):
            self._openings = roomy(self._openings, blocks)
        elif said.salted:
            self._openings = roomy(np.zeros(_SMALLEST, dtype=OPENING_ENTRY), blocks)
            _kernel().open_all(self._openings, self._arrays(), self._table.arrays())

    def _arrays(self) -> Worker:
        return Worker(self._held, self._evicted, self._counts, _BOUNDS, self._ages, self._ages_sum)


_BOUNDS = np.array(LIFETIME_BOUNDS_SECONDS)


def roomy(table: Records, entries: int) -> Records:
    """The table, or a larger one with the same entries: at most three quarters full with that number."""
    size = len(table)
    while entries > _FULLEST * size:
        size *= 2
    if size == len(table):
        return table
    larger = np.zeros(size, dtype=table.dtype)
    _kernel().rehash(table, larger)
    return larger


def warm_up() -> None:
    """Compile, or load, the kernels now rather than with the first batch: seconds once, then some milliseconds.

    After this nothing is compiled any more, whatever an engine sends. Threads wait for the one that is at it: what it
    freezes, they could no longer compile.
    """
    with _WARMING_UP:
        _compile_all()


@cache
def _compile_all() -> None:
    table = BlockTable()
    worker = table.join("")
    ones = np.ones(3, dtype=np.uint64)
    runs = [(STORED_BARE, 1, 0), (REMOVED, 1, 0), (STORED_BARE, 1, 0)]
    worker.apply(Runs.of(runs, ones, ones[:2]), 0.0)
    worker.apply(Runs.of([(STORED_UNDER, 1, 1)], ones[:1], ones[:1], openings=[0]), 0.0)
    block_hashes(as_tokens([0] * 16))
    for columns in (table.rows, worker._held, worker._evicted, worker._openings):
        roomy(columns, 100)
    worker.clear()
    _kernel().freeze()
