"""Load aware by tokens: as `loadaware`, with each worker's outstanding tokens instead of its request count.

    W_i = uncached prompt tokens sent and not yet answered + gamma · output tokens allowed to its requests in flight

A request that names no limit of output tokens counts `expected_output_tokens`; what it has generated so far isn't
taken off, because a policy doesn't learn it.

    S_i = min(H_i, L) / max(L, 1) − beta · (W_i − W̄) / max(1, W̄)

The clamp, one token here, never binds in practice: the penalty is relative even on a nearly idle fleet.

Defaults: beta 1.0, gamma 1.0 and expected_output_tokens 256 (nobody published a gamma; 1.0 prices an output token
like a prompt token), statistics_window_seconds 60. Ties and misses: as `loadaware`. Deterministic.

Source: ours, after a proposal to replace requests by token equivalents in production-stack#1035; in no code base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.router.policies.production_stack.loadaware import LoadAware
from prefixwatch.router.policies.shared.session_placement import STATISTICS_WINDOW_SECONDS
from prefixwatch.router.policy import RouteRequest, Worker


@dataclass(frozen=True, slots=True)
class LoadAwareTokensOptions:
    beta: float = 1.0
    gamma: float = 1.0
    expected_output_tokens: int = 256
    statistics_window_seconds: float = STATISTICS_WINDOW_SECONDS


class LoadAwareTokens(LoadAware):
    """Cached share of the prompt less the relative excess of outstanding tokens."""

    name = "loadaware_tokens"
    source = "prefixwatch, after vllm-project/production-stack#1035"
    Options = LoadAwareTokensOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._output_tokens: Counter[str] = Counter()
        self._open: dict[str, dict[int, RouteRequest]] = {}

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        super().on_admit(request, worker, now_seconds)
        self._open.setdefault(worker, {})[id(request)] = request
        self._output_tokens[worker] += self._allowed(request)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        """A request that outlived its worker's departure isn't taken off the worker's successor."""
        if self._open.get(worker, {}).pop(id(request), None) is not None:
            self._output_tokens[worker] -= self._allowed(request)

    def on_worker_removed(self, worker: str) -> None:
        super().on_worker_removed(worker)
        self._open.pop(worker, None)
        self._output_tokens.pop(worker, None)

    def _allowed(self, request: RouteRequest) -> int:
        return request.max_output_tokens or int(self.options.expected_output_tokens)

    def _loads(self, workers: Sequence[Worker]) -> list[float]:
        gamma = float(self.options.gamma)
        return [worker.prefill_tokens + gamma * self._output_tokens[worker.name] for worker in workers]
