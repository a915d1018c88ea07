"""Workers that pull KV from each other's GPUs when a request needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prefixwatch.kvcache.transfer_link import KvLink
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.simulator.caches.outer import PEER, OuterCaches, Run

HeldBlocks = Callable[[Sequence[int]], Mapping[int, int]]
"""Leading blocks of a prompt in the GPU of each worker that runs."""


class Peers(OuterCaches):
    """The worker that holds most is asked; of several the one whose link is free first."""

    def __init__(self, cache: Cache, block_size: int, workers: int, held_blocks: HeldBlocks) -> None:
        super().__init__(cache, block_size, workers)
        self._held_blocks = held_blocks

    @property
    def links(self) -> Mapping[str, KvLink]:
        return {PEER: self._link()}

    def find(self, worker: int, blocks: Sequence[int], held: int, now_s: float) -> list[Run]:
        depths = {number: depth for number, depth in self._held_blocks(blocks).items() if number != worker}
        end = max(depths.values(), default=0)
        if end <= held:
            return []
        source = min((self._out[n].free_at, n) for n, depth in depths.items() if depth == end)[1]
        wires = (self._out[source], self._in[worker])
        size_bytes = (end - held) * self._packed_bytes
        return [Run(PEER, end, size_bytes, wires, self._latency_s, source=source)]
