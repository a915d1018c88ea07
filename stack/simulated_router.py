"""One router of a simulated fleet: its policy, what it believes is cached where, and its own account of its requests.

Several routers in front of the same engines share nothing but what the engines say: KV events and load reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engines.model import EngineConfig
from kvcache.index import BlockIndex
from kvcache.prediction import longest_common_blocks, prediction_cause
from loadgen.records import RequestRecord
from router.cache_view import CacheView, HistoryView, NoView
from router.explain import scores_json
from router.ledger import Ledger, Ticket
from router.policy import NO_TOKENS, Fleet, LoadReport, Policy, RouteRequest
from stack.engine_views import EngineView, TruthView
from stack.snapshot_view import SnapshotView
from stack.trace import SimulatedRequest

ViewKind = Literal["history", "events", "snapshots"]

_UNLIMITED_BLOCKS = 2**62


@dataclass(frozen=True, slots=True, eq=False)
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


class SimulatedRouter:
    """Chooses and books as the live router does, told the time. `evicted_blocks` is an engine's own count."""

    def __init__(
        self,
        policy: Policy,
        view: CacheView,
        workers: Sequence[str],
        block_size: int,
        evicted_blocks: Callable[[str], int] = lambda worker: 0,
    ) -> None:
        self.policy = policy
        self._view = view
        self._truth = view if isinstance(view, TruthView) else None
        self._block_size = block_size
        self._evicted_blocks = evicted_blocks
        self._computing: dict[str, dict[RouteRequest, None]] = {name: {} for name in workers}
        self._ledger = Ledger()
        self._workers = [self._ledger.join(name) for name in workers]

    @property
    def served(self) -> list[int]:
        """Requests that this router ever placed at each worker."""
        return [worker.served for worker in self._workers]

    def place(
        self, request: SimulatedRequest, record: RequestRecord, now_s: float, step_ends_s: Sequence[float]
    ) -> Placement:
        """Choose a worker and book the request there; `step_ends_s` is when each engine's step in work ends."""
        policy, size = self.policy, self._block_size
        route = RouteRequest(
            id=request.id,
            prompt_tokens=request.prompt_tokens,
            tokens=request.tokens() if policy.needs.tokens or policy.needs.text else NO_TOKENS,
            blocks=request.blocks,
            block_size=size,
            max_output_tokens=request.output_tokens,
            tenant=request.tenant,
            session=request.session,
        )
        fleet = Fleet(self._workers, self._view.depths, now_s, self._view.source)
        if self._truth is not None:
            self._truth.tell(fleet, step_ends_s)
        decision = policy.choose(route, fleet)
        record.worker, record.reason = decision.worker, decision.reason
        record.scores = scores_json(decision)
        record.predicted_queue_s = decision.predicted_queue_seconds
        record.predicted_prefill_s = decision.predicted_prefill_seconds
        predicted = min(decision.hit_blocks * size, request.prompt_tokens)
        record.predicted_tokens = predicted if policy.needs.cache_view else None
        ticket = self._ledger.admit(decision.worker, request.prompt_tokens - predicted, now_s)
        policy.on_admit(route, decision.worker, now_s)
        self._view.routed(route, decision.worker)
        computing = self._computing[decision.worker]
        others = tuple(computing)
        computing[route] = None
        return Placement(self, ticket, route, record, others, self._evicted_blocks(decision.worker))

    def first_token(self, placement: Placement, now_s: float) -> None:
        """The request's first token came back."""
        self._settle(placement)
        self._explain(placement)
        self._ledger.first_token(placement.ticket)
        self.policy.on_first_token(placement.route, placement.record.worker, now_s)

    def end(self, placement: Placement, now_s: float) -> None:
        """The request, which had its first token, is done."""
        self._ledger.end(placement.ticket)
        self.policy.on_end(placement.route, placement.record.worker, now_s)

    def fail(self, placement: Placement, now_s: float) -> None:
        """The engine refused the request: there will be no first token."""
        self._settle(placement)
        self.end(placement, now_s)

    def hear(self, reports: Sequence[LoadReport]) -> None:
        """What the engines say of themselves now, in the workers' order."""
        for worker, report in zip(self._workers, reports, strict=True):
            worker.report = report

    def _explain(self, placement: Placement) -> None:
        record, route, size = placement.record, placement.route, self._block_size
        others = (other.blocks for other in placement.computing)
        record.prediction_cause = prediction_cause(
            record.predicted_tokens,
            record.cached_tokens,
            block_size=size,
            computing_tokens=longest_common_blocks(route.blocks, others) * size,
            evicted=self._evicted_blocks(record.worker) != placement.evicted_blocks,
        )

    def _settle(self, placement: Placement) -> None:
        self._computing[placement.record.worker].pop(placement.route, None)
        if self._truth is not None:
            self._truth.settled(placement.route, placement.record.worker)


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
    if view == "snapshots":
        snapshots = SnapshotView()
        return [snapshots for _ in policies], snapshots
    if view == "events" or needs.events:
        index = BlockIndex()
        return [EngineView(index) for _ in policies], index
    return [HistoryView(engine.capacity_blocks or _UNLIMITED_BLOCKS) for _ in policies], None
