"""Load aware: the share of the prompt that a worker holds, less how far its load lies above the fleet's mean.

    S_i = min(H_i, L) / max(L, 1) − beta · (N_i − N̄) / max(1, N̄)        highest wins

    H_i  hit tokens; N_i requests in prefill and decode from this router; N̄ their mean over all candidates

The clamp makes the penalty absolute while the fleet is nearly idle. Nobody holds anything: by session or request
rate, as `session` does; beta plays no part then.

Defaults: beta 1.0 (the experiment published with it used 0.5), statistics_window_seconds 60. Ties: the first name in
lexicographic order. Deterministic. Worked example: L = 1000, H = (900, 0, 500), N = (8, 2, 5): beta 1 scores
(0.30, 0.60, 0.50), beta 0.5 (0.60, 0.30, 0.50).

Source: vllm-project/production-stack#1035 `loadaware` (`LOADAWARE_BETA`). The source ignores `kv_aware_threshold` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from prefixwatch.router.policies.shared.session_placement import REASONS, STATISTICS_WINDOW_SECONDS, SessionPlacement
from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest, Worker


@dataclass(frozen=True, slots=True)
class LoadAwareOptions:
    beta: float = 1.0
    statistics_window_seconds: float = STATISTICS_WINDOW_SECONDS


class LoadAware(Policy):
    """Cached share of the prompt less the relative excess of requests in flight."""

    name = "loadaware"
    source = "vllm-project/production-stack#1035 loadaware"
    needs = Needs(tokens=True, cache_view=True)
    reasons = ("hit_deepest", "hit_sacrificed", *REASONS)
    deterministic = True
    Options: ClassVar[type] = LoadAwareOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._fallback = SessionPlacement(self.options.statistics_window_seconds)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        deepest = max((depths.get(worker.name, 0) for worker in fleet.workers), default=0)
        if not deepest:
            return self._fallback.place(request, fleet)
        loads = self._loads(fleet.workers)
        mean = sum(loads) / len(loads)
        scores = {}
        for worker, load in zip(fleet.workers, loads, strict=True):
            hit_tokens = min(depths.get(worker.name, 0) * request.block_size, request.prompt_tokens)
            excess = (load - mean) / max(1.0, mean)
            scores[worker.name] = hit_tokens / max(request.prompt_tokens, 1) - self.options.beta * excess
        best = max(scores.values())
        chosen = min(name for name, score in scores.items() if score == best)
        depth = depths.get(chosen, 0)
        return Decision(chosen, "hit_deepest" if depth == deepest else "hit_sacrificed", depth, scores)

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._fallback.rates.arrived(worker, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        self._fallback.forget(worker)

    def _loads(self, workers: Sequence[Worker]) -> list[float]:
        return [float(worker.in_flight) for worker in workers]
