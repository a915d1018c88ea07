"""Cache aware, first generation: the longest prefix's first recipient, unless the whole fleet counts as imbalanced.

1. Imbalanced: over the candidates' requests in flight, max − min > `balance_abs_threshold` and
   max > `balance_rel_threshold` · min → least by (in flight, requests placed so far, position); locality is
   ignored for everyone. So it is if the highest reported KV usage exceeds `kv_overload_threshold` or highest − lowest
   exceeds `kv_spread_threshold` (both 1.0: off).
2. With `index="history"`: matched tokens / prompt tokens > `cache_threshold` (strictly) → the worker that was
   first sent the deepest matched block and still has it noted, or, with `owner="least_loaded"`, the least loaded of
   all that have. If none of these may take the request (unhealthy, or just failed it) → the first worker listed, and
   the prompt is not noted, so that this repeats until the owner is back. Not above → fewest in flight, or, with
   `misses="smallest_tree"`, the worker with the fewest pages noted, as the first releases had it.
3. With `index="events"`: the worker with the most matched blocks by the engines' own account; ties by fewer in flight,
   then by position. No match → fewest in flight.
4. Except in the unhealthy case the prompt is noted for the chosen worker.

Defaults, two sets (`defaults=`), both in the field:
                               cli (command line, Python binding)   struct (Rust; vllm-project/router documents it)
    cache_threshold            0.3                                  0.5
    balance_abs_threshold      64                                   32
    balance_rel_threshold      1.5                                  1.1
    eviction_interval_seconds  60 (the binding alone: 120)          30
    max_tree_size              2^26 tokens a worker                 10 000
Pages are blocks (16 tokens in the source). At each interval a worker's least recently noted pages beyond
`max_tree_size` are dropped, tails before heads. Ties: the lowest position, always. Deterministic.

Known faults, kept: every miss on an idle fleet goes to the first worker (sglang#32983); by the smallest tree every
miss goes to a worker that has just joined, however busy (sglang#14305, sglang#14532); one hot worker turns
affinity off for all (sglang#32195, smg#2161); an unhealthy owner's requests all go to the first worker. Not kept: a
worker that left the fleet stayed in the tree until its pages aged out; here they go with it.

Source: SGLang gateway / smg `cache_aware` up to 2026-08-07. The binaries of sglang-router 0.3.2 (all defaults) and
vllm-router 0.1.17 (`owner="least_loaded"`) place the same requests alike, except for the last tie among loads when
imbalanced, which they give to the first listed. Not modelled: the text tree of HTTP mode matches by characters; in the
token tree one in 16 notes makes its worker the one that counts as first; a match refreshes recency only about every
eighth time (noting the prompt does).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixwatch.kvcache.blocks import Hashes
from prefixwatch.router.policies.shared.routed_hashes import RoutedHashes
from prefixwatch.router.policy import Decision, Fleet, Memory, Needs, Policy, RouteRequest, Worker, under_kv_pressure

DEFAULT_SETS: Mapping[str, Mapping[str, float]] = {
    "cli": {
        "cache_threshold": 0.3,
        "balance_abs_threshold": 64,
        "balance_rel_threshold": 1.5,
        "eviction_interval_seconds": 60.0,
        "max_tree_size": 2**26,
    },
    "struct": {
        "cache_threshold": 0.5,
        "balance_abs_threshold": 32,
        "balance_rel_threshold": 1.1,
        "eviction_interval_seconds": 30.0,
        "max_tree_size": 10_000,
    },
}


@dataclass(frozen=True, slots=True)
class CacheAwareV1Options:
    """A figure left None is filled in from the set that `defaults` names."""

    defaults: Literal["cli", "struct"] = "cli"
    index: Literal["history", "events"] = "history"
    misses: Literal["least_load", "smallest_tree"] = "least_load"
    owner: Literal["first", "least_loaded"] = "first"
    cache_threshold: float | None = None
    balance_abs_threshold: float | None = None
    balance_rel_threshold: float | None = None
    eviction_interval_seconds: float | None = None
    max_tree_size: int | None = None
    kv_overload_threshold: float = 1.0
    kv_spread_threshold: float = 1.0

    def __post_init__(self) -> None:
        for name, default in DEFAULT_SETS[self.defaults].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)


class CacheAwareV1(Policy):
    """The older cache_aware: one imbalance switch for the whole fleet, ties to the first worker."""

    name = "cache_aware_v1"
    source = "SGLang gateway (smg up to 2026-08-07) cache_aware"
    needs = Needs(tokens=True, cache_view=True)
    reasons = (
        "imbalanced",
        "kv_pressure",
        "cache_hit",
        "below_threshold",
        "miss_least_load",
        "miss_smallest_tree",
        "owner_unhealthy",
    )
    deterministic = True
    Options = CacheAwareV1Options
    options: CacheAwareV1Options

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self.sent = RoutedHashes()
        self._swept_at_seconds: float | None = None

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        decision = self._imbalanced(fleet.workers) or (
            self._by_events(request, fleet) if self.options.index == "events" else self._by_history(request, fleet)
        )
        if decision.reason != "owner_unhealthy" and self.options.index == "history":
            self._sweep(fleet.now_seconds, request.block_size)
            self.sent.store(decision.worker, request.blocks[::-1].tolist())
        return decision

    def memory(self) -> Memory:
        return self.sent.memory()

    def on_worker_removed(self, worker: str) -> None:
        self.sent.forget(worker)

    def _imbalanced(self, workers: Sequence[Worker]) -> Decision | None:
        absolute, relative = self.options.balance_abs_threshold, self.options.balance_rel_threshold
        assert absolute is not None
        assert relative is not None
        most, fewest = max(w.in_flight for w in workers), min(w.in_flight for w in workers)
        over = most - fewest > absolute and most > relative * fewest
        if over or under_kv_pressure(workers, self.options.kv_overload_threshold, self.options.kv_spread_threshold):
            chosen = min(workers, key=lambda worker: (worker.in_flight, worker.served))
            return Decision(chosen.name, "imbalanced" if over else "kv_pressure")
        return None

    def _by_history(self, request: RouteRequest, fleet: Fleet) -> Decision:
        assert self.options.cache_threshold is not None
        depth = self._deepest(request.blocks)
        if not depth:
            return self._miss(fleet.workers, "miss_least_load")
        matched_tokens = min(depth * request.block_size, request.prompt_tokens)
        if matched_tokens <= self.options.cache_threshold * request.prompt_tokens:
            return self._miss(fleet.workers, "below_threshold")
        owners = list(self.sent.holders(request.blocks.item(depth - 1)))
        if self.options.owner == "first":
            del owners[1:]
        candidates = [worker for worker in fleet.workers if worker.name in owners]
        if not candidates:
            return Decision(fleet.workers[0].name, "owner_unhealthy")
        return Decision(min(candidates, key=lambda worker: worker.in_flight).name, "cache_hit", depth)

    def _miss(self, workers: Sequence[Worker], reason: str) -> Decision:
        if self.options.misses == "smallest_tree":
            return Decision(min(workers, key=lambda worker: self.sent.count(worker.name)).name, "miss_smallest_tree")
        return Decision(min(workers, key=lambda worker: worker.in_flight).name, reason)

    def _by_events(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        best = max(fleet.workers, key=lambda worker: (depths.get(worker.name, 0), -worker.in_flight))
        depth = depths.get(best.name, 0)
        return Decision(best.name, "cache_hit" if depth else "miss_least_load", depth, depths)

    def _deepest(self, blocks: Hashes) -> int:
        """Leading blocks that anybody was sent. A worker's pages are closed under "prefix of", so bisection will do."""
        return bisect_left(range(len(blocks)), True, key=lambda k: blocks.item(k) not in self.sent)

    def _sweep(self, now_seconds: float, block_size: int) -> None:
        interval, size = self.options.eviction_interval_seconds, self.options.max_tree_size
        assert interval is not None
        assert size is not None
        if self._swept_at_seconds is None:
            self._swept_at_seconds = now_seconds
        elif now_seconds - self._swept_at_seconds >= interval:
            self._swept_at_seconds = now_seconds
            self.sent.trim_all(size // block_size)
