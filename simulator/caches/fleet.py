"""A fleet whose KV moves: what a request's worker lacks is pulled from where it is, or computed, whichever is sooner.

    choice      as a request comes to its worker: pull the runs of blocks after those in its GPU (up to which one?), or
                compute; the cheaper by the time at which links are free and the engine's prefill of this prompt alone.
                A policy that decides on pulls itself (`Decision.pulls`) is obeyed
    pull        takes its turn on the links; the request then queues at its engine as if it had come at once
    failure     is noticed when the pull should have ended; what is missing is computed. Losing the source is one, too

Runs come side by side. What was in the GPU as a request came may be gone as its turn comes: it is looked for once
more then, and pulled or computed. Equal inputs and seeds give equal results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.sequence import SequenceState, SimRequest
from prefixwatch.loadgen.request_log.break_even import break_even_tokens, cheapest_pull
from prefixwatch.loadgen.request_log.cache_moves import PHYSICAL_TIER, CacheLog, CacheMove
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.loadgen.scenario.fleet_section import EventPlan, event_plan
from prefixwatch.router.policy import LowerTiers, Policy, RouteRequest
from prefixwatch.simulator.caches.outer import OuterCaches, Run
from prefixwatch.simulator.caches.peers import Peers
from prefixwatch.simulator.caches.shared_store import SharedStore
from prefixwatch.simulator.caches.worker_tiers import WorkerTiers
from prefixwatch.simulator.fleet_events import ChangingFleet
from prefixwatch.simulator.multi_router import replicas, spread_over
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import Placement, ViewKind
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from prefixwatch.simulator.watching import Watch, unwatched


def simulate_caches(
    requests: Sequence[SimulatedRequest],
    cache: Cache,
    *,
    policy: str,
    engines: Sequence[EngineConfig],
    events: EventPlan | None = None,
    seed: int = 0,
    routers: int = 1,
    view: ViewKind = "history",
    concurrency: int | None = None,
    watch: Watch = unwatched,
) -> SimulationResult:
    """Serve these requests by engines (one of each in the list) with these caches beyond their GPUs.

    Raises ValueError for a wrong policy or option, or for `sticky`, where nothing moves.
    """
    policies = partial(replicas, policy, seed, routers)
    via = spread_over(routers, len(requests), "random", seed)
    fleet = CachingFleet(policies, engines, events or event_plan([], len(engines)), cache, view=view)
    result = fleet.run(requests, via=via, concurrency=concurrency, watchers=watch(fleet.engines, requests))
    return replace(result, cache_log=fleet.log)


@dataclass(slots=True, eq=False)
class _Pull:
    """The blocks of one request that lie beyond its worker's GPU, and those of them that were asked for."""

    request: SimulatedRequest
    placement: Placement
    move: CacheMove
    held: int
    """Blocks in the GPU as it came."""
    runs: Sequence[Run]
    pulled: int
    """Runs asked for."""
    lives: Sequence[int] = ()
    """Of the workers, as it began."""
    received: int = 0
    """Blocks of the prompt that are there, if those before `held` still are."""


