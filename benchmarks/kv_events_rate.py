"""What KV events cost the exporter: from a raw msgpack payload to the block table, which is index, evictions and tree.

    python -m benchmarks.kv_events_rate [--blocks N] [--grow N[,N…]] [--json]

Eight simulated engines prefill prompts that branch off earlier ones and, once full, evict a block for each one that
they store, each eviction an event of its own as in vLLM. CPU time of the one thread that does it, warm; the aim is
200,000 blocks a second stored (and as many evicted) on one core, and 200 bytes a distinct block. Bytes are of what is
cached; what is remembered for five minutes of each evicted block is given apart. In the salted mix ten tenants have
a salt each, so blocks are also counted by what they would be without. Stages are timed apart, so they don't
quite add up. The baseline, in the same run on the same payloads, is a router's feed (`kvcache.events.feed` and
`kvcache.index.block_index`), which keeps neither times nor the tree.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import msgspec

from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.events.sequence import EventSequence
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.events.wire import Stored, decode_batch
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.index.block_table import BlockTable, warm_up
from prefixwatch.kvcache.index.prefix_tree import prefix_tree

_ENGINES = 8
_BLOCK = 16
_TENANTS = 10
_AIM_PER_SECOND = 200_000
_AIM_BYTES = 200

Payloads = list[tuple[int, bytes]]
"""Engine and payload, in the order of arrival."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One mix of events; seconds are CPU seconds a million blocks stored."""

    blocks_per_event: int
    evicting: bool
    salted: bool
    blocks: int
    blocks_per_second: float
    decode_seconds: float
    tokens_seconds: float
    router_blocks_per_second: float
    bytes_per_block: float
    bytes_per_eviction: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """A table of this many distinct blocks."""

    blocks: int
    nodes: int
    bytes_per_block: float
    allocated_bytes_per_block: float
    """As tracemalloc has it: arrays, and whatever Python keeps besides."""
    blocks_per_second: float
    snapshot_ms: float
    tree_ms: float


