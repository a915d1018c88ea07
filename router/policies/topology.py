"""Topology: a region, then a worker in it, then the GPU beside that worker: three steps, each exchangeable.

    region     any      every region
               cached   the region whose workers hold most of the prompt, of those with at most `overload` times the
                        mean number of requests a worker; where none holds any, the least loaded one
               home     the first region clockwise on a ring, at the session or the prompt's opening, that has at most
                        `overload` times the mean: replicas of the router agree without talking to each other
    worker     another policy, which chooses among that region's workers; its options go in its braces
    gpu_group  chosen       the worker as it was chosen
               least_loaded of the workers in its NVLink or NUMA group that hold as much of the prompt, the one with the
                            fewest requests
               free_memory  of the same, the one that reports the lowest KV usage; unknown usage counts as the highest

The reason names all three: `cached>hit_deepest>moved` is the region that held most, the worker policy's own reason, and
another GPU of the worker's group (`kept`: the same). Workers without a region are in one together; a worker without a
group is in none.

Defaults: region cached, worker score, gpu_group least_loaded, overload 1.5. All ours. Of equal regions
the first by name.

Source: ours; the three anchors are node, GPU in the node, NVLink group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prefixwatch.router import policies
from prefixwatch.router.policies.score import Score
from prefixwatch.router.policies.shared.hash_ring import HashRing
from prefixwatch.router.policy import (
    Decision,
    Fleet,
    Memory,
    Needs,
    Policy,
    RouteRequest,
    Worker,
    known_or_highest,
    kv_usages,
    requests_at,
)

_OPENING_BLOCKS = 16
_REGION_REASONS = ("any", "cached", "least_loaded", "home")
_GROUP_REASONS = ("kept", "moved")


def _reasons(own: Sequence[str]) -> tuple[str, ...]:
    """All reasons, with those of the policy that chooses the worker."""
    return tuple(
        f"{region}>{reason}>{group}" for region in _REGION_REASONS for reason in own for group in _GROUP_REASONS
    )


@dataclass(frozen=True, slots=True)
class TopologyOptions:
    region: Literal["any", "cached", "home"] = "cached"
    worker: str = "score"
    gpu_group: Literal["chosen", "least_loaded", "free_memory"] = "least_loaded"
    overload: float = 1.5


class Topology(Policy):
    """Region, then worker by another policy, then the GPU in the worker's group."""

    name = "topology"
    source = "prefixwatch"
    needs = Needs(tokens=True, cache_view=True, engine_load=True)
    reasons = _reasons(Score.reasons)
    Options = TopologyOptions
    options: TopologyOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._worker = policies.make_policy(self.options.worker, seed=seed)
        if isinstance(self._worker, Topology):
            raise ValueError("policy topology: worker is the policy within a region and can't be topology itself")
        self.needs = replace(self._worker.needs, cache_view=True, engine_load=True)
        self.reasons = _reasons(self._worker.reasons)
        self._ring = HashRing()

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        workers, region_reason = self._in_region(request, fleet.workers, depths)
        decision = self._worker.choose(request, replace(fleet, workers=workers, lookup=lambda _: depths))
        chosen = self._in_group(decision.worker, workers, depths)
        moved = "kept" if chosen == decision.worker else "moved"
        reason = f"{region_reason}>{decision.reason}>{moved}"
        return replace(decision, worker=chosen, reason=reason, hit_blocks=depths.get(chosen, 0))

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._worker.on_admit(request, worker, now_seconds)

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._worker.on_first_token(request, worker, now_seconds)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._worker.on_end(request, worker, now_seconds)

    def on_close(self) -> None:
        self._worker.on_close()

    def memory(self) -> Memory:
        return self._worker.memory()

    def on_worker_removed(self, worker: str) -> None:
        self._worker.on_worker_removed(worker)

    def _in_region(
        self, request: RouteRequest, workers: Sequence[Worker], depths: Mapping[str, int]
    ) -> tuple[Sequence[Worker], str]:
        regions: dict[str, list[Worker]] = {}
        for worker in workers:
            regions.setdefault(worker.place.region, []).append(worker)
        if self.options.region == "any" or len(regions) == 1:
            return workers, "any"
        loads = {name: sum(requests_at(own)) / len(own) for name, own in sorted(regions.items())}
        limit = self.options.overload * (1 + sum(requests_at(workers))) / len(workers)
        bearable = {name for name, load in loads.items() if load <= limit}
        if self.options.region == "home":
            self._ring.add(loads)
            home = self._ring.home(_sticky_key(request), bearable) or min(loads, key=loads.__getitem__)
            return regions[home], "home"
        held = {name: max(depths.get(worker.name, 0) for worker in regions[name]) for name in loads if name in bearable}
        best = max(held, key=held.__getitem__, default="")
        if held.get(best):
            return regions[best], "cached"
        return regions[min(loads, key=loads.__getitem__)], "least_loaded"

    def _in_group(self, chosen: str, workers: Sequence[Worker], depths: Mapping[str, int]) -> str:
        (own,) = (worker for worker in workers if worker.name == chosen)
        group, depth = own.place.group, depths.get(chosen, 0)
        if self.options.gpu_group == "chosen" or group is None:
            return chosen
        mates = [w for w in workers if w.place.group == group and depths.get(w.name, 0) >= depth]
        if self.options.gpu_group == "free_memory":
            burdens: Sequence[float] = known_or_highest(kv_usages(mates))
        else:
            burdens = requests_at(mates)
        least = min(burdens)
        best = [mate.name for mate, burden in zip(mates, burdens, strict=True) if burden == least]
        return chosen if chosen in best else best[0]


def _sticky_key(request: RouteRequest) -> str:
    if request.session or not len(request.blocks):
        return f"{request.tenant}\0{request.session or request.id}"
    return f"{request.blocks.item(min(_OPENING_BLOCKS, len(request.blocks)) - 1):016x}"
