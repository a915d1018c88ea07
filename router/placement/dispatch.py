"""Placing a request: policy, ledger, cache view and health together, each informed of the request's progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from time import perf_counter

from prefixwatch.kvcache.cache_class import reusable_part
from prefixwatch.kvcache.prediction import PredictionCause, longest_common_blocks, prediction_cause
from prefixwatch.kvcache.prompts.media import readable_tokens
from prefixwatch.router.placement.cache_view import CacheView
from prefixwatch.router.placement.ledger import Ledger, Ticket
from prefixwatch.router.policy import Decision, Fleet, NoWorkers, Policy, RouteRequest, Worker


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
    backlog_tokens: int = 0
    """Uncached prompt tokens that were at the worker without a first token when this request was placed."""
    held_by: str = ""
    """That worker: the chosen one if it holds as much; empty where nobody held any."""

    @property
    def worker(self) -> str:
        return self.decision.worker

    @property
    def reason(self) -> str:
        return self.decision.reason


class Dispatcher:
    """Chooses among healthy workers that serve the model, and keeps the books.

    `losses` returns what an engine reported as dropped from its cache, `serving` the workers of a model (None: all).
    Workers `on_trial` get one request at a time, as long as others may take the rest. With `key_view` the policy sees
    each request's key alone, and where requests with the same went; what is predicted still comes from `view`.
    """

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
        serving: Callable[[str], Container[str] | None] = lambda model: None,
        key_view: CacheView | None = None,
        on_trial: Set[str] = frozenset(),
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self._view = view
        self._key_view = key_view
        self._on_trial = on_trial
        self._is_up = is_up
        self._clock = clock
        self._losses = losses
        self._serving = serving
        self._report_max_age_seconds = report_max_age_seconds
        self._computing: dict[str, dict[RouteRequest, None]] = {}

    def place(self, request: RouteRequest, excluded: frozenset[str] = frozenset()) -> Placement:
        """Choose and count, in one step, so that the next request already sees this one.

        Raises NoWorkers when no healthy worker is left that serves the model.
        """
        serving, is_up = self._serving(request.model), self._is_up

        def may_take(name: str) -> bool:
            return is_up(name) and name not in excluded and (serving is None or name in serving)

        workers = [worker for worker in self.ledger.workers if may_take(worker.name)]
        if not workers:
            raise NoWorkers
        if self._on_trial:
            workers = [one for one in workers if not (one.in_flight and one.name in self._on_trial)] or workers
        if self.policy.needs.engine_load:
            self._drop_stale_reports(workers)
        look = _TimedLookup(self._view, self._clock)
        seen = look if self._key_view is None else _TimedLookup(self._key_view, self._clock)
        source = self._view.source if self._key_view is None else self._key_view.source
        key = request.key or request
        begun = self._clock()
        decision = self.policy.choose(key, Fleet(workers, seen, begun, source))
        choose_seconds = self._clock() - begun - seen.seconds
        if look.depths is None and len(request.blocks):
            look(request)
        depths = look.depths if request.prompt_tokens else None  # nothing is known of a prompt that wasn't read
        predicted = None if depths is None else _reusable_tokens(request, depths.get(decision.worker, 0))
        now = self._clock()
        worker = decision.worker
        chosen = self.ledger.worker(worker)
        backlog = 0 if chosen is None else chosen.prefill_tokens
        ticket = self.ledger.admit(worker, request.prompt_tokens - (predicted or 0), now)
        try:
            self.policy.on_admit(key, worker, now)
            self._view.routed(request, worker)
            if self._key_view is not None:
                self._key_view.routed(key, worker)
            losses = self._losses(worker)
        except BaseException:  # nobody else knows of the ticket
            self._forget(request, worker, ticket)
            raise
        computing = self._computing.setdefault(worker, {})
        others = tuple(computing)
        computing[request] = None
        placement = Placement(request, decision, predicted, seen.seconds, choose_seconds, ticket, others, losses)
        placement.backlog_tokens = backlog
        if depths is not None:
            held_by, depth = _deepest(depths, worker, may_take)
            placement.held_tokens = _reusable_tokens(request, depth)
            placement.held_by = held_by if placement.held_tokens else ""
        return placement

    def now(self) -> float:
        """The clock that policies are given."""
        return self._clock()

    def healthy(self) -> list[Worker]:
        """The workers that may take requests."""
        return [worker for worker in self.ledger.workers if self._is_up(worker.name)]

    def may_take(self, worker: str, request: RouteRequest) -> bool:
        """Whether this worker is healthy and serves the request's model."""
        serving = self._serving(request.model)
        return self._is_up(worker) and (serving is None or worker in serving)

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        """Leading blocks of the request, as policies see it, that each worker is believed to hold."""
        return (self._view if self._key_view is None else self._key_view).depths(request)

    def first_token(self, placement: Placement) -> None:
        self._computing.get(placement.worker, {}).pop(placement.request, None)
        placement.losses_at_first_token = self._losses(placement.worker)
        self.ledger.first_token(placement.ticket)
        request = placement.request
        self.policy.on_first_token(request.key or request, placement.worker, self._clock())

    def end(self, placement: Placement) -> None:
        self._forget(placement.request, placement.worker, placement.ticket)

    def _forget(self, request: RouteRequest, worker: str, ticket: Ticket) -> None:
        self._computing.get(worker, {}).pop(request, None)
        self.ledger.end(ticket)
        self.policy.on_end(request.key or request, worker, self._clock())

    def worker_up(self, name: str) -> None:
        self.ledger.join(name)

    def worker_gone(self, name: str) -> None:
        """Its process is no more, and what it cached with it."""
        self.ledger.leave(name)
        self._view.worker_removed(name)
        if self._key_view is not None:
            self._key_view.worker_removed(name)
        self.policy.on_worker_removed(name)
        self._computing.pop(name, None)

    def _drop_stale_reports(self, workers: Iterable[Worker]) -> None:
        """The load of an engine that has stopped reporting is unknown, not the last one that it reported."""
        oldest = self._clock() - self._report_max_age_seconds
        for worker in workers:
            if worker.report is not None and worker.report.at_seconds <= oldest:
                worker.report = None

    def prediction_cause(self, placement: Placement, delivered_tokens: int | None) -> PredictionCause:
        """Why the prediction was right or wrong, once the engine has reported what it reused."""
        request, before = placement.request, placement.losses
        after = placement.losses_at_first_token or before
        return prediction_cause(
            placement.predicted_tokens,
            delivered_tokens,
            block_size=request.block_size,
            computing_tokens=_computing_tokens(placement),
            cleared=after.cleared != before.cleared,
            evicted=after.removed_blocks != before.removed_blocks,
            readable_tokens=_readable_tokens(request),
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
    return reusable_part(depth * request.block_size, request.prompt_tokens, request.block_size)


def _readable_tokens(request: RouteRequest) -> int | None:
    """Tokens before the first image or the like; None for a prompt without."""
    tokens = readable_tokens(request.tokens)
    return tokens if tokens < len(request.tokens) else None


def _computing_tokens(placement: Placement) -> int:
    """Of the prompt's opening, what others were computing at the worker when the request was placed there."""
    others = (other.blocks for other in placement.computing)
    return longest_common_blocks(placement.request.blocks, others) * placement.request.block_size
