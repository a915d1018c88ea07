"""One router of a simulated fleet: its policy, what it believes is cached where, and its own account of its requests.

Several routers in front of the same engines share nothing but what the engines say: KV events and load reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.router.exchange.explain import scores_json
from prefixwatch.router.placement.cache_view import CacheView, HistoryView, NoView
from prefixwatch.router.placement.ledger import Ledger, Ticket
from prefixwatch.router.policy import (
    NO_TOKENS,
    Fleet,
    LoadReport,
    LowerTiers,
    NoWorkers,
    Place,
    Policy,
    RouteRequest,
    SessionMove,
    Worker,
)
from prefixwatch.simulator.engine_views import EngineView, TruthView
from prefixwatch.simulator.result import explain
from prefixwatch.simulator.snapshot_view import SnapshotView
from prefixwatch.simulator.traffic.trace import SimulatedRequest

ViewKind = str
"""`history`, `events`, `snapshots`, or `snapshots:5`, whose engines are asked every 5 seconds."""
SNAPSHOTS = "snapshots"
LEAST_SNAPSHOT_SECONDS = 0.001
"""More polls than that would take longer than the run."""

LowerTierLookup = Callable[[float, RouteRequest, Mapping[str, int]], Mapping[str, LowerTiers]]
"""At this time: what lower tiers hold behind the blocks that each worker is believed to have."""

_UNLIMITED_BLOCKS = 2**62


@dataclass(slots=True, eq=False)  # not frozen: that takes eight times as long to make
class Placement:
    """A request at its worker, until it leaves; `record` names the worker."""

    router: SimulatedRouter
    ticket: Ticket
    route: RouteRequest
    record: RequestRecord
    computing: Sequence[RouteRequest]
    """This router's requests at the worker without a first token when this one was placed."""
    evicted_blocks: int
    """Evicted there until then."""
    pulls: bool | None = None
    """The policy's decision on pulling KV that the worker lacks."""


