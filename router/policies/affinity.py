"""Affinity: a session's home, the prefix holders, load and hardware, each with a price in prompt tokens.

    S_i = m_i · (L + H_i + home_i) − p · (load_i − mean) / (p + mean) − hot_i        highest wins, ties random

    L, H_i   prompt tokens, and those of them that the worker holds
    home_i   home_ratio · (L − H*) at the home, H* the deepest hit: the home is worth what part of the prompt is
             still to be cached somewhere. A holder beats it from H_i / L > home_ratio / (1 + home_ratio)
    home     the first worker clockwise on the ring (`policies.shared.hash_ring`), at the sticky key, that got at most
             home_bound times its fair share of the last window_seconds' requests
    key      the session; without one the prompt's opening (its first opening_tokens, in the tenant's namespace)
    load_i   uncached prompt tokens ahead + requests in flight · tokens_per_request; requests in flight are this
             router's, or the engine's own running + waiting where that is more
    p        patience_ratio · L: short queues count in full, and where every worker has a queue only relative
             differences do
    hot_i    hotspot_weight · L · max(0, share_i − 1 / n), share_i of the window's requests; each worker is first given
             prior_requests, so that a handful of requests makes no hotspot
    m_i      how well the worker's hardware suits, 0 … 1: for each property that the request calls for, its value over
             the best candidate's; the least of them counts. L ≥ long_prompt_tokens calls for prefill rate and
             intra-node bandwidth, an output limit > long_output_tokens for decode rate, one < short_output_tokens for
             prefill rate. What isn't stated in `hardware` counts as suiting. A preference, never a filter. With
             learn_hardware, the rates that a worker's answers have shown (`router.rates`) count before the stated ones

Defaults: home_ratio 0.5, home_bound 1.25, opening_tokens 256, tokens_per_request 256, patience_ratio 1, hotspot_weight
2, window_seconds 60, prior_requests 4, hardware {}, learn_hardware false, long_prompt_tokens 32768, long_output_tokens
2000, short_output_tokens 200.

Source: ours. Placing misses by a ring makes replicas of the router agree on them without talking to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_hexdigest

from prefixwatch.router.policies.sglang.prefix_hash import prefix_key
from prefixwatch.router.policies.shared.hash_ring import HashRing
from prefixwatch.router.policies.shared.recent_requests import RecentRequests
from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest, Worker, deepest_hit, requests_at
from prefixwatch.router.rates import Hardware


@dataclass(frozen=True, slots=True)
class AffinityOptions:
    home_ratio: float = 0.5
    home_bound: float = 1.25
    opening_tokens: int = 256
    tokens_per_request: float = 256.0
    patience_ratio: float = 1.0
    hotspot_weight: float = 2.0
    window_seconds: float = 60.0
    prior_requests: float = 4.0
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    learn_hardware: bool = False
    long_prompt_tokens: int = 32_768
    long_output_tokens: int = 2_000
    short_output_tokens: int = 200


class Affinity(Policy):
    """Sticky home or prefix holder, unless its load, its share of the traffic or its hardware speaks against it."""

    name = "affinity"
    source = "prefixwatch"
    needs = Needs(tokens=True, cache_view=True, engine_load=True)
    reasons = ("hit_deepest", "hit_sacrificed", "home", "home_passed_over")
    Options = AffinityOptions
    options: AffinityOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._ring = HashRing()
        self._recent = RecentRequests(self.options.window_seconds)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        workers, depths = fleet.workers, fleet.lookup(request)
        self._recent.expire(fleet.now_seconds)
        shares = self._shares(workers)
        home = self._home(request, shares)
        scores = self._scores(request, workers, depths, home, shares)
        best = max(scores.values())
        ties = [name for name, score in scores.items() if score == best]
        chosen = ties[0] if len(ties) == 1 else self.rng.choice(ties)
        depth = depths.get(chosen, 0)
        return Decision(chosen, _reason(depth, deepest_hit(workers, depths), chosen == home), depth, scores)

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._recent.expire(now_seconds)
        self._recent.add(worker, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        self._ring.remove(worker)
        self._recent.forget(worker)

    def _scores(
        self,
        request: RouteRequest,
        workers: Sequence[Worker],
        depths: Mapping[str, int],
        home: str,
        shares: Mapping[str, float],
    ) -> dict[str, float]:
        options, prompt = self.options, max(request.prompt_tokens, 1)
        request_tokens = options.tokens_per_request
        loads = [
            worker.prefill_tokens + requests * request_tokens
            for worker, requests in zip(workers, requests_at(workers), strict=True)
        ]
        mean, patience = sum(loads) / len(loads), options.patience_ratio * prompt
        load_price = patience / (patience + mean) if patience else 0.0
        values = dict.fromkeys(shares, float(prompt))
        for name, depth in depths.items():
            if name in values:
                values[name] += min(depth * request.block_size, prompt)
        values[home] += options.home_ratio * max(0, prompt - deepest_hit(workers, depths) * request.block_size)
        hot_price, fair = options.hotspot_weight * prompt, 1 / len(workers)
        scores = {}
        for (name, value), load, suit in zip(values.items(), loads, self._suits(request, workers), strict=True):
            hot = shares[name] - fair
            scores[name] = suit * value - load_price * (load - mean) - (hot * hot_price if hot > 0 else 0.0)
        return scores

    def _shares(self, workers: Sequence[Worker]) -> dict[str, float]:
        """Share of the window's requests by worker; equal while there were none."""
        count, prior = self._recent.count, self.options.prior_requests
        counts = {worker.name: count(worker.name) + prior for worker in workers}
        total = sum(counts.values())
        if not total:
            return dict.fromkeys(counts, 1 / len(workers))
        return {name: counted / total for name, counted in counts.items()}

    def _home(self, request: RouteRequest, shares: Mapping[str, float]) -> str:
        self._ring.add(shares)
        limit = max(self.options.home_bound / len(shares), min(shares.values()))
        home = self._ring.home(self._sticky_key(request), {name for name, share in shares.items() if share <= limit})
        assert home is not None
        return home

    def _sticky_key(self, request: RouteRequest) -> str:
        if request.session:
            return xxh3_64_hexdigest(f"{request.tenant}\0{request.session}".encode("utf-8", "surrogatepass"))
        opening_blocks = min(self.options.opening_tokens // request.block_size, len(request.blocks))
        if opening_blocks:
            return f"{request.blocks.item(opening_blocks - 1):016x}"
        return prefix_key(request.tokens, self.options.opening_tokens)

    def _suits(self, request: RouteRequest, workers: Sequence[Worker]) -> list[float]:
        match = [1.0] * len(workers)
        if not self.options.hardware and not self.options.learn_hardware:
            return match
        unknown = Hardware()
        stated = [self.options.hardware.get(worker.name, unknown) for worker in workers]
        if self.options.learn_hardware:
            stated = [worker.rates.over(own) for worker, own in zip(workers, stated, strict=True)]
        for name in self._called_for(request):
            figures: list[float | None] = [getattr(hardware, name) for hardware in stated]
            best = max((figure for figure in figures if figure), default=0.0)
            for k, figure in enumerate(figures):
                if figure is not None and best:
                    match[k] = min(match[k], figure / best)
        return match

    def _called_for(self, request: RouteRequest) -> set[str]:
        """The hardware properties that count for this request."""
        options, output = self.options, request.max_output_tokens
        properties = set()
        if request.prompt_tokens >= options.long_prompt_tokens:
            properties |= {"prefill_tokens_per_second", "intra_node_bytes_per_second"}
        if output > options.long_output_tokens:
            properties.add("decode_tokens_per_second")
        elif 0 < output < options.short_output_tokens:
            properties.add("prefill_tokens_per_second")
        return properties


def _reason(depth: int, deepest: int, at_home: bool) -> str:
    if deepest and depth == deepest:
        return "hit_deepest"
    if at_home:
        return "home"
    return "hit_sacrificed" if deepest else "home_passed_over"
