"""Placing a request: policy, ledger, cache view and health brought together, and all told how it went on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from router.cache_view import CacheView
from router.ledger import Ledger, Ticket
from router.policy import Fleet, NoWorkers, Policy, RouteRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request was put, why, and what deciding took."""

    request: RouteRequest
    worker: str
    reason: str
    predicted_tokens: int | None
    """Prompt tokens expected to be cached there; None when nobody looked."""
    lookup_seconds: float
    choose_seconds: float
    ticket: Ticket


class Dispatcher:
    """Chooses among healthy workers and keeps the books."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        view: CacheView,
        is_up: Callable[[str], bool],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self._view = view
        self._is_up = is_up
        self._clock = clock

    def place(self, request: RouteRequest, excluded: frozenset[str] = frozenset()) -> Placement:
        """Choose and count, in one step, so that the next request already sees this one.

        Raises NoWorkers when no healthy worker is left.
        """
        workers = [w for w in self.ledger.workers if w.name not in excluded and self._is_up(w.name)]
        if not workers:
            raise NoWorkers
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
        return Placement(
            request, decision.worker, decision.reason, predicted, look.seconds, choose_seconds, ticket
        )  # fmt: skip

    def first_token(self, placement: Placement) -> None:
        self.ledger.first_token(placement.ticket)
        self.policy.on_first_token(placement.request, placement.worker, self._clock())

    def end(self, placement: Placement) -> None:
        self.ledger.end(placement.ticket)
        self.policy.on_end(placement.request, placement.worker, self._clock())

    def worker_up(self, name: str) -> None:
        self.ledger.join(name)

    def worker_gone(self, name: str) -> None:
        """Its process is no more, and what it cached with it."""
        self.ledger.leave(name)
        self._view.worker_removed(name)
        self.policy.on_worker_removed(name)


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


def _reusable_tokens(request: RouteRequest, depth: int) -> int:
    """Engines compute at least the last prompt token, so a fully cached prompt reuses one block less."""
    return min(depth, max(request.prompt_tokens - 1, 0) // request.block_size) * request.block_size
