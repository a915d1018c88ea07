"""FlexLB: the worker that should have the prompt prefilled first, by a ledger of predicted prefill times.

    S_i = T_prefill(L, H_i) + T_inflight,i + T_batcher,i           [ms, each cut to a whole number; lowest wins]

    H_i           block size × leading blocks held; all of L held: one block less, it is always recomputed
    T_prefill     FormulaPredictor: L − 0.7·H, at 1 ms a computed and 0.3 ms a cached token. Placeholders: at real
                  speeds savings dwarf the queues. With `calibration`, rows of (prompt tokens, cached tokens, measured
                  ms), a CalibratedPredictor fitted to them: the fair comparison
    T_inflight    `router.policies.flexlb.inflight_ledger`, kept for `ledger_cache_ms`
    T_batcher     `router.policies.flexlb.batch_queue`: `fixed_window`, `slo_budget`, or `none`

1. Candidates: workers with fewer than `pending_max` requests without a first token; one that reached it is out until
   it is down to pending_max − int(0.15 · pending_max). None left: least wait (FlexLB refuses the request).
2. `slo_filter`: drops workers with wait + prefill > slo_ms − 100 (wait = T_inflight + T_batcher).
3. HOTSPOT drops pending_i > 3 × mean pending (whole number; only above 0), IMBALANCE drops wait_i > 3 × mean wait.
   All dropped: least wait.
4. Near ties: all with S ≤ S_min + max(int(0.1 · S_min), 20 ms); uniformly random among them (`random_near_ties` off:
   the first minimum).

Defaults: batcher fixed_window, batch_size_max 8, batch_wait_ms 300, slo_ms 500, slo_filter off, pending_max 64,
ledger_cache_ms 2, random_near_ties on, calibration none.

FlexLB's master holds requests until their batch leaves. This router sends at once, so the batch queue is kept as
an account only: it orders the workers as FlexLB would, and no request waits in it. What is in a queue counts
towards no worker's T_inflight, so requests within one window hardly see each other.

Source: alibaba/rtp-llm `rtp_llm/flexlb`, CostBasedPrefillStrategy with `prefillPredictorType = formula`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from prefixwatch.router.policies.flexlb.batch_queue import Batcher, BatchQueue
from prefixwatch.router.policies.flexlb.inflight_ledger import InflightLedger
from prefixwatch.router.policies.flexlb.prefill_predictor import (
    CalibratedPredictor,
    FormulaPredictor,
    Prefill,
    PrefillPredictor,
)
from prefixwatch.router.policy import Decision, Fleet, LoadReport, Needs, Policy, RouteRequest, Worker

OUTLIER_RATIO = 3
HYSTERESIS_RATIO = 0.15
SLO_RESERVE_MS = 100.0
NEAR_TIE_RATIO = 0.1
NEAR_TIE_MS = 20


@dataclass(frozen=True, slots=True)
class FlexLbOptions:
    batcher: Batcher = "fixed_window"
    batch_size_max: int = 8
    batch_wait_ms: float = 300.0
    slo_ms: float = 500.0
    slo_filter: bool = False
    pending_max: int = 64
    ledger_cache_ms: float = 2.0
    random_near_ties: bool = True


@dataclass(frozen=True, slots=True)
class FlexLbFormulaOptions(FlexLbOptions):
    calibration: tuple[tuple[int, int, float], ...] = ()


@dataclass(slots=True)
class _Estimate:
    """What a worker would cost this request."""

    worker: Worker
    pending: int
    wait_ms: int
    prefill_ms: int

    @property
    def score_ms(self) -> int:
        return self.wait_ms + self.prefill_ms


class _Book:
    """One worker's queue, ledger and predictor."""

    def __init__(self, predictor: PrefillPredictor, options: FlexLbOptions) -> None:
        self.predictor = predictor
        self.queue = BatchQueue(options.batcher, options.batch_size_max, options.batch_wait_ms, predictor.predict_ms)
        self.ledger = InflightLedger()
        self.available = True
        self._cache_seconds = options.ledger_cache_ms / 1000.0
        self._cached: tuple[float, float] | None = None

    @property
    def pending(self) -> int:
        return len(self.queue.waiting) + self.ledger.requests

    def advance(self, now: float, report: LoadReport | None) -> None:
        """Send off the batches that are due, then hear what the engine says."""
        for at, members in self.queue.departures(now):
            self.ledger.dispatch(members, self.predictor.predict_ms(list(members.values())), at)
        self.ledger.expire(now)
        if report is not None:
            self.ledger.note_report(report)

    def inflight_ms(self, now: float) -> float:
        if self._cached is None or not 0.0 <= now - self._cached[0] < self._cache_seconds:
            self._cached = now, self.ledger.remaining_ms(now)
        return self._cached[1]

    def first_token(self, request: RouteRequest, now: float) -> None:
        queued = self.queue.take(request)
        if queued is None:
            measured = self.ledger.first_token(request, now)
            if measured is not None:
                self.predictor.learn(measured.batch, measured.milliseconds)
            return
        started_at = self.ledger.start_of(queued.queued_at)  # answered while its batch was still open: one of its own
        self.ledger.last_done_at = now
        self.predictor.learn([queued.prefill], 1000.0 * (now - started_at))


