"""Score: what a worker's prefix saves this request, less what waiting and crowding there cost it, all in milliseconds.

    S_i = saved_i − g · q_i − m_i − h_i        highest wins, ties random

    c       = 1000 / prefill_tokens_per_second                        ms to prefill one token
    saved_i = H_i · c, H_i the hit tokens; if KV can be pulled from the best holder (`transfer_tokens_per_second`):
              the larger of that and H* · c − x_i, x_i = (H* − H_i) · 1000 / transfer_tokens_per_second
    q_i     = uncached prompt tokens ahead of it · c + requests in flight · decode_ms_per_request; requests in flight
              are this router's, or the engine's own running + waiting where that is more
    g       = p / (p + mean q), p = queue_patience · L · c. An idle fleet counts its queues in full; where every
              worker has a queue, a miss lengthens it for all, so only relative differences count (with plain
              milliseconds a saturated fleet gives up half its hits). At most n · p is taken off, so with
              queue_patience ≤ 0.5 a fleet of two would never give up a full hit
    m_i     = max(0, k_i + need_i − kv_pressure_start_ratio) · kv_capacity_tokens · reuse_ratio · c: the cache that
              would have to make room, at the price of what of it is wanted again; k_i the reported KV usage,
              need_i = (prompt + output − H_i) / kv_capacity_tokens. Left out where usage or capacity isn't known
    h_i     = hotspot_weight · max(0, share_i − hotspot_fair_shares / n) · L · c: share_i of the requests of the last
              hotspot_window_seconds went here. Every worker is first given hotspot_prior_requests, so that a handful of
              requests makes no hotspot

Defaults: prefill_tokens_per_second 8000, decode_ms_per_request 30, queue_patience 1, kv_capacity_tokens
unknown, kv_pressure_start_ratio 0.9, reuse_ratio 0.5, transfer_tokens_per_second none, hotspot_weight 2,
hotspot_fair_shares 1 (at 2 a fleet of two could never trip it), hotspot_window_seconds 60,
hotspot_prior_requests 4. Set the first to the engines' measured rate: every other term is weighed against it.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.policy import Decision, Fleet, LoadReport, Needs, Policy, RouteRequest, Worker
from router.recent_requests import RecentRequests


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    prefill_tokens_per_second: float = 8000.0
    decode_ms_per_request: float = 30.0
    queue_patience: float = 1.0
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
        self._recent = RecentRequests(self.options.hotspot_window_seconds)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.hit_blocks(request)
        self._recent.expire(fleet.now_seconds)
        deepest = max((depths.get(worker.name, 0) for worker in fleet.workers), default=0) if depths else 0
        scores = self._scores(request, fleet, depths, deepest)
        best = max(scores.values())
        ties = [name for name, score in scores.items() if score == best]
        chosen = ties[0] if len(ties) == 1 else self.rng.choice(ties)
        depth = depths.get(chosen, 0)
        (queue_ms,) = self._queues_ms([worker for worker in fleet.workers if worker.name == chosen])
        uncached_tokens = max(0, request.prompt_tokens - depth * request.block_size)
        return Decision(
            chosen,
            _reason(depth, deepest),
            depth,
            scores,
            predicted_queue_seconds=queue_ms / 1000.0,
            predicted_prefill_seconds=uncached_tokens * self._ms_per_token / 1000.0,
        )

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._recent.add(worker, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        self._recent.forget(worker)

    def _scores(self, request: RouteRequest, fleet: Fleet, depths: Mapping[str, int], deepest: int) -> dict[str, float]:
        workers, ms_per_token = fleet.workers, self._ms_per_token
        cold_ms = max(request.prompt_tokens, 1) * ms_per_token
        queues_ms = self._queues_ms(workers)
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
        if self.options.transfer_tokens_per_second and deepest:
            self._add_transfers(scores, request, depths, deepest)
        if self.options.kv_capacity_tokens:
            self._subtract_memory(scores, request, workers, depths)
        return scores

    def _queues_ms(self, workers: Sequence[Worker]) -> list[float]:
        ms_per_token, decode_ms = self._ms_per_token, self.options.decode_ms_per_request
        return [
            worker.prefill_tokens * ms_per_token
            + (worker.in_flight if worker.report is None else _in_flight(worker, worker.report)) * decode_ms
            for worker in workers
        ]

    def _hotspot_ms(self, cold_ms: float, workers: int) -> tuple[float, float]:
        """What each recent request adds to a worker's h_i, and how much of that is free."""
        options = self.options
        prior = options.hotspot_prior_requests
        observed = len(self._recent) + prior * workers
        request_ms = options.hotspot_weight * cold_ms / observed if observed else 0.0
        return request_ms, options.hotspot_weight * cold_ms * options.hotspot_fair_shares / workers - prior * request_ms

    def _add_transfers(
        self, scores: dict[str, float], request: RouteRequest, depths: Mapping[str, int], deepest: int
    ) -> None:
        assert self.options.transfer_tokens_per_second is not None
        gain_ms = self._ms_per_token - 1000.0 / self.options.transfer_tokens_per_second
        best = min(deepest * request.block_size, request.prompt_tokens)
        for name in scores:
            hit = min(depths.get(name, 0) * request.block_size, request.prompt_tokens)
            scores[name] += max(0.0, (best - hit) * gain_ms)

    def _subtract_memory(
        self, scores: dict[str, float], request: RouteRequest, workers: Sequence[Worker], depths: Mapping[str, int]
    ) -> None:
        options, capacity = self.options, self.options.kv_capacity_tokens
        assert capacity is not None
        for worker in workers:
            usage = worker.report.kv_usage_ratio if worker.report else None
            if usage is None:
                continue
            hit = min(depths.get(worker.name, 0) * request.block_size, request.prompt_tokens)
            needed = (request.prompt_tokens + request.max_output_tokens - hit) / capacity
            over = usage + needed - options.kv_pressure_start_ratio
            scores[worker.name] -= max(0.0, over) * capacity * options.reuse_ratio * self._ms_per_token


def _reason(depth: int, deepest: int) -> str:
    if not deepest:
        return "miss_least_cost"
    return "hit_deepest" if depth == deepest else "hit_sacrificed"


def _in_flight(worker: Worker, report: LoadReport) -> int:
    return max(worker.in_flight, (report.running or 0) + (report.waiting or 0))
