"""Placing a request: policy, ledger, cache view and health brought together, and all told how it went on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from kvcache.prediction import PredictionCause, longest_common_blocks, prediction_cause
from router.cache_view import CacheView
from router.ledger import Ledger, Ticket
from router.policy import Decision, Fleet, NoWorkers, Policy, RouteRequest, Worker


@dataclass(frozen=True, slots=True)
class CacheLosses:
    """Totals of what an engine has said of its cache."""

    cleared: int = 0
    removed_blocks: int = 0


@dataclass(slots=True, eq=False)
class Placement:
    """Where a request was put, why, and what deciding took."""

    request: RouteRequest
    decision: Decision
    predicted_tokens: int | None
    """Prompt tokens expected to be cached there; None when nobody looked."""
    lookup_seconds: float
    choose_seconds: float
    ticket: Ticket
    computing: Sequence[RouteRequest]
    """Requests that were at this worker without a first token when this one was placed."""
    losses: CacheLosses
    """What the worker was known to have lost of its cache until then."""
    losses_at_first_token: CacheLosses | None = None
    held_tokens: int | None = None
    """Reusable prompt tokens at the healthy worker that held most of them; None when nobody looked."""
    held_by: str = ""
    """That worker: the chosen one if it holds as much; empty where nobody held any."""

    @property
    def worker(self) -> str:
        return self.decision.worker

    @property
    def reason(self) -> str:
        return self.decision.reason


class Dispatcher:
    """Chooses among healthy workers and keeps the books. `losses` tells what engines said they dropped, by worker."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        view: CacheView,
        is_up: Callable[[str], bool],
        *,
        clock: Callable[[], float] = perf_counter,
        losses: Callable[[str], CacheLosses] = lambda worker: CacheLosses(),
        report_max_age_seconds: float = math.inf,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self._view = view
        self._is_up = is_up
        self._clock = clock
        self._losses = losses
        self._report_max_age_seconds = report_max_age_seconds
        self._computing: dict[str, dict[RouteRequest, None]] = {}

    def place(self, request: RouteRequest, excluded: frozenset[str] = frozenset()) -> Placement:
        """Choose and count, in one step, so that the next request already sees this one.

        Raises NoWorkers when no healthy worker is left.
        """
        workers = [w for w in self.ledger.workers if w.name not in excluded and self._is_up(w.name)]
        if not workers:
            raise NoWorkers
        if self.policy.needs.engine_load:
            self._drop_stale_reports(workers)
        look = _TimedLookup(self._view, self._clock)
        begun = self._clock()
        decision = self.policy.choose(request, Fleet(workers, look, begun, self._view.source))
        choose_seconds = self._clock() - begun - look.seconds
        if look.depths is None and len(request.blocks):
            look(request)
        depth = None if look.depths is None else look.depths.get(decision.worker, 0)
        predicted = None if depth is None else _reusable_tokens(request, depth)
        now = self._clock()
        ticket = self.ledger.admit(decision.worker, request.prompt_tokens - (predicted or 0), now)
        self.policy.on_admit(request, decision.worker, now)
        self._view.routed(request, decision.worker)
        computing = self._computing.setdefault(decision.worker, {})
        others = tuple(computing)
        computing[request] = None
        placement = Placement(
            request, decision, predicted, look.seconds, choose_seconds, ticket, others, self._losses(decision.worker)
        )
        if look.depths is not None:
            held_by, depth = _deepest(
                look.depths, decision.worker, lambda name: name not in excluded and self._is_up(name)
            )
            placement.held_tokens = _reusable_tokens(request, depth)
            placement.held_by = held_by if placement.held_tokens else ""
        return placement

    def first_token(self, placement: Placement) -> None:
        self._computing.get(placement.worker, {}).pop(placement.request, None)
        placement.losses_at_first_token = self._losses(placement.worker)
        self.ledger.first_token(placement.ticket)
        self.policy.on_first_token(placement.request, placement.worker, self._clock())

    def end(self, placement: Placement) -> None:
        self._computing.get(placement.worker, {}).pop(placement.request, None)
        self.ledger.end(placement.ticket)
        self.policy.on_end(placement.request, placement.worker, self._clock())

    def worker_up(self, name: str) -> None:
        self.ledger.join(name)

    def worker_gone(self, name: str) -> None:
        """Its process is no more, and what it cached with it."""
        self.ledger.leave(name)
        self._view.worker_removed(name)
        self.policy.on_worker_removed(name)
        self._computing.pop(name, None)

    def _drop_stale_reports(self, workers: Iterable[Worker]) -> None:
        """An engine that has stopped reporting has a load that nobody knows, not the one it last told."""
        oldest = self._clock() - self._report_max_age_seconds
        for worker in workers:
            if worker.report is not None and worker.report.at_seconds <= oldest:
                worker.report = None

    def prediction_cause(self, placement: Placement, delivered_tokens: int | None) -> PredictionCause:
        """What became of the prediction, once the engine has said what it reused."""
        request, before = placement.request, placement.losses
        after = placement.losses_at_first_token or before
        return prediction_cause(
            placement.predicted_tokens,
            delivered_tokens,
            block_size=request.block_size,
            computing_tokens=_computing_tokens(placement),
            cleared=after.cleared != before.cleared,
            evicted=after.removed_blocks != before.removed_blocks,
        )


class _TimedLookup:
    """Looks once, and says how long it took."""

    def __init__(self, view: CacheView, clock: Callable[[], float]) -> None:
        self._view = view
        self._clock = clock
        self.depths: Mapping[str, int] | None = None
        self.seconds = 0.0

    def __call__(self, request: RouteRequest) -> Mapping[str, int]:
        if self.depths is None:
            begun = self._clock()
            self.depths = self._view.depths(request)
            self.seconds = self._clock() - begun
        return self.depths


def _deepest(depths: Mapping[str, int], chosen: str, may_take: Callable[[str], bool]) -> tuple[str, int]:
    """The worker that holds most of those that may take the request, and how many blocks; the chosen one if it holds as
    much."""
    own = depths.get(chosen, 0)
    most = max(depths.values(), default=0)
    while most > own:
        for name, held in depths.items():
            if held == most and may_take(name):
                return name, held
        most = max((held for held in depths.values() if held < most), default=0)
    return chosen, own


def _reusable_tokens(request: RouteRequest, depth: int) -> int:
    """Engines compute at least the last prompt token, so a fully cached prompt reuses one block less."""
    return min(depth, max(request.prompt_tokens - 1, 0) // request.block_size) * request.block_size


def _computing_tokens(placement: Placement) -> int:
    """Of the prompt's opening, what others were computing at the worker when the request was placed there."""
    others = (other.blocks for other in placement.computing)
    return longest_common_blocks(placement.request.blocks, others) * placement.request.block_size
