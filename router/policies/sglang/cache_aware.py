"""Cache aware, current generation: the worker with the longest known prefix, unless it is clearly overloaded.

1. KV pressure: the highest reported KV usage above `kv_overload_threshold`, or highest − lowest above
   `kv_spread_threshold` (both 1.0: off) → least loaded, locality ignored.
2. Owners: the workers that hold the deepest match. With `index="history"` the match counts only if
   matched tokens / prompt tokens > `cache_threshold` (strictly); with `index="events"` any match counts.
   No owner → least loaded.
3. Of several owners the least loaded.
4. Spill, for this request alone: the owner is given up for the least loaded worker if its load is both
   > average × `balance_rel_threshold` and > average + margin,

       margin = min(balance_abs_threshold, max(4, 2·√average))

   two standard deviations of a Poisson count at that average: a small fleet couldn't spill at 64.

Load is requests in flight from this router. All ties are random (an idle fleet spreads).

Optional: `overlap_decay` d > 0 divides a worker's overlap by `1 + d·x`, x = (its waiting prefill tokens −
the fleet's least) / prompt tokens, and the owners are those with the highest quotient;
`selection_temperature` t > 0 draws the owner with weight exp(s / t), s = overlap scaled to 0…1 over the workers that
hold anything.

Defaults, two sets (`defaults=`), both in the field:
                          cli (command line, Python binding)   struct (Rust; vllm-project/router documents it)
    cache_threshold       0.3                                  0.5
    balance_abs_threshold 64                                   32
    balance_rel_threshold 1.5                                  1.1
Block 16 tokens. The history's size (2^26 tokens; 10 000) and eviction interval (60 s; 30 s) belong to the
cache view that feeds this policy, as does recording where a prompt went.

Source: smg `cache_aware` 1.13.0 (2026-08-22), tree and event modes; the margin's cap by the help text of its command
line, and as its binary behaves. Not modelled: the `cache_index = hash` mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prefixwatch.router.policy import (
    Decision,
    Fleet,
    Needs,
    Policy,
    RouteRequest,
    Worker,
    least_loaded,
    under_kv_pressure,
)

DEFAULT_SETS: Mapping[str, tuple[float, float, float]] = {"cli": (0.3, 64.0, 1.5), "struct": (0.5, 32.0, 1.1)}
LEAST_MARGIN = 4.0
"""Requests above the average that are never held against a worker, unless `balance_abs_threshold` is lower."""


@dataclass(frozen=True, slots=True)
class CacheAwareOptions:
    """A threshold left None is filled in from the set that `defaults` names."""

    defaults: Literal["cli", "struct"] = "cli"
    index: Literal["auto", "history", "events"] = "auto"
    """`auto`: whichever of the two feeds the cache view."""
    cache_threshold: float | None = None
    balance_abs_threshold: float | None = None
    balance_rel_threshold: float | None = None
    kv_overload_threshold: float = 1.0
    kv_spread_threshold: float = 1.0
    overlap_decay: float = 0.0
    selection_temperature: float = 0.0

    def __post_init__(self) -> None:
        names = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")
        for name, default in zip(names, DEFAULT_SETS[self.defaults], strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)


class CacheAware(Policy):
    """The longest believed prefix wins; each request leaves an overloaded owner by itself."""

    name = "cache_aware"
    source = "SGLang gateway (smg 1.13.0) cache_aware"
    needs = Needs(tokens=True, cache_view=True)
    reasons = ("cache_hit", "spill_overloaded", "miss_least_load", "below_threshold", "kv_pressure")
    Options = CacheAwareOptions
    options: CacheAwareOptions

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        workers = fleet.workers
        if under_kv_pressure(workers, self.options.kv_overload_threshold, self.options.kv_spread_threshold):
            return Decision(self._least(workers).name, "kv_pressure")
        depths = fleet.lookup(request)
        deepest, owners = _deepest(workers, depths)
        if not deepest:
            return Decision(self._least(workers).name, "miss_least_load")
        if not self._counts_as_match(deepest, request, fleet):
            chosen = self._least(workers)
            return Decision(chosen.name, "below_threshold", depths.get(chosen.name, 0), depths)
        owner = self._owner(workers, depths, owners, request)
        if self._overloaded(owner, workers):
            chosen = self._least(workers)
            return Decision(chosen.name, "spill_overloaded", depths.get(chosen.name, 0), depths)
        return Decision(owner.name, "cache_hit", depths[owner.name], depths)

    def _counts_as_match(self, depth: int, request: RouteRequest, fleet: Fleet) -> bool:
        index = fleet.view if self.options.index == "auto" else self.options.index
        if index == "events":
            return True
        assert self.options.cache_threshold is not None
        matched = min(depth * request.block_size, request.prompt_tokens)
        return matched > self.options.cache_threshold * request.prompt_tokens

    def _owner(
        self, workers: Sequence[Worker], depths: Mapping[str, int], owners: Sequence[Worker], request: RouteRequest
    ) -> Worker:
        decay, temperature = self.options.overlap_decay, self.options.selection_temperature
        if not decay and not temperature:
            return self._least(owners)
        holders = [worker for worker in workers if depths.get(worker.name, 0) > 0]
        least = min(worker.prefill_tokens for worker in workers)
        prompt = max(request.prompt_tokens, 1)
        overlaps = [depths[w.name] / (1.0 + decay * (w.prefill_tokens - least) / prompt) for w in holders]
        best = max(overlaps)
        if temperature:
            spread = best - min(overlaps) or 1.0
            weights = [math.exp((overlap - best) / spread / temperature) for overlap in overlaps]
            return self.rng.choices(holders, weights)[0]
        return self._least([worker for worker, overlap in zip(holders, overlaps, strict=True) if overlap == best])

    def _overloaded(self, owner: Worker, workers: Sequence[Worker]) -> bool:
        relative, absolute = self.options.balance_rel_threshold, self.options.balance_abs_threshold
        assert relative is not None
        assert absolute is not None
        average = sum(worker.in_flight for worker in workers) / len(workers)
        margin = min(absolute, max(LEAST_MARGIN, 2 * math.sqrt(average)))
        return owner.in_flight > average * relative and owner.in_flight > average + margin

    def _least(self, workers: Sequence[Worker]) -> Worker:
        return self.rng.choice(least_loaded(workers))


def _deepest(workers: Sequence[Worker], depths: Mapping[str, int]) -> tuple[int, list[Worker]]:
    """The longest match among these workers, and all that hold it; (0, []) if none holds anything."""
    deepest, owners = 0, []
    for worker in workers:
        depth = depths.get(worker.name, 0)
        if depth > deepest:
            deepest, owners = depth, [worker]
        elif depth == deepest and depth:
            owners.append(worker)
    return deepest, owners
