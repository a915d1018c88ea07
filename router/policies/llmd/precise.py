"""llm-d, precise: a weighted sum of scorers over what the engines' KV events say is cached.

    S_i = prefix_weight · min(1, depth_i / blocks) + kv_weight · (1 − KV usage_i) + queue_weight · queue_i

    depth_i  leading blocks that the worker holds; blocks: full blocks of the prompt (none: 0)
    queue_i  (max waiting − waiting_i) / (max − min) over the candidates; all equal: 1

Highest wins; ties uniformly random (max-score picker). A worker without a report counts as empty.

Defaults: prefix_weight 2, kv_weight 1, queue_weight 1 (the precise guide; a simulator's configuration uses 10 for
the prefix). Block size: the router's (16 in the source, 64 in its guides). Waiting and KV usage are as scraped, so
requests placed since the last scrape aren't seen. Hits of CPU tiers (0.8 of a GPU hit there) aren't told apart here.

Source: llm-d `precise-prefix-cache-scorer` with the `queue` and `kv-cache-utilization` scorers.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixwatch.router.policies.llmd.scorers import pick_max_score, weighted_scores
from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest, deepest_hit, hit_reason


@dataclass(frozen=True, slots=True)
class LlmdPreciseOptions:
    prefix_weight: float = 2.0
    kv_weight: float = 1.0
    queue_weight: float = 1.0


class LlmdPrecise(Policy):
    """Prefix by KV events, KV usage and queue length in a weighted sum."""

    name = "llmd_precise"
    source = "llm-d precise prefix-cache profile"
    needs = Needs(tokens=True, cache_view=True, events=True, engine_load=True)
    reasons = ("hit_deepest", "hit_sacrificed", "no_hit")
    Options = LlmdPreciseOptions
    options: LlmdPreciseOptions

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        blocks = max(len(request.blocks), 1)
        scores = weighted_scores(
            fleet.workers,
            {name: min(1.0, depth / blocks) for name, depth in depths.items()},
            prefix_weight=self.options.prefix_weight,
            queue_weight=self.options.queue_weight,
            kv_weight=self.options.kv_weight,
        )
        chosen = pick_max_score(scores, self.rng)
        depth = depths.get(chosen, 0)
        reason = hit_reason(depth, deepest_hit(fleet.workers, depths), "no_hit")
        return Decision(chosen, reason, depth, scores)
