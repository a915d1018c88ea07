"""FlexLB's batch queue of one worker: how long a newcomer waits in it, and which requests leave it together.

`fixed_window` wait of a newcomer, with q requests queued before it, B the batch size, τ the window and e the time
since the head was queued (`fixed_window_wait_ms`):

    q = 0            0 if B ≤ 1 else τ
    B ≤ 1            0
    q mod B = B − 1  0: it completes a batch, be it the first or a later one
    q < B            0 if e ≥ τ else τ − e
    otherwise        τ

A batch leaves when it is full or τ after its head came.

`slo_budget` orders requests by the latest time they can be dispatched: arrival + max(0, SLO − predicted prefill − wait
at the worker). A newcomer waits max(0, the head's − now), 0 in an empty queue. A batch leaves when it is full, or
40 ms before the head's time; others join the head, in order, while the batch's predicted time grows by no more than
those 40 ms. Not modelled: the target size from the arrival rate, the emergency budget and Auto-TPM.

Source: alibaba/rtp-llm `rtp_llm/flexlb`, WorkerBatcher.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prefixwatch.router.policies.flexlb.prefill_predictor import Prefill

DEADLINE_GUARD_MS = 40.0

Batcher = Literal["none", "fixed_window", "slo_budget"]


class Queued(NamedTuple):
    """A request in the queue, which is served in order of `leave_by`; times in seconds."""

    leave_by: float
    queued_at: float
    request: Hashable
    prefill: Prefill


class Departure(NamedTuple):
    """A batch that left the queue."""

    at: float
    members: dict[Hashable, Prefill]


@dataclass(slots=True)
class BatchQueue:
    """What a worker's batcher holds; times are seconds of the caller's clock."""

    kind: Batcher
    size_max: int
    window_ms: float
    predict_ms: Callable[[Sequence[Prefill]], float]
    waiting: list[Queued] = field(default_factory=list)

    def wait_ms(self, now: float) -> float:
        """What a request queued now would wait."""
        if self.kind == "none":
            return 0.0
        if self.kind == "slo_budget":
            return max(0.0, 1000.0 * (self.waiting[0].leave_by - now)) if self.waiting else 0.0
        elapsed_ms = 1000.0 * (now - self.waiting[0].queued_at) if self.waiting else 0.0
        return fixed_window_wait_ms(len(self.waiting), elapsed_ms, self.size_max, self.window_ms)

    def add(self, request: Hashable, prefill: Prefill, now: float, budget_ms: float) -> None:
        """Queue a request; `budget_ms` is what is left of its SLO once prefill and the worker's queue are paid."""
        leave_after_ms = max(0.0, budget_ms) if self.kind == "slo_budget" else self.window_ms
        queued = Queued(now + leave_after_ms / 1000.0, now, request, prefill)
        insort(self.waiting, queued, key=lambda queued: queued.leave_by)

    def take(self, request: Hashable) -> Queued | None:
        """Take a request out before its batch leaves; None where it isn't queued."""
        for position, queued in enumerate(self.waiting):
            if queued.request is request:
                return self.waiting.pop(position)
        return None

    def departures(self, now: float) -> list[Departure]:
        """The batches that have left by now, in order."""
        left = []
        while (departure := self._next_departure(now)) is not None:
            left.append(departure)
        return left

    def _next_departure(self, now: float) -> Departure | None:
        if not self.waiting:
            return None
        if self.kind == "none" or len(self.waiting) >= self.size_max:
            size = 1 if self.kind == "none" else self.size_max
            return self._leave(max(queued.queued_at for queued in self.waiting[:size]), size)
        guard = DEADLINE_GUARD_MS / 1000.0 if self.kind == "slo_budget" else 0.0
        due_at = max(self.waiting[0].leave_by - guard, self.waiting[0].queued_at)
        if due_at > now:
            return None
        return self._leave(due_at, self._affordable() if self.kind == "slo_budget" else len(self.waiting))

    def _affordable(self) -> int:
        """How many of the queue, head first, one batch may hold."""
        prefills = [queued.prefill for queued in self.waiting]
        limit_ms = self.predict_ms(prefills[:1]) + DEADLINE_GUARD_MS
        size = 1
        while size < len(prefills) and self.predict_ms(prefills[: size + 1]) <= limit_ms:
            size += 1
        return size

    def _leave(self, at: float, size: int) -> Departure:
        members = {queued.request: queued.prefill for queued in self.waiting[:size]}
        del self.waiting[:size]
        return Departure(at, members)


def fixed_window_wait_ms(queued: int, elapsed_ms: float, size_max: int = 8, window_ms: float = 300.0) -> float:
    """A newcomer's wait behind `queued` requests, the first of which came `elapsed_ms` ago."""
    if size_max <= 1 or (queued and queued % size_max == size_max - 1):
        return 0.0
    if 0 < queued < size_max:
        return max(0.0, window_ms - elapsed_ms)
    return window_ms