class SimulatedRouter:
    """Chooses and books as the live router does; the time is passed in. `evicted_blocks` is an engine's own count."""

    def __init__(
        self,
        policy: Policy,
        view: CacheView,
        workers: Sequence[str],
        block_size: int,
        evicted_blocks: Callable[[str], int] = lambda worker: 0,
        *,
        keeps_scores: bool = True,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        """`workers` are those of the start; `places` says where workers are. With `keeps_scores` each record gets its
        decision's scores."""
        self.policy = policy
        self.view = view
        self._truth = view if isinstance(view, TruthView) else None
        self._block_size = block_size
        self._makes_tokens = (policy.needs.tokens or policy.needs.text) and not policy.needs.blocks_only
        self._evicted_blocks = evicted_blocks
        self._keeps_scores = keeps_scores
        self._computing: dict[str, dict[RouteRequest, None]] = {name: {} for name in workers}
        self._ledger = Ledger(places)
        self._avoided: set[str] = set()
        self.lower_tiers: LowerTierLookup | None = None
        self.pull_seconds: Callable[[int], float] | None = None
        self._workers = tuple(self._ledger.join(name) for name in workers)
        """Those that may be chosen; the same object while they are the same."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that may be chosen now."""
        return self._workers

    @property
    def present(self) -> list[str]:
        """The workers that may be chosen now."""
        return [worker.name for worker in self._workers]

    def join(self, worker: str) -> None:
        """The worker may be chosen from now on, or again."""
        self._ledger.join(worker)
        self._computing.setdefault(worker, {})
        self._avoided.discard(worker)
        self._choose_among()

    def avoid(self, worker: str) -> None:
        """The worker isn't chosen until it joins again; what it holds is remembered."""
        self._avoided.add(worker)
        self._choose_among()

    def _choose_among(self) -> None:
        self._workers = tuple(own for own in self._ledger.workers if own.name not in self._avoided)

    def others(self, worker: str) -> list[Worker]:
        """The workers that may be chosen now, except this one."""
        return [own for own in self._workers if own.name != worker]

    def leave(self, worker: str) -> None:
        """The worker is gone, and its cache with it; requests that it still has end on their own."""
        self._ledger.leave(worker)
        self._choose_among()
        self.view.worker_removed(worker)
        self.policy.on_worker_removed(worker)

    def place(
        self,
        request: SimulatedRequest,
        record: RequestRecord,
        now_s: float,
        step_ends_s: Callable[[], Mapping[str, float]],
    ) -> Placement:
        """Choose a worker and book the request there; `step_ends_s` returns when each engine's step in work ends.

        Raises NoWorkers when there is none to choose from, or the policy turns the request away.
        """
        if not self._workers:
            raise NoWorkers
        policy, size = self.policy, self._block_size
        route = RouteRequest(
            id=request.id,
            prompt_tokens=request.prompt_tokens,
            tokens=request.tokens() if self._makes_tokens else NO_TOKENS,
            blocks=request.blocks,
            block_size=size,
            max_output_tokens=request.output_tokens,
            tenant=request.tenant,
            session=request.session,
            request_class=request.request_class,
        )
        fleet = Fleet(self._workers, self.view.depths, now_s, self.view.source)
        if self.lower_tiers is not None:
            fleet.lower_tiers = partial(self.lower_tiers, now_s)
        fleet.pull_seconds = self.pull_seconds
        if self._truth is not None:
            self._truth.tell(fleet, step_ends_s())
        decision = policy.choose(route, fleet)
        record.worker, record.reason = decision.worker, decision.reason
        if self._keeps_scores:
            record.scores = scores_json(decision)
        record.predicted_queue_s = decision.predicted_queue_seconds
        record.predicted_prefill_s = decision.predicted_prefill_seconds
        if decision.move is not None:
            _note_move(record, decision.move)
        predicted = min(decision.hit_blocks * size, request.prompt_tokens)
        record.predicted_tokens = predicted if policy.needs.cache_view else None
        ticket = self._ledger.admit(decision.worker, request.prompt_tokens - predicted, now_s)
        policy.on_admit(route, decision.worker, now_s)
        self.view.routed(route, decision.worker)
        computing = self._computing[decision.worker]
        others = tuple(computing)
        computing[route] = None
        evicted = self._evicted_blocks(decision.worker)
        return Placement(self, ticket, route, record, others, evicted, decision.pulls)

    def first_token(self, placement: Placement, now_s: float) -> None:
        """The request's first token came back."""
        self._settle(placement)
        self._explain(placement)
        self._ledger.first_token(placement.ticket)
        self.policy.on_first_token(placement.route, placement.record.worker, now_s)

    def end(self, placement: Placement, now_s: float) -> None:
        """The request, which had its first token, is done."""
        self._ledger.end(placement.ticket)
        record = placement.record
        if record.first_token_s is not None and record.prompt_tokens is not None:
            self._ledger.learn(
                placement.ticket,
                uncached_tokens=None if record.migrate_s else record.prompt_tokens - (record.cached_tokens or 0),
                first_token_at=record.first_token_s,
                output_tokens=record.output_tokens,
                ended_at=now_s,
            )
        self.policy.on_end(placement.route, placement.record.worker, now_s)

    def fail(self, placement: Placement, now_s: float) -> None:
        """The engine refused the request: there will be no first token."""
        self._settle(placement)
        self.end(placement, now_s)

    def hear(self, reports: Mapping[str, LoadReport]) -> None:
        """What the engines report of themselves now, by worker."""
        for worker in self._workers:
            worker.report = reports[worker.name]

    def _explain(self, placement: Placement) -> None:
        evicted = self._evicted_blocks(placement.record.worker) != placement.evicted_blocks
        explain(placement.record, placement.route, placement.computing, evicted=evicted)

    def _settle(self, placement: Placement) -> None:
        """The prompt is computed, or never will be there."""
        self._computing[placement.record.worker].pop(placement.route, None)
        if self._truth is not None:
            self._truth.settled(placement.route, placement.record.worker)


def _note_move(record: RequestRecord, move: SessionMove) -> None:
    """Why the session has another worker, and at which prices."""
    record.move, record.move_why, record.move_trigger = move.kind, move.why, move.trigger
    record.move_soft_s, record.move_hard_s = move.soft_seconds, move.hard_seconds
    record.move_transfer_s = move.transfer_seconds


def snapshot_seconds(view: ViewKind) -> float | None:
    """Seconds between two snapshots of an engine; None: as many changes ask for. Raises ValueError."""
    kind, given, text = view.partition(":")
    try:
        seconds = float(text) if given else None
    except ValueError:
        seconds = 0.0
    if kind != SNAPSHOTS or (seconds is not None and not LEAST_SNAPSHOT_SECONDS <= seconds < inf):
        raise ValueError(f"{view}: write snapshots, or snapshots:5 for one every 5 seconds (0.001 at least)")
    return seconds


def make_views(
    policies: Sequence[Policy], engine: EngineConfig, view: ViewKind
) -> tuple[list[CacheView], BlockIndex | SnapshotView | None]:
    """What each router's policy gets to see, and where engine events go if that is what they see.

    Routers that hear the same events without delay hold equal indexes, so they share one; and one who asks for
    snapshots asks for all. A policy that needs events is content with snapshots: it sees what engines say, but late.
    """
    needs = policies[0].needs
    if needs.truth:
        truth = TruthView()
        return [truth for _ in policies], None
    if not needs.cache_view:
        return [NoView() for _ in policies], None
    if view.startswith(SNAPSHOTS):
        snapshots = SnapshotView(snapshot_seconds(view))
        return [snapshots for _ in policies], snapshots
    if view == "events" or needs.events:
        index = BlockIndex()
        return [EngineView(index) for _ in policies], index
    return [HistoryView(engine.capacity_blocks or _UNLIMITED_BLOCKS) for _ in policies], None
