"""GPU → CPU memory → disk → one remote store: blocks go down as each level fills up, and come back when asked for.

A block that comes back stays where it was, too. CPU memory is lost with its worker, a disk isn't, and the remote store
belongs to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixwatch.kvcache.transfer_link import KvLink, Wire, arrival
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.simulator.caches.block_store import BlockStore
from prefixwatch.simulator.caches.outer import CPU, DISK, REMOTE, OuterCaches, Run


class WorkerTiers(OuterCaches):
    """Of each worker, and what they share."""

    def __init__(self, cache: Cache, block_size: int, workers: int) -> None:
        super().__init__(cache, block_size, workers)
        self._cpu = [BlockStore(cache.cpu_blocks) for _ in range(workers)]
        self._disk = [BlockStore(cache.disk_blocks) for _ in range(workers)]
        self._remote = BlockStore(cache.remote_blocks)
        self._from_cpu = [Wire(cache.cpu_gbit_per_second) for _ in range(workers)]
        self._from_disk = [Wire(cache.disk_gbit_per_second) for _ in range(workers)]
        self._from_remote = Wire(cache.store_gbit_per_second)

    @property
    def links(self) -> Mapping[str, KvLink]:
        cache, size = self.cache, self.cache.kv_bytes_per_token
        return {
            CPU: KvLink(cache.cpu_gbit_per_second, size, 0.0),
            DISK: KvLink(cache.disk_gbit_per_second, size, cache.disk_latency_ms / 1e3),
            REMOTE: self._link(cache.store_gbit_per_second),
        }

    def find(self, worker: int, blocks: Sequence[int], held: int, now_s: float) -> list[Run]:
        runs: list[Run] = []
        begin = held
        tier = None
        for place in range(held, len(blocks) + 1):
            found = self._tier_of(worker, blocks[place]) if place < len(blocks) else None
            if found != tier:
                if tier is not None:
                    runs.append(self._run(worker, tier, begin, place))
                begin, tier = place, found
            if found is None:
                break
        return runs

    def evicted(self, worker: int, blocks: Sequence[int], now_s: float) -> None:
        into_cpu = [block for block in blocks if block not in self._cpu[worker]]
        self.written_bytes[CPU] += len(into_cpu) * self._block_bytes if self.cache.cpu_blocks != 0 else 0.0
        out_of_cpu = self._cpu[worker].put(blocks[::-1])
        into_disk = [block for block in out_of_cpu if block not in self._disk[worker]]
        self.written_bytes[DISK] += len(into_disk) * self._block_bytes if self.cache.disk_blocks != 0 else 0.0
        into_remote = self._disk[worker].put(into_disk[::-1])
        fresh = [block for block in into_remote if block not in self._remote]
        if fresh and self.cache.remote_blocks != 0:
            size_bytes = len(fresh) * self._packed_bytes
            self.written_bytes[REMOTE] += size_bytes
            arrival((self._out[worker],), size_bytes, now_s, 0.0, book=True)
            self._remote.put(fresh[::-1])

    def used(self, worker: int, blocks: Sequence[int]) -> None:
        for store in (self._cpu[worker], self._disk[worker], self._remote):
            store.touch(blocks)

    def lost(self, worker: int) -> None:
        super().lost(worker)
        self._cpu[worker].clear()

    def _tier_of(self, worker: int, block: int) -> str | None:
        if block in self._cpu[worker]:
            return CPU
        if block in self._disk[worker]:
            return DISK
        return REMOTE if block in self._remote else None

    def _run(self, worker: int, tier: str, begin: int, end: int) -> Run:
        blocks = end - begin
        if tier == CPU:
            return Run(CPU, end, blocks * self._block_bytes, (self._from_cpu[worker],), 0.0, over_network=False)
        if tier == DISK:
            latency_s = self.cache.disk_latency_ms / 1e3
            from_disk = (self._from_disk[worker],)
            return Run(DISK, end, blocks * self._block_bytes, from_disk, latency_s, over_network=False)
        wires = (self._from_remote, self._in[worker])
        return Run(REMOTE, end, blocks * self._packed_bytes, wires, self._latency_s)