class Engine:
    """Prompts that branch off earlier ones, and the events of storing and evicting their blocks."""

    def __init__(self, number: int, capacity: int | None, rng: random.Random, tenants: int = 0) -> None:
        self._capacity = capacity
        self._tenants = tenants
        self._rng = rng
        self._next = number << 40
        self._ends: deque[int] = deque(maxlen=500)
        self._held: deque[int] = deque()

    def step(self, blocks: int) -> list[dict[str, object]]:
        """Store this many blocks, evicting the oldest for as many as don't fit."""
        rng = self._rng
        parent = rng.choice(self._ends) if self._ends and rng.random() < 0.8 else None
        names = [self._next + k * 0x9E3779B1 for k in range(1, blocks + 1)]
        self._next = names[-1]
        removals = []
        while self._capacity is not None and len(self._held) + blocks > self._capacity:
            gone = self._held.popleft()
            if gone == parent:
                parent = None
            removals.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0})
        if parent is not None and self._held and parent < self._held[0]:
            parent = None
        self._held.extend(names)
        self._ends.append(names[-1])
        self._ends.append(names[blocks // 2])
        salt = f"tenant {rng.randrange(self._tenants)}" if self._tenants and parent is None else None
        return [*removals, _stored(names, parent, rng, salt)]


def _stored(names: list[int], parent: int | None, rng: random.Random, salt: str | None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": [rng.randrange(150_000) for _ in range(_BLOCK * len(names))],
        "block_size": _BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[salt] if salt else None, *[None] * (len(names) - 1)],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def payloads(blocks: int, per_event: int, capacity: int | None, seed: int = 1, tenants: int = 0) -> Payloads:
    """At least this many blocks stored, 128 a batch."""
    rng = random.Random(seed)
    engines = [Engine(k + 1, capacity, rng, tenants) for k in range(_ENGINES)]
    found: Payloads = []
    stored = clock = 0
    while stored < blocks:
        number = rng.randrange(_ENGINES)
        events = [event for _ in range(max(128 // per_event, 1)) for event in engines[number].step(per_event)]
        stored += max(128 // per_event, 1) * per_event
        clock += 1
        found.append((number, msgspec.msgpack.encode([1.7e9 + clock / 1000, events, 0])))
    return found


def apply(feeds: list[EventSequence], given: Payloads) -> float:
    """CPU seconds to apply these."""
    sequences = [0] * len(feeds)
    start = time.thread_time()
    for number, payload in given:
        feeds[number].apply(sequences[number], payload, 0.0)
        sequences[number] += 1
    return time.thread_time() - start


def measure(blocks: int, per_event: int, *, evicting: bool, tenants: int = 0) -> Rate:
    given = payloads(blocks, per_event, blocks // (4 * _ENGINES) if evicting else None, tenants=tenants)
    table, index = BlockTable(), BlockIndex()
    tables: list[EventSequence] = [TableFeed(f"w{k}", table) for k in range(_ENGINES)]
    routers: list[EventSequence] = [WorkerFeed(f"w{k}", index) for k in range(_ENGINES)]
    seconds, router_seconds = apply(tables, given), apply(routers, given)
    stored = sum(feed.counters.stored_blocks for feed in tables)
    evicted_bytes = sum(worker.evicted_nbytes for worker in table.workers.values())
    evictions = sum(worker.evicted_blocks for worker in table.workers.values())
    decoded = [decode_batch(payload) for _, payload in given]
    decode_seconds = _cpu(lambda: deque((decode_batch(payload) for _, payload in given), maxlen=0))
    stores = [event for batch in decoded for event in batch.events if isinstance(event, Stored)]
    tokens_seconds = _cpu(lambda: deque((event.tokens() for event in stores), maxlen=0))
    return Rate(
        blocks_per_event=per_event,
        evicting=evicting,
        salted=tenants > 0,
        blocks=stored,
        blocks_per_second=stored / seconds,
        decode_seconds=decode_seconds / stored * 1e6,
        tokens_seconds=tokens_seconds / stored * 1e6,
        router_blocks_per_second=stored / router_seconds,
        bytes_per_block=(table.nbytes - evicted_bytes) / len(table),
        bytes_per_eviction=evicted_bytes / evictions if evicting else None,
    )


def grow(blocks: int) -> Growth:
    """A table that is never full."""
    given = payloads(blocks, 16, None)
    gc.collect()
    tracemalloc.start()
    table = BlockTable()
    apply([TableFeed(f"w{k}", table) for k in range(_ENGINES)], given)
    gc.collect()
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    table = BlockTable()
    seconds = apply([TableFeed(f"w{k}", table) for k in range(_ENGINES)], given)
    snapshot = table.snapshot()
    snapshot_seconds = _cpu(table.snapshot)
    tree_seconds = _cpu(lambda: prefix_tree(snapshot))
    return Growth(
        blocks=len(table),
        nodes=len(prefix_tree(snapshot)),
        bytes_per_block=table.nbytes / len(table),
        allocated_bytes_per_block=allocated / len(table),
        blocks_per_second=len(table) / seconds,
        snapshot_ms=snapshot_seconds * 1000,
        tree_ms=tree_seconds * 1000,
    )


def _cpu(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks stored in each mix")
    parser.add_argument("--grow", default="10000,100000,300000", help="sizes of the growth curve, in blocks")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warm_up()
    measure(5_000, 16, evicting=True)
    measure(5_000, 16, evicting=True, tenants=_TENANTS)
    rates = [
        measure(arguments.blocks, per_event, evicting=evicting)
        for per_event in (64, 16, 1)
        for evicting in (False, True)
    ]
    rates += [measure(arguments.blocks, 16, evicting=evicting, tenants=_TENANTS) for evicting in (False, True)]
    growth = [grow(int(size)) for size in arguments.grow.split(",") if size]
    if arguments.json:
        print(json.dumps({"rates": [asdict(r) for r in rates], "growth": [asdict(g) for g in growth]}, indent=1))
        return
    print(
        "blocks an event | evicting | salted | blocks/s | us a block: all / decode / token ids | router's feed | "
        "bytes a block"
    )
    for r in rates:
        print(
            f"{r.blocks_per_event:15} | {r.evicting!s:8} | {r.salted!s:6} | {r.blocks_per_second:8,.0f} | "
            f"{1e6 / r.blocks_per_second:.2f} / {r.decode_seconds:.2f} / {r.tokens_seconds:.2f} | "
            f"{r.blocks_per_second / r.router_blocks_per_second:.1f} x its {r.router_blocks_per_second:,.0f}/s | "
            f"{r.bytes_per_block:.0f}{f', an eviction {r.bytes_per_eviction:.0f}' if r.bytes_per_eviction else ''}"
        )
    print(f"aims: {_AIM_PER_SECOND:,} blocks/s, {_AIM_BYTES} bytes a block\n")
    print("distinct blocks | nodes | bytes a block: arrays / allocated | blocks/s | snapshot ms | tree ms")
    for g in growth:
        print(
            f"{g.blocks:15,} | {g.nodes:,} | {g.bytes_per_block:.0f} / {g.allocated_bytes_per_block:.0f} | "
            f"{g.blocks_per_second:,.0f} | {g.snapshot_ms:.1f} | {g.tree_ms:.1f}"
        )


if __name__ == "__main__":
    main()
