"""Score: what a worker's prefix saves this request, less what waiting and crowding there cost it, all in milliseconds.

    S_i = saved_i − g · q_i − m_i − h_i [− r_i]        highest wins, ties random

    c       = 1000 / prefill_tokens_per_second                        ms to prefill one token
    saved_i = H_i · c, H_i the hit tokens; if KV can be pulled from the best holder (`transfer_tokens_per_second`):
              the larger of that and H* · c − x_i, x_i = (H* − H_i) · 1000 / transfer_tokens_per_second. Where the
              fleet says what a pull takes (`simulate --cache transfer`), x_i is that time, and the decision asks for
              the pull where it saves time; then H* is the most that any worker holds. Blocks right behind H_i in lower
              tiers add host_credit, disk_credit or shared_credit · their tokens · c (`simulate --cache shared|tiers`;
              0 where nobody says what is there)
    q_i     = uncached prompt tokens ahead of it · c + requests in flight · decode_ms_per_request; requests in flight
              are this router's, or the engine's own running + waiting where that is more
    g       = p / (p + mean q), p = queue_patience · L · c. An idle fleet counts its queues in full; where every
              worker has a queue, a miss lengthens it for all, so only relative differences count (with plain
              milliseconds a saturated fleet gives up half its hits). At most n · p is taken off, so with
              queue_patience ≤ 0.5 a fleet of two would never give up a full hit
    m_i     = max(0, k_i + need_i − kv_pressure_start_ratio) · kv_capacity_tokens · reuse_ratio · c: the cache that
              would have to make room, at the price of what of it is wanted again; k_i the reported KV usage,
              need_i = (prompt + output − H_i) / kv_capacity_tokens (`auto`: what each engine reports). Left out where
              no worker's usage or capacity is known
    h_i     = hotspot_weight · max(0, share_i − hotspot_fair_shares / n) · L · c: share_i of the requests of the last
              hotspot_window_seconds went here. Every worker is first given hotspot_prior_requests, so that a handful of
              requests makes no hotspot
    r_i     = (c_i − c) · (L − H_i + g · tokens ahead), with learn_rates only: c_i is c by the rate that the worker's
              own answers have shown (`router.rates`); 0 while that isn't known

Copies of an opening, the first copies_blocks blocks of a prompt (16): where copies_cap workers hold it, only they are
chosen from; while fewer than copies_target do, a request that shares no more than 1.25 times the opening goes to
another worker. Both come before the score. By default neither is set.

Defaults: prefill_tokens_per_second 8000, decode_ms_per_request 30, queue_patience 1, kv_capacity_tokens null (memory is
left out), kv_pressure_start_ratio 0.9, reuse_ratio 0.5, transfer_tokens_per_second none, host_credit 0.75, disk_credit
0.25, shared_credit 0.5 (all ours; 0 ignores the tier, 1 counts it like the GPU), hotspot_weight 2, hotspot_fair_shares
1 (at 2 a fleet of two could never trip it), hotspot_window_seconds 60, hotspot_prior_requests 4. learn_rates false. Set
the first to the engines' measured rate: every other term is weighed against it.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixwatch.router.policies.shared.recent_requests import RecentRequests
from prefixwatch.router.policy import (
    Decision,
    Fleet,
    LowerTiers,
    Needs,
    Policy,
    RouteRequest,
    Worker,
    deepest_hit,
    hit_reason,
    known_or_highest,
    kv_usages,
    requests_at,
)


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    prefill_tokens_per_second: float = 8000.0
    decode_ms_per_request: float = 30.0
    queue_patience: float = 1.0
    kv_capacity_tokens: int | Literal["auto"] | None = None
    kv_pressure_start_ratio: float = 0.9
    reuse_ratio: float = 0.5
    transfer_tokens_per_second: float | None = None
    host_credit: float = 0.75
    disk_credit: float = 0.25
    shared_credit: float = 0.5
    hotspot_weight: float = 2.0
    hotspot_fair_shares: float = 1.0
    hotspot_window_seconds: float = 60.0
    hotspot_prior_requests: float = 4.0
    learn_rates: bool = False
    copies_blocks: int = 16
    copies_target: int | None = None
    copies_cap: int | None = None


_BEYOND_OPENING = 1.25
"""Who shares more than this multiple of the opening goes on with something that lies at one worker."""


class Score(Policy):
    """Prefill time saved less queue, memory pressure and hotspot, in milliseconds."""

    name = "score"
    source = "prefixwatch"
    needs = Needs(tokens=True, cache_view=True, engine_load=True)
    reasons = ("hit_deepest", "hit_sacrificed", "miss_least_cost")
    Options = ScoreOptions
    options: ScoreOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._ms_per_token = 1000.0 / self.options.prefill_tokens_per_second
        self._recent = RecentRequests(self.options.hotspot_window_seconds)
        target, cap = self.options.copies_target, self.options.copies_cap
        if target is not None and cap is not None and target > cap:
            raise ValueError(
                f"policy score: copies_target {target} exceeds copies_cap {cap}: lower it, or raise the cap"
            )

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        self._recent.expire(fleet.now_seconds)
        deepest = deepest_hit(fleet.workers, depths)
        queues_ms = self._queues_ms(fleet.workers)
        scores = self._scores(request, fleet, depths, deepest, queues_ms)
        allowed = self._allowed(request, depths, scores)
        best = max(allowed.values())
        ties = [name for name, score in allowed.items() if score == best]
        chosen = ties[0] if len(ties) == 1 else self.rng.choice(ties)
        depth = depths.get(chosen, 0)
        pulls = None
        if fleet.pull_seconds is not None and fleet.lower_tiers is None:
            pulls = self._pull_gain_ms(request, depth, deepest, fleet.pull_seconds) > 0
        uncached_tokens = max(0, request.prompt_tokens - depth * request.block_size)
        return Decision(
            chosen,
            hit_reason(depth, deepest, "miss_least_cost"),
            depth,
            scores,
            predicted_queue_seconds=queues_ms[list(scores).index(chosen)] / 1000.0,
            predicted_prefill_seconds=uncached_tokens * self._ms_per_token / 1000.0,
            pulls=pulls,
        )

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._recent.add(worker, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        self._recent.forget(worker)

    def _scores(
        self,
        request: RouteRequest,
        fleet: Fleet,
        depths: Mapping[str, int],
        deepest: int,
        queues_ms: Sequence[float],
    ) -> dict[str, float]:
        workers, ms_per_token = fleet.workers, self._ms_per_token
        cold_ms = max(request.prompt_tokens, 1) * ms_per_token
        patience_ms = self.options.queue_patience * cold_ms
        queue_scale = patience_ms / (patience_ms + sum(queues_ms) / len(workers))
        request_ms, free_ms = self._hotspot_ms(cold_ms, len(workers))
        recent = self._recent.count
        scores = {}
        for worker, queue_ms in zip(workers, queues_ms, strict=True):
            name = worker.name
            hotspot_ms = recent(name) * request_ms - free_ms
            scores[name] = -queue_ms * queue_scale - (hotspot_ms if hotspot_ms > 0 else 0.0)
        block, prompt = request.block_size, request.prompt_tokens
        for name, depth in depths.items():
            if name in scores:
                hit = depth * block
                scores[name] += (hit if hit < prompt else prompt) * ms_per_token
        if fleet.lower_tiers is not None:
            self._add_lower_tiers(scores, request, fleet.lower_tiers(request, depths))
        elif fleet.pull_seconds is not None and deepest:
            for name in scores:
                gain_ms = self._pull_gain_ms(request, depths.get(name, 0), deepest, fleet.pull_seconds)
                scores[name] += max(0.0, gain_ms)
        elif self.options.transfer_tokens_per_second and deepest:
            self._add_transfers(scores, request, depths, deepest)
        if self.options.learn_rates:
            self._subtract_slowness(scores, request, workers, depths, queue_scale)
        if self.options.kv_capacity_tokens:
            self._subtract_memory(scores, request, workers, depths)
        return scores

    def _subtract_slowness(
        self,
        scores: dict[str, float],
        request: RouteRequest,
        workers: Sequence[Worker],
        depths: Mapping[str, int],
        queue_scale: float,
    ) -> None:
        for worker in workers:
            rate = worker.rates.prefill_tokens_per_second
            if rate is not None:
                uncached = max(0, request.prompt_tokens - depths.get(worker.name, 0) * request.block_size)
                slower_ms = 1000.0 / rate - self._ms_per_token
                scores[worker.name] -= slower_ms * (uncached + queue_scale * worker.prefill_tokens)

    def _allowed(
        self, request: RouteRequest, depths: Mapping[str, int], scores: dict[str, float]
    ) -> Mapping[str, float]:
        """The scores of the workers that the number of copies leaves to choose from."""
        target, cap = self.options.copies_target, self.options.copies_cap
        if target is None and cap is None:
            return scores
        opening = min(self.options.copies_blocks, len(request.blocks))
        holders = {name: score for name, score in scores.items() if depths.get(name, 0) >= opening > 0}
        if cap is not None and len(holders) >= cap:
            return holders
        known = max((depths.get(name, 0) for name in scores), default=0)
        if target is not None and 0 < len(holders) < target and known <= _BEYOND_OPENING * opening:
            return {name: score for name, score in scores.items() if name not in holders} or scores
        return scores

    def _queues_ms(self, workers: Sequence[Worker]) -> list[float]:
        ms_per_token, decode_ms = self._ms_per_token, self.options.decode_ms_per_request
        return [
            worker.prefill_tokens * ms_per_token + requests * decode_ms
            for worker, requests in zip(workers, requests_at(workers), strict=True)
        ]

    def _hotspot_ms(self, cold_ms: float, workers: int) -> tuple[float, float]:
        """What each recent request adds to a worker's h_i, and how much of that is free."""
        options = self.options
        prior = options.hotspot_prior_requests
        observed = len(self._recent) + prior * workers
        request_ms = options.hotspot_weight * cold_ms / observed if observed else 0.0
        return request_ms, options.hotspot_weight * cold_ms * options.hotspot_fair_shares / workers - prior * request_ms

    def _add_lower_tiers(
        self, scores: dict[str, float], request: RouteRequest, found: Mapping[str, LowerTiers]
    ) -> None:
        options = self.options
        for name, tiers in found.items():
            if name in scores:
                credited = (
                    options.host_credit * tiers.host_blocks
                    + options.disk_credit * tiers.disk_blocks
                    + options.shared_credit * tiers.shared_blocks
                )
                scores[name] += credited * request.block_size * self._ms_per_token

    def _pull_gain_ms(
        self, request: RouteRequest, depth: int, deepest: int, pull_seconds: Callable[[int], float]
    ) -> float:
        """Prefill that pulling from the deepest holder saves, less the time it takes."""
        prompt, block = request.prompt_tokens, request.block_size
        pulled = min(deepest * block, prompt) - min(depth * block, prompt)
        return pulled * self._ms_per_token - pull_seconds(pulled) * 1000.0

    def _add_transfers(
        self, scores: dict[str, float], request: RouteRequest, depths: Mapping[str, int], deepest: int
    ) -> None:
        assert self.options.transfer_tokens_per_second is not None
        gain_ms = self._ms_per_token - 1000.0 / self.options.transfer_tokens_per_second
        best = min(deepest * request.block_size, request.prompt_tokens)
        for name in scores:
            hit = min(depths.get(name, 0) * request.block_size, request.prompt_tokens)
            scores[name] += max(0.0, (best - hit) * gain_ms)

    def _capacities(self, workers: Sequence[Worker]) -> list[int]:
        """Tokens of KV that each worker holds; empty where none is known. One that doesn't report it is like the
        smallest of the others."""
        if self.options.kv_capacity_tokens != "auto":
            return [self.options.kv_capacity_tokens or 0] * len(workers)
        reported = [worker.report.kv_capacity_tokens if worker.report else None for worker in workers]
        known = [capacity for capacity in reported if capacity]
        return [capacity or min(known) for capacity in reported] if known else []

    def _subtract_memory(
        self, scores: dict[str, float], request: RouteRequest, workers: Sequence[Worker], depths: Mapping[str, int]
    ) -> None:
        options = self.options
        usages = kv_usages(workers)
        capacities = self._capacities(workers)
        if not any(usage is not None for usage in usages) or not capacities:
            return
        for worker, usage, capacity in zip(workers, known_or_highest(usages), capacities, strict=True):
            hit = min(depths.get(worker.name, 0) * request.block_size, request.prompt_tokens)
            needed = (request.prompt_tokens + request.max_output_tokens - hit) / capacity
            over = usage + needed - options.kv_pressure_start_ratio
            scores[worker.name] -= max(0.0, over) * capacity * options.reuse_ratio * self._ms_per_token
