"""One store of KV behind all workers: what any of them computes, every one can pull.

Each computed block is written to it once, over its worker's link, and can be pulled when it has come. Losing a worker
loses what it hadn't sent yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from prefixwatch.kvcache.transfer_link import KvLink, Wire, arrival
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.simulator.caches.block_store import BlockStore
from prefixwatch.simulator.caches.outer import STORE, OuterCaches, Run


class SharedStore(OuterCaches):
    """Behind its own link, through which all pulls go."""

    def __init__(self, cache: Cache, block_size: int, workers: int) -> None:
        super().__init__(cache, block_size, workers)
        self._store = BlockStore(cache.remote_blocks)
        self._store_in, self._store_out = Wire(cache.store_gbit_per_second), Wire(cache.store_gbit_per_second)
        self._coming: list[tuple[float, int, int, list[int]]] = []  # when, number, worker, blocks
        self._expected: set[int] = set()
        self._writes = 0

    @property
    def links(self) -> Mapping[str, KvLink]:
        return {STORE: self._link(self.cache.store_gbit_per_second)}

    def find(self, worker: int, blocks: Sequence[int], held: int, now_s: float) -> list[Run]:
        self._receive(now_s)
        end = held
        while end < len(blocks) and blocks[end] in self._store:
            end += 1
        if end == held:
            return []
        wires = (self._store_out, self._in[worker])
        return [Run(STORE, end, (end - held) * self._packed_bytes, wires, self._latency_s)]

    def stored(self, worker: int, blocks: Sequence[int], now_s: float) -> None:
        self._receive(now_s)
        fresh = [block for block in blocks if block not in self._store and block not in self._expected]
        self._store.touch(blocks)
        if not fresh:
            return
        size_bytes = len(fresh) * self._packed_bytes
        self.written_bytes[STORE] += size_bytes
        ready_s = arrival((self._out[worker], self._store_in), size_bytes, now_s, self._latency_s, book=True)
        self._expected.update(fresh)
        self._writes += 1
        heapq.heappush(self._coming, (ready_s, self._writes, worker, fresh))

    def used(self, worker: int, blocks: Sequence[int]) -> None:
        self._store.touch(blocks)

    def lost(self, worker: int) -> None:
        super().lost(worker)
        for write in self._coming:
            if write[2] == worker:
                self._expected.difference_update(write[3])
        self._coming = [write for write in self._coming if write[2] != worker]
        heapq.heapify(self._coming)

    def _receive(self, now_s: float) -> None:
        while self._coming and self._coming[0][0] <= now_s:
            _, _, _, blocks = heapq.heappop(self._coming)
            self._expected.difference_update(blocks)
            self._store.put(blocks)
