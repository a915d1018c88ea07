"""Score: what a worker's prefix saves this request, less what waiting and crowding there cost it, all in milliseconds.

    S_i = saved_i − g · q_i − m_i − h_i        highest wins, ties random

    c       = 1000 / prefill_tokens_per_second                        ms to prefill one token
    saved_i = H_i · c, H_i the hit tokens; if KV can be pulled from the best holder (`transfer_tokens_per_second`):
              the larger of that and H* · c − x_i, x_i = (H* − H_i) · 1000 / transfer_tokens_per_second
    q_i     = uncached prompt tokens ahead of it · c + requests in flight · decode_ms_per_request; requests in flight
              are this router's, or the engine's own running + waiting where that is more
    g       = p / (p + mean q), p = queue_patience · L · c. An idle fleet counts its queues in full; where every
              worker has a queue, a miss lengthens it for all, so only relative differences count (with plain
              milliseconds a saturated fleet gives up half its hits)
    m_i     = max(0, k_i + need_i − kv_pressure_start_ratio) · kv_capacity_tokens · reuse_ratio · c: the cache that
              would have to make room, at the price of what of it is wanted again; k_i the reported KV usage,
              need_i = (prompt + output − H_i) / kv_capacity_tokens. Left out where usage or capacity isn't known
    h_i     = hotspot_weight · max(0, share_i − hotspot_fair_shares / n) · L · c: share_i of the requests of the last
              hotspot_window_seconds went here. Each worker is first given hotspot_prior_requests, so that a handful of
              requests makes no hotspot

Defaults: prefill_tokens_per_second 8000, decode_ms_per_request 30, queue_patience 0.5, kv_capacity_tokens
unknown, kv_pressure_start_ratio 0.9, reuse_ratio 0.5, transfer_tokens_per_second none, hotspot_weight 2,
hotspot_fair_shares 1 (at 2 a fleet of two could never trip it), hotspot_window_seconds 60,
hotspot_prior_requests 4. Set the first to the engines' measured rate: every other term is weighed against it.

Source: ours.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.policy import Decision, Fleet, Needs, Policy, RouteRequest, Worker


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    prefill_tokens_per_second: float = 8000.0
    decode_ms_per_request: float = 30.0
    queue_patience: float = 0.5
    kv_capacity_tokens: int | None = None
    kv_pressure_start_ratio: float = 0.9
    reuse_ratio: float = 0.5
    transfer_tokens_per_second: float | None = None
    hotspot_weight: float = 2.0
    hotspot_fair_shares: float = 1.0
    hotspot_window_seconds: float = 60.0
    hotspot_prior_requests: float = 4.0


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
        self._recent: deque[tuple[float, str]] = deque()
        self._recent_count: Counter[str] = Counter()

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.hit_blocks(request)
        self._expire(fleet.now_seconds)
        deepest = max((depths.get(worker.name, 0) for worker in fleet.workers), default=0) if depths else 0
        scores = self._scores(request, fleet, depths, deepest)
        best = max(scores.values())
        ties = [name for name, score in scores.items() if score == best]
        chosen = ties[0] if len(ties) == 1 else self.rng.choice(ties)
        depth = depths.get(chosen, 0)
        return Decision(chosen, _reason(depth, deepest), depth, scores)

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._recent.append((now_seconds, worker))
        self._recent_count[worker] += 1

    def on_worker_removed(self, worker: str) -> None:
        self._recent = deque(entry for entry in self._recent if entry[1] != worker)
        self._recent_count.pop(worker, None)

    def _scores(self, request: RouteRequest, fleet: Fleet, depths: Mapping[str, int], deepest: int) -> dict[str, float]:
        options, ms_per_token, workers = self.options, self._ms_per_token, fleet.workers
        prompt, block, decode_ms = request.prompt_tokens, request.block_size, options.decode_ms_per_request
        cold_ms = max(prompt, 1) * ms_per_token
        queues_ms = [worker.prefill_tokens * ms_per_token + _in_flight(worker) * decode_ms for worker in workers]
        patience_ms = options.queue_patience * cold_ms
        queue_scale = patience_ms / (patience_ms + sum(queues_ms) / len(workers))
        recent, prior = self._recent_count, options.hotspot_prior_requests
        observed = sum(recent[worker.name] for worker in workers) + prior * len(workers)
        share_ms = options.hotspot_weight * cold_ms / observed if observed else 0.0
        fair_ms = options.hotspot_weight * cold_ms * options.hotspot_fair_shares / len(workers)
        depth_of = depths.get
        scores = {}
        for worker, queue_ms in zip(workers, queues_ms, strict=True):
            name = worker.name
            depth = depth_of(name, 0)
            hit = min(depth * block, prompt) if depth else 0
            score = hit * ms_per_token - queue_ms * queue_scale
            hotspot = (recent[name] + prior) * share_ms - fair_ms
            if hotspot > 0:
                score -= hotspot
            if options.transfer_tokens_per_second and depth < deepest:
                pulled = min(deepest * block, prompt) - hit
                score += max(0.0, pulled * (ms_per_token - 1000.0 / options.transfer_tokens_per_second))
            if options.kv_capacity_tokens:
                score -= self._memory_ms(worker, prompt + request.max_output_tokens - hit, options.kv_capacity_tokens)
            scores[name] = score
        return scores

    def _memory_ms(self, worker: Worker, needed_tokens: int, capacity_tokens: int) -> float:
        usage = worker.report.kv_usage_ratio if worker.report else None
        if usage is None:
            return 0.0
        over = usage + needed_tokens / capacity_tokens - self.options.kv_pressure_start_ratio
        return max(0.0, over) * capacity_tokens * self.options.reuse_ratio * self._ms_per_token

    def _expire(self, now_seconds: float) -> None:
        recent, oldest = self._recent, now_seconds - self.options.hotspot_window_seconds
        while recent and recent[0][0] < oldest:
            self._recent_count[recent.popleft()[1]] -= 1


def _reason(depth: int, deepest: int) -> str:
    if not deepest:
        return "miss_least_cost"
    return "hit_deepest" if depth == deepest else "hit_sacrificed"


def _in_flight(worker: Worker) -> int:
    report = worker.report
    if report is None:
        return worker.in_flight
    return max(worker.in_flight, (report.running or 0) + (report.waiting or 0))
