"""Mooncake's Algorithm 1: the least estimated time to first token, with KV pulled where another worker has far more.

With p_i the tokens of the prompt's prefix that worker i holds and p* the most that any holds:

    p* / p_i > balancing_threshold:  prefix = p*,  transfer = transfer_base_ms + (p* − p_i) · 1000 / transfer rate
    else:                            prefix = p_i, transfer = 0
    TTFT_i = transfer + queue_i + prefill(L, prefix)                [ms, lowest wins, the first on equality]

p_i = 0 < p* counts as above the threshold; p* = 0 as below it. queue_i is the sum of the predicted prefill times of the
requests sent to i without a first token, nothing taken off for what has run. prefill is the CalibratedPredictor of
`flexlb.prefill_predictor`: base, tokens, attention; `calibration`, rows of (prompt tokens, cached tokens, measured ms),
replaces the assumed coefficients.

The decision asks the worker to pull (`Decision.pulls`). `simulate --cache transfer` makes these pulls, from the best
holder, and `--cache shared` from the store, whose blocks then count in p*; both say what a pull takes, which replaces
transfer_base_ms and the rate. The live router's engines recompute what they lack. Without a pool that moves KV set
`transfer_tokens_per_second` to null; every worker then has its own prefix only (the paper's local variant).

Defaults: balancing_threshold 2, transfer_base_ms 5, transfer_tokens_per_second 80,000, prefill base 10 ms and
0.125 ms a token, no attention. All ours: the paper publishes none ("adjusted manually"). Not modelled: refusing
requests whose estimate misses the SLO, and choosing the decode worker. Deterministic; on an idle fleet every miss
goes to the first worker (F-1), as written.

Source: Mooncake (FAST'25), Algorithm 1. The open-source Conductor only answers look-ups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixwatch.router.policies.flexlb.prefill_predictor import CalibratedPredictor, Prefill
from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    balancing_threshold: float = 2.0
    transfer_base_ms: float = 5.0
    transfer_tokens_per_second: float | None = 80_000.0
    calibration: tuple[tuple[int, int, float], ...] = ()


class Mooncake(Policy):
    """Least estimated time to first token, pulling KV from a far better holder."""

    name = "mooncake"
    source = "Mooncake (FAST'25) Algorithm 1"
    needs = Needs(tokens=True, cache_view=True)
    reasons = ("local_prefix", "transfer", "miss")
    deterministic = True
    Options = MooncakeOptions
    options: MooncakeOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        try:
            calibration = self.options.calibration
            self._predictor = (
                CalibratedPredictor.fit(calibration)
                if calibration
                else CalibratedPredictor(base_ms=10.0, ms_per_token=0.125)
            )
        except ValueError as error:
            raise ValueError(f"policy {self.name}: {error}") from error
        self._queued_ms: dict[str, dict[RouteRequest, float]] = {}
        self._placed: tuple[RouteRequest | None, dict[str, float]] = (None, {})

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        held = {w.name: min(depths.get(w.name, 0) * request.block_size, request.prompt_tokens) for w in fleet.workers}
        best = max(self._with_store(request, fleet, depths, held).values())
        prefill_ms, ttft_ms = {}, {}
        for name, tokens in held.items():
            pulled = best - tokens if self._pulls(tokens, best) else 0
            prefill_ms[name] = self._predictor.predict_ms([Prefill(request.prompt_tokens, tokens + pulled)])
            ttft_ms[name] = self._transfer_ms(pulled, fleet) + self._queue_ms(name) + prefill_ms[name]
        self._placed = request, prefill_ms
        chosen = min(ttft_ms, key=ttft_ms.__getitem__)
        how = "transfer" if self._pulls(held[chosen], best) else "local_prefix"
        return Decision(
            chosen,
            how if best else "miss",
            depths.get(chosen, 0),
            ttft_ms,
            predicted_queue_seconds=self._queue_ms(chosen) / 1000.0,
            predicted_prefill_seconds=prefill_ms[chosen] / 1000.0,
            pulls=how == "transfer" if fleet.pull_seconds is not None else None,
        )

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        (placed, prefill_ms), self._placed = self._placed, (None, {})
        if placed is request and worker in prefill_ms:
            expected_ms = prefill_ms[worker]
        else:
            expected_ms = self._predictor.predict_ms([Prefill(request.prompt_tokens, 0)])
        self._queued_ms.setdefault(worker, {})[request] = expected_ms

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._queued_ms.get(worker, {}).pop(request, None)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._queued_ms.get(worker, {}).pop(request, None)

    def on_worker_removed(self, worker: str) -> None:
        self._queued_ms.pop(worker, None)

    def _pulls(self, local: int, best: int) -> bool:
        if self.options.transfer_tokens_per_second is None or local == best:
            return False
        return not local or best / local > self.options.balancing_threshold

    def _with_store(
        self, request: RouteRequest, fleet: Fleet, depths: Mapping[str, int], held: dict[str, int]
    ) -> dict[str, int]:
        """The tokens that each worker would have with what a shared store holds behind its own."""
        if fleet.lower_tiers is None or fleet.pull_seconds is None:
            return held
        found = fleet.lower_tiers(request, depths)
        block, prompt = request.block_size, request.prompt_tokens
        more = {name: found[name].shared_blocks * block if name in found else 0 for name in held}
        return {name: min(prompt, tokens + more[name]) for name, tokens in held.items()}

    def _transfer_ms(self, tokens: int, fleet: Fleet) -> float:
        if fleet.pull_seconds is not None:
            return fleet.pull_seconds(tokens) * 1000.0
        rate = self.options.transfer_tokens_per_second
        return self.options.transfer_base_ms + tokens * 1000.0 / rate if tokens and rate else 0.0

    def _queue_ms(self, worker: str) -> float:
        return sum(self._queued_ms.get(worker, {}).values())