class CachingFleet(ChangingFleet):
    """A fleet with the caches of `cache` beyond its workers' GPUs."""

    _hears_blocks = True

    def __init__(
        self,
        policies: Callable[[], Sequence[Policy]],
        engines: Sequence[EngineConfig],
        events: EventPlan,
        cache: Cache,
        *,
        view: ViewKind = "history",
    ) -> None:
        if cache.gpu_blocks is not None:
            engines = [replace(engine, capacity_blocks=cache.gpu_blocks) for engine in engines]
        super().__init__(policies, engines, events, view=view)
        self._cache = cache
        self._outer = self._outer_caches(cache)
        self._pulls: dict[str, _Pull] = {}
        self.log = CacheLog(
            cache.architecture,
            written_bytes=self._outer.written_bytes,
            break_even_tokens=self._break_even_tokens(),
        )
        self._equip_routers()

    def _outer_caches(self, cache: Cache) -> OuterCaches:
        block_size, workers = self._engine.block_size, len(self._names)
        if cache.architecture == "shared":
            return SharedStore(cache, block_size, workers)
        if cache.architecture == "transfer":
            return Peers(cache, block_size, workers, self._held_blocks)
        if cache.architecture == "tiers":
            return WorkerTiers(cache, block_size, workers)
        raise ValueError("cache.architecture: sticky moves nothing: choose shared, transfer or tiers")

    def _break_even_tokens(self) -> dict[str, int | None]:
        engine = self._engine

        def prefill_s(prompt: int, cached: int) -> float:
            return engine.step_time.prefill_s(prompt, cached, engine.max_num_batched_tokens)

        step = engine.block_size
        return {tier: break_even_tokens(link.seconds, prefill_s, step=step) for tier, link in self._outer.links.items()}

    def _held_blocks(self, blocks: Sequence[int]) -> Mapping[int, int]:
        present = [self._number[name] for name in self._routers[0].present]
        return {number: self._models[number].hit_depth(blocks) for number in present}

    def _equip_routers(self) -> None:
        """Policies see what lies beyond the GPUs, and what a pull from another worker or the store costs."""
        links = self._outer.links
        for router in self._routers:
            if self._cache.architecture == "transfer":
                router.pull_seconds = links["peer"].seconds
            else:
                router.lower_tiers = self._lower_tiers
            if self._cache.architecture == "shared":
                router.pull_seconds = links["store"].seconds

    def _lower_tiers(self, now_s: float, request: RouteRequest, depths: Mapping[str, int]) -> Mapping[str, LowerTiers]:
        blocks = request.blocks.tolist()
        found = {
            name: self._outer.lower_tiers(self._number[name], blocks, depths.get(name, 0), now_s)
            for name in self._routers[0].present
        }
        return {name: tiers for name, tiers in found.items() if any(tiers)}

    def _hand_over(self, request: SimulatedRequest, number: int, now_s: float) -> None:
        placement, blocks = self._placements[request.id], self._blocks[request.id]
        pull = self._looked_for(request, placement, number, blocks, now_s)
        self._pulls[request.id] = pull
        self.log.moves.append(pull.move)
        self._fetch(pull, number, now_s)

    def _fetch(self, pull: _Pull, number: int, now_s: float) -> None:
        blocks = self._blocks[pull.request.id]
        self._outer.used(number, blocks[: pull.runs[-1].end_block if pull.runs else pull.held])
        if not pull.pulled:
            self._give(pull, pull.held, number, now_s)
            return
        asked = pull.runs[: pull.pulled]
        arrives_s = max(run.arrives_s(now_s, book=True) for run in asked)
        begin = pull.held
        for run in asked:
            pull.move.pulled_bytes[run.tier] = pull.move.pulled_bytes.get(run.tier, 0.0) + run.size_bytes
            begin = run.end_block
        pull.move.pulled_tokens += (begin - pull.held) * self._engine.block_size
        pull.move.pull_s = (pull.move.pull_s or 0.0) + arrives_s - now_s
        pull.lives = tuple(self._outer.lives)
        self._at_time(arrives_s, partial(self._pulled, pull, number))

    def _looked_for(
        self, request: SimulatedRequest, placement: Placement, number: int, blocks: Sequence[int], now_s: float
    ) -> _Pull:
        """What lies where, and how much of it to pull."""
        model, size = self._models[number], self._engine.block_size
        usable = blocks[: (request.prompt_tokens - 1) // size]
        held = model.hit_depth(usable)
        runs = self._outer.find(number, usable, held, now_s)
        config = model.config
        if placement.pulls is None:
            pulled = cheapest_pull(
                held * size,
                [(run.end_block * size, run.arrives_s(now_s) - now_s) for run in runs],
                lambda cached: config.step_time.prefill_s(request.prompt_tokens, cached, config.max_num_batched_tokens),
            )
        else:
            pulled = len(runs) if placement.pulls else 0
        return _Pull(request, placement, CacheMove(placement.record.index, now_s), held, runs, pulled)

    def _pulled(self, pull: _Pull, number: int, now_s: float) -> None:
        """The pull has ended, or would have."""
        if self._placements.get(pull.request.id) is not pull.placement:
            return  # its worker was killed meanwhile
        received = pull.held
        for run in pull.runs[: pull.pulled]:
            if self._fails(run, pull):
                pull.move.failed = True
                break
            received = run.end_block
        self._give(pull, received, number, now_s)

    def _give(self, pull: _Pull, received: int, number: int, now_s: float) -> None:
        """To its engine, where blocks up to this one have come."""
        request, pull.received = pull.request, received
        self._submit(
            SimRequest(
                request.id,
                request.blocks,
                request.prompt_tokens,
                request.output_tokens,
                now_s,
                received_from=pull.held,
                may_strand=pull.move.looks == 1,
                received_to=received,
                queued_s=pull.move.at_s,
            ),
            number,
        )

    def _fails(self, run: Run, pull: _Pull) -> bool:
        if run.source is not None and self._outer.lives[run.source] != pull.lives[run.source]:
            return True
        if not self._cache.failure_ratio or not run.over_network:
            return False
        drawn = f"{self._cache.seed}/{pull.request.id}/{pull.placement.record.retries}"
        return random.Random(drawn).random() < self._cache.failure_ratio

    def _begin_jump(self, number: int, now_s: float) -> None:
        super()._begin_jump(number, now_s)
        for sequence in self._models[number].take_stranded():
            before = self._pulls[sequence.id]
            pull = self._looked_for(before.request, before.placement, number, self._blocks[sequence.id], now_s)
            pull.move, pull.move.looks = before.move, 2
            self._pulls[sequence.id] = pull
            self._fetch(pull, number, now_s)

    def _note_first_token(self, sequence: SequenceState) -> None:
        pull = self._pulls.pop(sequence.id)
        pull.placement.record.migrate_s = pull.move.pull_s or 0.0
        super()._note_first_token(sequence)
        self._settle(pull, sequence)

    def _settle(self, pull: _Pull, sequence: SequenceState) -> None:
        """Whence what the request reused came, and why the rest that was within reach was computed."""
        move, size = pull.move, self._engine.block_size
        reused = (sequence.cached_tokens or 0) // size
        in_gpu = min(sequence.hit_blocks or 0, reused)
        move.hit_tokens[PHYSICAL_TIER] = in_gpu * size
        begin = pull.held
        for place, run in enumerate(pull.runs):
            used = max(0, min(run.end_block, reused) - max(begin, in_gpu))
            computed = max(0, run.end_block - max(begin, reused))
            if used:
                move.hit_tokens[run.tier] = move.hit_tokens.get(run.tier, 0) + used * size
            if place >= pull.pulled:
                move.declined_tokens += computed * size
            elif run.end_block > pull.received:
                move.failed_tokens += computed * size
            else:
                move.lost_tokens += computed * size
            begin = run.end_block
        move.lost_tokens += max(0, pull.held - reused) * size
        move.computed_tokens = sequence.prompt_tokens - (sequence.cached_tokens or 0)
        if sequence.first_token_s is not None and sequence.scheduled_s is not None:
            move.prefill_s = sequence.first_token_s - sequence.scheduled_s

    def _note_stored(self, number: int, blocks: Sequence[int]) -> None:
        super()._note_stored(number, blocks)
        self._outer.stored(number, blocks, self._now_s)

    def _note_evicted(self, number: int, block: int) -> None:
        super()._note_evicted(number, block)
        self._outer.evicted(number, [block], self._now_s)

    def _renew(self, number: int) -> None:
        super()._renew(number)
        self._outer.lost(number)

    def _restart_routers(self, now_s: float) -> None:
        super()._restart_routers(now_s)
        self._equip_routers()
