"""AIBrix prefix-cache: the longest match among workers that aren't busier than the rest.

1. Imbalance: with most − fewest requests in flight > `imbalance_spread`, only the workers with the fewest are
   matched. A later version asks for most > `imbalance_factor` × (mean + 1) as well.
2. Of the workers that hold any of the prompt, ordered by share held (whole percent, highest first), then by
   requests, the first with requests ≤ mean + `deviation_factor` × sample standard deviation, both over all
   workers. Equals are in random order.
3. None: fewest requests of all, ties random.

Defaults: imbalance_spread 8, imbalance_factor none (2.0 in the later version), deviation_factor 1.

Blocks are those of the cache view. AIBrix hashes characters by default, 4 to a block in its local table (its README
says 128) and 16 in its event-fed one; the table's 200,000 blocks and 20 minutes are the view's affair here, too.

Source: vllm-project/aibrix `prefix-cache`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest, Worker, least_loaded


@dataclass(frozen=True, slots=True)
class AibrixPrefixCacheOptions:
    imbalance_spread: int = 8
    imbalance_factor: float | None = None
    deviation_factor: float = 1.0


class AibrixPrefixCache(Policy):
    """The longest match among workers within a standard deviation of the mean load."""

    name = "aibrix_prefix_cache"
    source = "vllm-project/aibrix prefix-cache"
    needs = Needs(tokens=True, cache_view=True)
    reasons = ("prefix_match", "prefix_match_skipped", "imbalanced", "least_request")
    Options = AibrixPrefixCacheOptions
    options: AibrixPrefixCacheOptions

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        workers = fleet.workers
        depths = fleet.lookup(request)
        candidates = least_loaded(workers) if self._imbalanced(workers) else workers
        matched = self._by_match(candidates, depths, max(1, len(request.blocks)))
        limit = self._limit(workers)
        for worker in matched:
            if worker.in_flight <= limit:
                return Decision(worker.name, "prefix_match", depths[worker.name], depths)
        alone = "least_request" if candidates is workers else "imbalanced"
        reason = "prefix_match_skipped" if matched else alone
        chosen = self.rng.choice(least_loaded(workers)).name
        return Decision(chosen, reason, depths.get(chosen, 0), depths)

    def _imbalanced(self, workers: Sequence[Worker]) -> bool:
        loads = [worker.in_flight for worker in workers]
        factor = self.options.imbalance_factor
        if factor is not None and max(loads) <= factor * (statistics.fmean(loads) + 1):
            return False
        return max(loads) - min(loads) > self.options.imbalance_spread

    def _by_match(self, workers: Sequence[Worker], depths: Mapping[str, int], blocks: int) -> list[Worker]:
        holders = [worker for worker in workers if depths.get(worker.name, 0)]
        self.rng.shuffle(holders)
        return sorted(holders, key=lambda worker: (-(100 * depths[worker.name] // blocks), worker.in_flight))

    def _limit(self, workers: Sequence[Worker]) -> float:
        """Most requests in flight that a worker may have and still be matched."""
        loads = [worker.in_flight for worker in workers]
        deviation = statistics.stdev(loads) if len(loads) > 1 else 0.0
        return statistics.fmean(loads) + self.options.deviation_factor * deviation
