"""Dynamo's KV router: blocks to prefill, less those cached, plus blocks kept busy by decoding; lowest cost wins.

    x_i      = (active_prefill_tokens_i − fleet's least) / block size / request's blocks
    credit_i = overlap_credit / (1 + overlap_decay · x_i)
    cost_i   = prefill_load_scale · max(0, (active_prefill_tokens_i + L) / block size − credit_i · device_i
                   − host_credit · host_ext_i − disk_credit · disk_ext_i − shared_credit · shared_ext_i)
               + decode_blocks_i + active_request_weight · active_requests_i

    device_i         leading blocks held on the GPU; the _ext are what lower tiers and a shared store hold right
                     after them. The cache view of this router covers the GPU, so they are 0 in its decisions
    decode_blocks_i  distinct blocks of the requests active on i, joined with this request's
    active_…         by `router.active_sequences`; with `prefill_tokens_per_second` active prefill decays with time

Temperature 0 takes the lowest cost, exact ties uniformly random. T > 0 draws with weight
exp(−cost_i / ((highest − lowest) · T)); all equal: uniformly.

A request that never ends leaves the books at an age of `expire_after_seconds`, looked for on admission to a worker at
most every 30 s and over all workers every 60 s, so longer generations vanish from the load.

Defaults: overlap_credit 1, overlap_decay 0, prefill_load_scale 1 (its old name is overlap_score_weight),
active_request_weight 0, temperature 0, prefill_tokens_per_second none (no decay), expire_after_seconds 300; host 0.75,
disk 0.25, shared 0. Dynamo reads KV events; by its `use_kv_events=false` any other writer of the view will do. The
queue in front of busy workers and replica sync aren't modelled.

Source: ai-dynamo/dynamo `lib/kv-router` (ai-dynamo-runtime 1.6.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcache.index import BlockIndex
from router.active_sequences import ActiveSequences
from router.policy import Decision, Fleet, Needs, Policy, RouteRequest

HOST_CREDIT, DISK_CREDIT, SHARED_CREDIT = 0.75, 0.25, 0.0
CHECK_ON_ADMIT_SECONDS, SWEEP_SECONDS = 30.0, 60.0


@dataclass(frozen=True, slots=True)
class DynamoKvOptions:
    overlap_credit: float = 1.0
    overlap_decay: float = 0.0
    prefill_load_scale: float = 1.0
    active_request_weight: float = 0.0
    temperature: float = 0.0
    prefill_tokens_per_second: float | None = None
    expire_after_seconds: float = 300.0


class WorkerLoad(NamedTuple):
    """What the cost of a worker is made of, tokens and blocks."""

    active_prefill_tokens: float
    device_blocks: int
    decode_blocks: int
    active_requests: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0


class DynamoKv(Policy):
    """Prefill blocks not cached plus decode blocks in use."""

    name = "dynamo_kv"
    source = "NVIDIA Dynamo KV router (1.6.1)"
    needs = Needs(tokens=True, cache_view=True)
    reasons = ("lowest_cost", "tie_random", "sampled")
    Options = DynamoKvOptions
    options: DynamoKvOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._active_blocks = BlockIndex()
        self._workers: dict[str, ActiveSequences] = {}
        self._checked_at: dict[str, float] = {}
        self._swept_at = 0.0
        self._looked: tuple[RouteRequest | None, Mapping[str, int]] = (None, {})

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        now = fleet.now_seconds
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            for sequences in self._workers.values():
                sequences.expire(self.options.expire_after_seconds, now)
        depths = fleet.hit_blocks(request)
        self._looked = request, depths
        names = [worker.name for worker in fleet.workers]
        costs = self._costs(request, names, depths, now)
        chosen, reason = self._pick(names, costs)
        queue_seconds, prefill_seconds = self._predicted_seconds(request, chosen, depths, now)
        return Decision(
            chosen,
            reason,
            depths.get(chosen, 0),
            dict(zip(names, costs, strict=True)),
            predicted_queue_seconds=queue_seconds,
            predicted_prefill_seconds=prefill_seconds,
        )

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        sequences = self._sequences(worker)
        if now_seconds - self._checked_at.setdefault(worker, now_seconds) >= CHECK_ON_ADMIT_SECONDS:
            self._checked_at[worker] = now_seconds
            sequences.expire(self.options.expire_after_seconds, now_seconds)
        (looked_for, depths), self._looked = self._looked, (None, {})
        cached = depths.get(worker, 0) * request.block_size if looked_for is request else 0
        sequences.admit(request, max(0, request.prompt_tokens - cached), now_seconds)

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        if worker in self._workers:
            self._workers[worker].prefilled(request, now_seconds)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        if worker in self._workers:
            self._workers[worker].free(request, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        self._workers.pop(worker, None)
        self._checked_at.pop(worker, None)
        self._active_blocks.forget(worker)

    def _costs(self, request: RouteRequest, names: Sequence[str], depths: Mapping[str, int], now: float) -> list[float]:
        in_use = self._active_blocks.depths(request.blocks)
        own = len(request.blocks)
        loads = []
        for name in names:
            sequences = self._sequences(name)
            joined = sequences.blocks + own - in_use.get(name, 0)
            loads.append(WorkerLoad(sequences.prefill_tokens(now), depths.get(name, 0), joined, sequences.requests))
        least = min(load.active_prefill_tokens for load in loads)
        return [worker_cost(request.prompt_tokens, request.block_size, load, least, self.options) for load in loads]

    def _pick(self, names: Sequence[str], costs: Sequence[float]) -> tuple[str, str]:
        lowest, temperature = min(costs), self.options.temperature
        if temperature:
            scale = (max(costs) - lowest) * temperature
            weights = [math.exp((lowest - cost) / scale) if scale else 1.0 for cost in costs]
            return self.rng.choices(names, weights)[0], "sampled"
        ties = [name for name, cost in zip(names, costs, strict=True) if cost == lowest]
        return (ties[0], "lowest_cost") if len(ties) == 1 else (self.rng.choice(ties), "tie_random")

    def _predicted_seconds(
        self, request: RouteRequest, worker: str, depths: Mapping[str, int], now: float
    ) -> tuple[float | None, float | None]:
        """Active prefill ahead of the request, and its own; costs are in blocks, so only a given rate tells seconds."""
        rate = self.options.prefill_tokens_per_second
        if rate is None:
            return None, None
        uncached = max(0, request.prompt_tokens - depths.get(worker, 0) * request.block_size)
        return self._sequences(worker).prefill_tokens(now) / rate, uncached / rate

    def _sequences(self, worker: str) -> ActiveSequences:
        sequences = self._workers.get(worker)
        if sequences is None:
            rate = self.options.prefill_tokens_per_second
            sequences = self._workers[worker] = ActiveSequences(worker, self._active_blocks, rate)
        return sequences


def worker_cost(
    prompt_tokens: int,
    block_size: int,
    load: WorkerLoad,
    least_prefill_tokens: float = 0.0,
    options: DynamoKvOptions = DynamoKvOptions(),
) -> float:
    """cost_i in blocks; `least_prefill_tokens` is the fleet's least active prefill."""
    request_blocks = max(1, -(-prompt_tokens // block_size))
    ahead = (load.active_prefill_tokens - least_prefill_tokens) / block_size / request_blocks
    credits = (
        options.overlap_credit / (1.0 + options.overlap_decay * ahead) * load.device_blocks
        + HOST_CREDIT * load.host_blocks
        + DISK_CREDIT * load.disk_blocks
        + SHARED_CREDIT * load.shared_blocks
    )
    prefill_blocks = max(0.0, (load.active_prefill_tokens + prompt_tokens) / block_size - credits)
    return (
        options.prefill_load_scale * prefill_blocks
        + load.decode_blocks
        + options.active_request_weight * load.active_requests
    )
