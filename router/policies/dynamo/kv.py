"""Dynamo's KV router: blocks to prefill, less those cached, plus blocks kept busy by decoding; lowest cost wins.

    x_i      = (active_prefill_tokens_i − fleet's least) / block size / request's blocks
    credit_i = overlap_credit / (1 + overlap_decay · x_i)
    cost_i   = prefill_load_scale · max(0, (active_prefill_tokens_i + L) / block size − credit_i · device_i
                   − host_credit · host_ext_i − disk_credit · disk_ext_i − shared_credit · shared_ext_i)
               + decode_blocks_i + active_request_weight · active_requests_i

    device_i         leading blocks held on the GPU; the _ext are what lower tiers and a shared store hold right
                     after them (`Fleet.lower_tiers`), 0 where nobody says. The live router's view covers the GPU only;
                     `simulate --cache shared|tiers` says
    decode_blocks_i  distinct blocks of the requests active on i, joined with this request's
    active_…         by `dynamo.active_sequences`; with `prefill_tokens_per_second` active prefill decays with time

Temperature 0 takes the lowest cost, exact ties uniformly random. T > 0 draws with weight
exp(−cost_i / ((highest − lowest) · T)); all equal: uniformly.

A request that never ends leaves the books at an age of `expire_after_seconds`, looked for on admission to a worker at
most every 30 s and over all workers every 60 s, so longer generations vanish from the load.

Defaults: overlap_credit 1, overlap_decay 0, prefill_load_scale 1 (its old name is overlap_score_weight),
active_request_weight 0, temperature 0, prefill_tokens_per_second none (no decay), expire_after_seconds 300,
host_credit 0.75, disk_credit 0.25, shared_credit 0 (a block in the shared store then counts as none).
Dynamo reads KV events; by its `use_kv_events=false` any other writer of the view will do. The queue in front of busy
workers and replica sync aren't modelled.

Source: ai-dynamo/dynamo `lib/kv-router` (ai-dynamo-runtime 1.6.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.policies.dynamo.active_sequences import ActiveSequences, FleetRows, LoadTable
from prefixwatch.router.policy import Decision, Fleet, LowerTiers, Needs, Policy, RouteRequest, ScoreArray, TierLookup

CHECK_ON_ADMIT_SECONDS, SWEEP_SECONDS = 30.0, 60.0
Numbers = float | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DynamoKvOptions:
    overlap_credit: float = 1.0
    overlap_decay: float = 0.0
    prefill_load_scale: float = 1.0
    active_request_weight: float = 0.0
    temperature: float = 0.0
    prefill_tokens_per_second: float | None = None
    expire_after_seconds: float = 300.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    shared_credit: float = 0.0


class WorkerLoad(NamedTuple):
    """What the cost of a worker is made of, in tokens and blocks; or of several workers, in arrays."""

    active_prefill_tokens: Numbers
    device_blocks: Numbers
    decode_blocks: Numbers
    active_requests: Numbers = 0
    host_blocks: Numbers = 0
    disk_blocks: Numbers = 0
    shared_blocks: Numbers = 0


class DynamoKv(Policy):
    """Prefill blocks not cached plus decode blocks in use."""

    name = "dynamo_kv"
    source = "NVIDIA Dynamo KV router (1.6.1)"
    needs = Needs(tokens=True, blocks_only=True, cache_view=True)
    reasons = ("lowest_cost", "tie_random", "sampled")
    Options = DynamoKvOptions
    options: DynamoKvOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._active_blocks = BlockIndex()
        self._table = LoadTable(self.options.prefill_tokens_per_second)
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
        depths = fleet.lookup(request)
        self._looked = request, depths
        own = self._table.of(fleet.workers)
        costs = self._costs(request, own, depths, now, fleet.lower_tiers)
        chosen, reason = self._pick(own.names, costs)
        queue_seconds, prefill_seconds = self._predicted_seconds(request, chosen, depths, now)
        return Decision(
            chosen,
            reason,
            depths.get(chosen, 0),
            ScoreArray(own.names, costs, own.position),
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
        self._table.remove(worker)

    def _costs(
        self,
        request: RouteRequest,
        own: FleetRows,
        depths: Mapping[str, int],
        now: float,
        lower_tiers: TierLookup | None,
    ) -> npt.NDArray[np.float64]:
        table, rows, position = self._table, own.rows, own.position.get
        held = np.zeros(len(own.workers))
        for worker, depth in depths.items():
            if (number := position(worker)) is not None:
                held[number] = depth
        joined = table.blocks[rows] + len(request.blocks)
        for worker, depth in self._active_blocks.depths(request.blocks).items():
            if (number := position(worker)) is not None:
                joined[number] -= depth
        prefill = table.active_prefill_tokens(rows, now)
        loads = WorkerLoad(prefill, held, joined, table.requests[rows])
        if lower_tiers is not None:
            loads = _with_lower_tiers(loads, lower_tiers(request, depths), own)
        least = prefill.min() if self.options.overlap_decay else 0.0
        return np.asarray(worker_cost(request.prompt_tokens, request.block_size, loads, least, self.options))

    def _pick(self, names: Sequence[str], costs: npt.NDArray[np.float64]) -> tuple[str, str]:
        lowest, temperature = float(costs[costs.argmin()]), self.options.temperature
        if temperature:
            scale = (float(costs.max()) - lowest) * temperature
            weights = [math.exp((lowest - cost) / scale) if scale else 1.0 for cost in costs.tolist()]
            return self.rng.choices(names, weights)[0], "sampled"
        ties = (costs == lowest).nonzero()[0].tolist()
        return (names[ties[0]], "lowest_cost") if len(ties) == 1 else (names[self.rng.choice(ties)], "tie_random")

    def _predicted_seconds(
        self, request: RouteRequest, worker: str, depths: Mapping[str, int], now: float
    ) -> tuple[float | None, float | None]:
        """Active prefill ahead of the request, and its own; costs are in blocks, so seconds need a given rate."""
        rate = self.options.prefill_tokens_per_second
        if rate is None:
            return None, None
        uncached = max(0, request.prompt_tokens - depths.get(worker, 0) * request.block_size)
        return self._sequences(worker).prefill_tokens(now) / rate, uncached / rate

    def _sequences(self, worker: str) -> ActiveSequences:
        sequences = self._workers.get(worker)
        if sequences is None:
            rate = self.options.prefill_tokens_per_second
            sequences = self._workers[worker] = ActiveSequences(worker, self._active_blocks, rate, self._table)
        return sequences


def _with_lower_tiers(load: WorkerLoad, found: Mapping[str, LowerTiers], own: FleetRows) -> WorkerLoad:
    blocks = np.zeros((3, len(own.workers)))
    for worker, tiers in found.items():
        if (number := own.position.get(worker)) is not None:
            blocks[:, number] = tiers
    host, disk, shared = blocks
    return load._replace(host_blocks=host, disk_blocks=disk, shared_blocks=shared)


def worker_cost(
    prompt_tokens: int,
    block_size: int,
    load: WorkerLoad,
    least_prefill_tokens: float = 0.0,
    options: DynamoKvOptions = DynamoKvOptions(),
) -> Numbers:
    """cost_i in blocks; `least_prefill_tokens` is the fleet's least active prefill."""
    request_blocks = max(1, -(-prompt_tokens // block_size))
    device: Numbers = options.overlap_credit * load.device_blocks
    if options.overlap_decay:
        ahead = (load.active_prefill_tokens - least_prefill_tokens) / block_size / request_blocks
        device = options.overlap_credit / (1.0 + options.overlap_decay * ahead) * load.device_blocks
    lower = (
        options.host_credit * load.host_blocks
        + options.disk_credit * load.disk_blocks
        + options.shared_credit * load.shared_blocks
    )
    credits = device if isinstance(lower, float) and not lower else device + lower
    prefill_blocks = np.maximum(0.0, (load.active_prefill_tokens + prompt_tokens) / block_size - credits)
    cost = options.prefill_load_scale * prefill_blocks + load.decode_blocks
    if options.active_request_weight:
        cost = cost + options.active_request_weight * load.active_requests
    return cost
