"""What the block index costs: memory by block and holder, stores and lookups a second, forgetting a worker.

    python -m benchmarks.index_memory [--blocks N] [--workers N] [--json]

Unique blocks are spread over the workers, one holder each; then every worker stores one shared set as well. Smaller
indexes show what a block costs that 1, 4 or 64 workers hold. Prompts looked up have 2,048 blocks, or twice what a
worker holds where that is less; one worker holds the first half. Bytes are what Python allocated (tracemalloc): the
index's dicts and sets are up to four times as large as their content just after they have grown, so figures vary with
the sizes. Times are the thread's own CPU time.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from prefixwatch.kvcache.blocks import Hashes
from prefixwatch.kvcache.index.block_index import BlockIndex

_BATCH = 64
_COPIES = (1, 4, 64)
_COPIED_BLOCKS = 20_000
_PROMPT_BLOCKS = 2048
_LOOKUPS = 2000


@dataclass(frozen=True, slots=True)
class CopiesCost:
    """An index in which every block has `copies` holders."""

    copies: int
    bytes_per_unique_block: float
    bytes_per_pair: float


@dataclass(frozen=True, slots=True)
class IndexCost:
    """A full index of `workers` workers."""

    workers: int
    unique_blocks: int
    bytes_per_unique_block: float
    """One holder each: the block itself and its one (block, worker) pair."""
    bytes_per_further_pair: float
    """A block that is there already, at one more worker."""
    stores_per_second: float
    lookups_per_second: float
    forget_ms: float
    """Until a worker is gone from every answer."""
    longest_sweep_ms: float
    """The longest of the steps in which its entries are then taken out, one with each store or removal."""
    longest_store_ms: float
    """Of 64 blocks: the index's dict grew."""


def measure(blocks: int, workers: int, seed: int = 1) -> IndexCost:
    """Fill an index with `blocks` unique blocks and forget one worker."""
    rng = np.random.default_rng(seed)
    names = [f"worker-{k}" for k in range(workers)]
    shared_count = max(blocks // workers, _BATCH)
    own = [_hashes(rng, blocks // workers) for _ in names]
    shared = _hashes(rng, shared_count)
    tracemalloc.start()
    index, before = BlockIndex(), _allocated()
    for name, hashes in zip(names, own, strict=True):
        _store(index, name, hashes)
    one_each = _allocated()
    _store(index, names[0], shared)
    first_copy = _allocated()
    for name in names[1:]:
        _store(index, name, shared)
    copies = _allocated()
    tracemalloc.stop()

    timed = BlockIndex()
    stores = [
        _seconds(partial(timed.store, name, batch))
        for name, hashes in zip(names, own, strict=True)
        for batch in _batches(hashes)
    ]
    known = [hashes[: _PROMPT_BLOCKS // 2] for hashes in own]
    prompts = [np.concatenate([blocks, _hashes(rng, len(blocks))]) for blocks in known]
    lookup_seconds = sum(_seconds(partial(timed.depths, prompts[k % workers])) for k in range(_LOOKUPS))
    forget_seconds = _seconds(partial(timed.forget, names[0]))
    sweeps = [_seconds(partial(timed.remove, names[-1], ())) for _ in range(len(own[0]) // _BATCH)]
    unique = len(own) * len(own[0])
    return IndexCost(
        workers=workers,
        unique_blocks=unique,
        bytes_per_unique_block=(one_each - before) / unique,
        bytes_per_further_pair=(copies - first_copy) / (shared_count * (workers - 1)),
        stores_per_second=unique / sum(stores),
        lookups_per_second=_LOOKUPS / lookup_seconds,
        forget_ms=forget_seconds * 1000,
        longest_sweep_ms=max(sweeps) * 1000,
        longest_store_ms=max(stores) * 1000,
    )


def measure_copies(copies: int, blocks: int = _COPIED_BLOCKS, seed: int = 1) -> CopiesCost:
    """Store the same `blocks` blocks for `copies` workers."""
    hashes = _hashes(np.random.default_rng(seed), blocks)
    tracemalloc.start()
    index, before = BlockIndex(), _allocated()
    for k in range(copies):
        _store(index, f"worker-{k}", hashes)
    allocated = _allocated() - before
    tracemalloc.stop()
    return CopiesCost(copies, allocated / blocks, allocated / (blocks * copies))


def _store(index: BlockIndex, worker: str, hashes: Hashes) -> None:
    for batch in _batches(hashes):
        index.store(worker, batch)


def _batches(hashes: Hashes) -> Iterator[list[int]]:
    for first in range(0, len(hashes), _BATCH):
        yield hashes[first : first + _BATCH].tolist()


def _seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _hashes(rng: np.random.Generator, count: int) -> Hashes:
    return rng.integers(1, 2**64, count, dtype=np.uint64)


def _allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200_000, help="unique blocks in all")
    parser.add_argument("--workers", type=int, default=64, help="at least 2")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cost = measure(arguments.blocks, arguments.workers)
    by_copies = [measure_copies(copies) for copies in _COPIES]
    if arguments.json:
        print(json.dumps(asdict(cost) | {"by_copies": [asdict(c) for c in by_copies]}, indent=1))
        return
    print(f"{cost.workers} workers, {cost.unique_blocks:,} unique blocks")
    print(f"{cost.bytes_per_unique_block:7.0f} bytes a unique block, its one holder included")
    print(f"{cost.bytes_per_further_pair:7.0f} bytes a further (block, worker)")
    for c in by_copies:
        figures = f"{c.bytes_per_unique_block:,.0f} bytes a block, {c.bytes_per_pair:.0f} a pair"
        print(f"        {c.copies:>3} holders a block, {_COPIED_BLOCKS:,} blocks: {figures}")
    print(f"{cost.stores_per_second / 1e6:7.2f} million stores a second")
    print(f"{cost.lookups_per_second / 1e3:7.0f} thousand lookups a second")
    print(f"{cost.longest_store_ms:7.3f} ms for the longest store of {_BATCH} blocks")
    print(f"{cost.forget_ms:7.3f} ms to forget a worker, and up to {cost.longest_sweep_ms:.3f} ms a step to clean up")


if __name__ == "__main__":
    main()