class FlexLbFormula(Policy):
    """Least predicted prefill, in-flight and batching time, at fixed prices a token."""

    name = "flexlb_formula"
    source = "FlexLB (alibaba/rtp-llm), formula predictor"
    needs = Needs(tokens=True, cache_view=True, engine_load=True)
    reasons = ("least_cost", "near_tie", "all_filtered", "all_busy")
    Options: ClassVar[type] = FlexLbFormulaOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._books: dict[str, _Book] = {}
        self._looked: tuple[RouteRequest | None, Mapping[str, int]] = (None, {})
        self._make_predictor()  # a calibration that can't be fitted is refused now

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        self._looked = request, depths
        estimates = {w.name: self._estimate(request, w, depths, fleet.now_seconds) for w in fleet.workers}
        chosen, reason = self._pick(list(estimates.values()))
        return Decision(
            chosen.worker.name,
            reason,
            depths.get(chosen.worker.name, 0),
            {name: float(estimate.score_ms) for name, estimate in estimates.items()},
            predicted_queue_seconds=chosen.wait_ms / 1000.0,
            predicted_prefill_seconds=chosen.prefill_ms / 1000.0,
        )

    def _pick(self, estimates: Sequence[_Estimate]) -> tuple[_Estimate, str]:
        available = [estimate for estimate in estimates if self._books[estimate.worker.name].available]
        if not available:
            return self._least_wait(estimates), "all_busy"
        left = self._filtered(available)
        if not left:
            return self._least_wait(available), "all_filtered"
        lowest = min(estimate.score_ms for estimate in left)
        near = [e for e in left if e.score_ms <= lowest + max(int(NEAR_TIE_RATIO * lowest), NEAR_TIE_MS)]
        if self.options.random_near_ties:
            chosen = self.rng.choice(near)
        else:
            chosen = min(near, key=lambda estimate: estimate.score_ms)
        return chosen, "near_tie" if len(near) > 1 else "least_cost"

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        book = self._book(worker)
        (looked_for, depths), self._looked = self._looked, (None, {})
        prefill = _prefill(request, depths.get(worker, 0) if looked_for is request else 0)
        budget_ms = 0.0
        if self.options.batcher == "slo_budget":
            wait_ms = book.inflight_ms(now_seconds) + book.queue.wait_ms(now_seconds)
            budget_ms = self.options.slo_ms - book.predictor.predict_ms([prefill]) - wait_ms
        book.queue.add(request, prefill, now_seconds, budget_ms)
        book.advance(now_seconds, None)

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        book = self._books.get(worker)
        if book is not None:
            book.advance(now_seconds, None)
            book.first_token(request, now_seconds)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        book = self._books.get(worker)
        if book is not None and book.queue.take(request) is None:
            book.ledger.fail(request)

    def on_worker_removed(self, worker: str) -> None:
        self._books.pop(worker, None)

    def _make_predictor(self, worker: str = "") -> PrefillPredictor:
        """For a worker of this name; without one to see that it can be made."""
        try:
            calibration = self.options.calibration
            return CalibratedPredictor.fit(calibration) if calibration else FormulaPredictor()
        except ValueError as error:
            raise ValueError(f"policy {self.name}: {error}") from error

    def _book(self, worker: str) -> _Book:
        book = self._books.get(worker)
        if book is None:
            book = self._books[worker] = _Book(self._make_predictor(worker), self.options)
        return book

    def _estimate(self, request: RouteRequest, worker: Worker, depths: Mapping[str, int], now: float) -> _Estimate:
        book = self._book(worker.name)
        book.advance(now, worker.report)
        pending, limit = book.pending, self.options.pending_max
        resumes_at = limit if book.available else limit - int(HYSTERESIS_RATIO * limit) + 1
        book.available = pending < resumes_at
        return _Estimate(
            worker,
            pending,
            int(book.inflight_ms(now)) + int(book.queue.wait_ms(now)),
            int(book.predictor.predict_ms([_prefill(request, depths.get(worker.name, 0))])),
        )

    def _filtered(self, estimates: Sequence[_Estimate]) -> list[_Estimate]:
        left = list(estimates)
        if self.options.slo_filter:
            left = [e for e in left if e.score_ms <= self.options.slo_ms - SLO_RESERVE_MS]
        mean_pending = sum(estimate.pending for estimate in estimates) // len(estimates)
        mean_wait_ms = sum(estimate.wait_ms for estimate in estimates) / len(estimates)
        return [
            estimate
            for estimate in left
            if (not mean_pending or estimate.pending <= OUTLIER_RATIO * mean_pending)
            and estimate.wait_ms <= OUTLIER_RATIO * mean_wait_ms
        ]

    def _least_wait(self, estimates: Sequence[_Estimate]) -> _Estimate:
        least = min(estimate.wait_ms for estimate in estimates)
        return self.rng.choice([estimate for estimate in estimates if estimate.wait_ms == least])


def _prefill(request: RouteRequest, depth: int) -> Prefill:
    """The prompt with what of it is cached; a full hit still computes its last block."""
    cached = depth * request.block_size
    if cached >= request.prompt_tokens:
        cached = max(0, request.prompt_tokens - request.block_size)
    return Prefill(request.prompt_tokens, cached)
