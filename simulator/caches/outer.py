"""Where a fleet's KV is beyond a worker's own GPU, and over which links it comes: what all architectures share.

Each finds the blocks of a prompt that follow those in the worker's GPU, as runs: blocks of one place, with the wires
that they come over. Engines report to it what they compute and evict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixwatch.kvcache.transfer_link import KvLink, Wire, arrival
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.router.policy import LowerTiers

STORE, PEER, CPU, DISK, REMOTE = "store", "peer", "cpu", "disk", "remote"


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of a prompt at one place, from the end of the run before it (or of the GPU's blocks) to `end_block`."""

    tier: str
    end_block: int
    size_bytes: float
    wires: Sequence[Wire]
    latency_s: float
    over_network: bool = True
    source: int | None = None
    """The worker that must live until they have come; None: nothing that a run can lose."""

    def arrives_s(self, now_s: float, *, book: bool = False) -> float:
        """When they are all there, if asked for now; `book`: ask."""
        return arrival(self.wires, self.size_bytes, now_s, self.latency_s, book=book)


class OuterCaches(ABC):
    """The caches beyond the GPUs of `workers` workers, numbered from 0."""

    def __init__(self, cache: Cache, block_size: int, workers: int) -> None:
        self.cache = cache
        self.written_bytes: dict[str, float] = defaultdict(float)
        """By tier, compressed where it is."""
        self.lives = [0] * workers
        """How often each worker was lost."""
        self._block_bytes = float(cache.kv_bytes_per_token * block_size)
        self._packed_bytes = self._block_bytes / cache.compression
        self._latency_s = cache.latency_ms / 1e3
        self._in = [Wire(cache.link_gbit_per_second) for _ in range(workers)]
        self._out = [Wire(cache.link_gbit_per_second) for _ in range(workers)]

    @property
    @abstractmethod
    def links(self) -> Mapping[str, KvLink]:
        """What a pull from each tier comes over."""

    @abstractmethod
    def find(self, worker: int, blocks: Sequence[int], held: int, now_s: float) -> list[Run]:
        """The blocks from number `held` on, up to the first that isn't within the worker's reach."""

    def lower_tiers(self, worker: int, blocks: Sequence[int], held: int, now_s: float) -> LowerTiers:
        """What policies hear of the same: blocks of each kind that follow."""
        counts: Counter[str] = Counter()
        for run in self.find(worker, blocks, held, now_s):
            counts[run.tier] += run.end_block - held
            held = run.end_block
        return LowerTiers(counts[CPU], counts[DISK], counts[STORE] + counts[REMOTE])

    def stored(self, worker: int, blocks: Sequence[int], now_s: float) -> None:
        """These are in the worker's GPU from now on."""

    def evicted(self, worker: int, blocks: Sequence[int], now_s: float) -> None:
        """These have left it, the tail of a prompt before its head."""

    def used(self, worker: int, blocks: Sequence[int]) -> None:
        """These were asked for."""

    def lost(self, worker: int) -> None:
        """The worker's process is gone, and its memory with it."""
        self.lives[worker] += 1

    def _link(self, *slower: float | None) -> KvLink:
        """Over a worker's link, and others of these rates behind it."""
        rates = [rate for rate in (self.cache.link_gbit_per_second, *slower) if rate is not None]
        cache = self.cache
        return KvLink(min(rates, default=None), cache.kv_bytes_per_token, self._latency_s, cache.compression)
