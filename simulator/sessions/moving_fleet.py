"""A changing fleet whose sessions move on purpose (`router.sessions.moving`), soft ones over a link.

Each worker sends over a link of its own, one transfer after another, and its blocks are in the destination's cache when
the transfer has ended. A session's next request that comes sooner waits for it where that takes less time than
computing the prompt. A drained worker stops when its last request and its last transfer have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.kvcache.transfer_link import KvLink, Wire, arrival
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.loadgen.scenario.fleet_section import EventPlan
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.router.policy import Policy, RouteRequest
from prefixwatch.router.sessions.book import SessionKey
from prefixwatch.router.sessions.moving import Move, MovingPolicy, Trigger
from prefixwatch.simulator.fleet_events import ChangingFleet
from prefixwatch.simulator.multi_router import replicas, spread_over
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import SimulatedRouter, ViewKind
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from prefixwatch.simulator.watching import Watch, unwatched


def kv_link(moves: Moves) -> KvLink | None:
    """The link of a scenario; None where blocks are never sent."""
    if not moves.soft:
        return None
    return KvLink(moves.link_gbit_per_second, moves.kv_bytes_per_token, moves.link_latency_seconds, moves.compression)


def simulate_moves(
    requests: Sequence[SimulatedRequest],
    events: EventPlan,
    moves: Moves,
    *,
    policy: str,
    engines: Sequence[EngineConfig],
    seed: int = 0,
    routers: int = 1,
    view: ViewKind = "history",
    concurrency: int | None = None,
    watch: Watch = unwatched,
) -> SimulationResult:
    """As `simulate_events`, and sessions are moved on purpose."""
    policies = partial(replicas, policy, seed, routers)
    via = spread_over(routers, len(requests), "random", seed)
    fleet = MovingFleet(policies, engines, events, moves, view=view)
    return fleet.run(requests, via=via, concurrency=concurrency, watchers=watch(fleet.engines, requests))


@dataclass(frozen=True, slots=True)
class _Coming:
    """A session's blocks on their way."""

    source: str
    worker: str
    ends_s: float
    """When they are there."""
    saves_s: float
    """What computing them would take."""


class MovingFleet(ChangingFleet):
    """`policies` makes those that are wrapped. All routers share the links."""

    def __init__(
        self,
        policies: Callable[[], Sequence[Policy]],
        engines: Sequence[EngineConfig],
        events: EventPlan,
        moves: Moves,
        *,
        view: ViewKind = "history",
    ) -> None:
        def wrapped() -> list[Policy]:
            return [MovingPolicy(policy, overload_seconds=moves.overload_seconds) for policy in policies()]

        self._link = kv_link(moves)
        self._wires: dict[str, Wire] = {}
        self._on_the_way: dict[SessionKey, _Coming] = {}
        super().__init__(wrapped, engines, events, view=view)
        self._take_the_wheel()

    def _take_the_wheel(self) -> None:
        for router in self._routers:
            if isinstance(router.policy, MovingPolicy):
                router.policy.driver = _Driver(self, router)

    def _restart_routers(self, now_s: float) -> None:
        super()._restart_routers(now_s)
        self._take_the_wheel()

    def _drain(self, number: int, now_s: float) -> None:
        name = self._names[number]
        for router in self._routers:
            if isinstance(router.policy, MovingPolicy):
                router.policy.leave(name, Trigger.DRAIN, router.others(name), now_s)
        super()._drain(number, now_s)

    def wire(self, worker: str) -> Wire | None:
        """What blocks leave this worker over; None where nothing can."""
        if self._link is None:
            return None
        return self._wires.setdefault(worker, Wire(self._link.gbit_per_second))

    @property
    def link(self) -> KvLink | None:
        return self._link

    def send(self, router: SimulatedRouter, move: Move) -> None:
        """Begin a soft move."""
        link, wire = self._link, self.wire(move.stay.worker)
        assert link is not None  # else it would have been hard
        assert wire is not None
        ends_s = arrival([wire], link.sent_bytes(move.sent_tokens), move.at, link.latency_seconds, book=True)
        soft, hard = move.choice.soft, move.choice.hard
        assert soft is not None  # both were compared
        assert hard is not None
        saves_s = hard.prefill_seconds - soft.prefill_seconds
        self._on_the_way[move.stay.key] = _Coming(move.stay.worker, move.choice.worker, ends_s, saves_s)
        self._at_time(ends_s, lambda now_s: self._arrived(router, move, wire, now_s))

    def _kill(self, number: int, now_s: float) -> None:
        name = self._names[number]
        self._wires.pop(name, None)
        self._on_the_way = {key: coming for key, coming in self._on_the_way.items() if coming.source != name}
        super()._kill(number, now_s)

    def _arrived(self, router: SimulatedRouter, move: Move, wire: Wire, now_s: float) -> None:
        if self._wires.get(move.stay.worker) is not wire:
            return  # the source was killed meanwhile, and the blocks that it hadn't sent are lost
        coming = self._on_the_way.get(move.stay.key)
        if coming is not None and coming.ends_s <= now_s:
            del self._on_the_way[move.stay.key]
        worker = move.choice.worker
        if worker not in router.present:
            return
        number, request = self._number[worker], move.stay.request
        depth = len(request.blocks) * request.block_size
        blocks = request.blocks[: min(depth, request.prompt_tokens) // request.block_size].tolist()
        stored, evicted = self._models[number].receive_at(blocks, now_s)
        self._reschedule(number, now_s)
        if self._index is not None:
            self._index.remove(worker, evicted)
            self._index.store(worker, stored)
        router.view.routed(request, worker)

    def _send(self, request: SimulatedRequest, record: RequestRecord, now_s: float) -> None:
        coming = self._worth_waiting_for(request, record, now_s)
        if coming is None:
            super()._send(request, record, now_s)
            return
        record.migrate_s = (record.migrate_s or 0.0) + coming.ends_s - now_s
        self._at_time(coming.ends_s, lambda later_s: super(MovingFleet, self)._send(request, record, later_s))

    def _worth_waiting_for(self, request: SimulatedRequest, record: RequestRecord, now_s: float) -> _Coming | None:
        """The session's blocks, where they are on their way to its worker and sooner there than computed."""
        key = SessionKey(request.tenant, request.session)
        coming = self._on_the_way.get(key) if request.session else None
        if coming is None or not 0 < coming.ends_s - now_s <= coming.saves_s:
            return None
        policy = self._routers[self._via[record.index]].policy
        stay = policy.book.get(key) if isinstance(policy, MovingPolicy) else None
        return coming if stay is not None and stay.worker == coming.worker else None


@dataclass(frozen=True, slots=True)
class _Driver:
    """The fleet around one router's policy."""

    fleet: MovingFleet
    router: SimulatedRouter
    sends_ahead: bool = True

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return self.router.view.depths(request)

    def may_take(self, worker: str, request: RouteRequest) -> bool:
        return True

    def link(self, source: str, destination: str) -> KvLink | None:
        return self.fleet.link

    def link_wait_seconds(self, source: str, now: float) -> float:
        wire = self.fleet.wire(source)
        return 0.0 if wire is None else wire.wait_seconds(now)

    def carry(self, move: Move) -> None:
        self.fleet.send(self.router, move)
