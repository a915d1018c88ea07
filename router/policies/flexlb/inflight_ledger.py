"""FlexLB's account of the prefill batches a worker has and when it should be through with them.

    remaining = max(0, Σ predicted_b − max(0, now − min progress_base_b))      [ms], over batches sent and not done

A batch's progress base starts at its dispatch, moves on to the time of each status in which the engine still has
it queued, and stays once it is seen running. The sum takes batches as served one after another: two batches of
5 s side by side, 1 s in, make 9 s where 8 s are left. Kept as its authors wrote it.

The engine's load report doesn't name requests, so of a worker's requests the youngest `waiting` are taken to be the
queued ones. A batch is dropped 300 s after its dispatch.

Source: alibaba/rtp-llm `rtp_llm/flexlb`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from prefixwatch.router.policies.flexlb.prefill_predictor import Prefill
from prefixwatch.router.policy import LoadReport

ENTRY_TTL_SECONDS = 300.0


@dataclass(slots=True, eq=False)
class Batch:
    """Prompts sent together."""

    members: Mapping[Hashable, Prefill]
    predicted_ms: float
    dispatched_at: float
    progress_base: float
    outstanding: set[Hashable]
    """Members without a first token."""
    seen_running: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """A whole batch is prefilled."""

    batch: list[Prefill]
    milliseconds: float


@dataclass(slots=True)
class InflightLedger:
    """One worker's batches, in order of dispatch. Times are seconds of the caller's clock."""

    batches: list[Batch] = field(default_factory=list)
    last_done_at: float | None = None
    """When a batch was last through."""
    _reported_at: float | None = None

    @property
    def requests(self) -> int:
        """Requests without a first token."""
        return sum(len(batch.outstanding) for batch in self.batches)

    def dispatch(self, members: Mapping[Hashable, Prefill], predicted_ms: float, now: float) -> None:
        """These prompts are sent as one batch."""
        self.batches.append(Batch(members, predicted_ms, now, now, set(members)))

    def remaining_ms(self, now: float) -> float:
        """Predicted time until the worker is through with all of them."""
        if not self.batches:
            return 0.0
        elapsed_ms = 1000.0 * max(0.0, now - min(batch.progress_base for batch in self.batches))
        return max(0.0, sum(batch.predicted_ms for batch in self.batches) - elapsed_ms)

    def note_report(self, report: LoadReport) -> None:
        """Move the progress bases by what the engine says; a report seen before changes nothing."""
        if report.waiting is None or report.at_seconds == self._reported_at:
            return
        self._reported_at = report.at_seconds
        queued = report.waiting
        for batch in reversed(self.batches):
            if batch.seen_running or batch.dispatched_at > report.at_seconds:
                continue
            if queued >= len(batch.outstanding):
                queued -= len(batch.outstanding)
                batch.progress_base = report.at_seconds
            else:
                queued = 0
                batch.seen_running = True

    def first_token(self, request: Hashable, now: float) -> Measured | None:
        """The prompt is prefilled; returns the batch's time when it was its last and none of its members failed.

        The time counts from the dispatch, or from when the batch before was through if that was later.
        """
        batch = self._settle(request)
        if batch is None or batch.outstanding:
            return None
        started_at = self.start_of(batch.dispatched_at)
        self.last_done_at = now
        return None if batch.failed else Measured(list(batch.members.values()), 1000.0 * (now - started_at))

    def fail(self, request: Hashable) -> None:
        """The request is gone without a first token; no effect when it had one."""
        batch = self._settle(request)
        if batch is not None:
            batch.failed = True

    def start_of(self, dispatched_at: float) -> float:
        """When work on something dispatched then can have begun."""
        return dispatched_at if self.last_done_at is None else max(dispatched_at, self.last_done_at)

    def expire(self, now: float) -> None:
        """Drop what no one will report any more."""
        while self.batches and now - self.batches[0].dispatched_at > ENTRY_TTL_SECONDS:
            self.batches.pop(0)

    def _settle(self, request: Hashable) -> Batch | None:
        for position, batch in enumerate(self.batches):
            if request in batch.outstanding:
                batch.outstanding.discard(request)
                if not batch.outstanding:
                    del self.batches[position]
                return batch
        return None
