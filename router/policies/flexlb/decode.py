"""FlexLB's decode side: at random, with exponentially more weight the less KV cache a worker has in use.

    used_i = KV in use as the engine last reported it + Σ min(L + min(max output, 1000), capacity_i)    [tokens]
    free_i = capacity_i − reported use − Σ L
    w_i    = exp(−decay_per_token · (used_i − least used))

The sums run over requests reserved: sent to i and not yet in a report of its KV use. The first report after a request's
first token has it; where KV use isn't reported, requests stay reserved to their end, and the use counts as the highest
that another worker reports. A client that states no maximum
of output reserves its prompt only.

1. Full: out with free_i < L, where the capacity is known.
2. HOTSPOT drops load_i > 3 × mean load (load: requests in flight; mean: a whole number, only above 0), IMBALANCE drops
   used_i > 3 × mean used. Means are over all workers, full ones too. None left: the request is refused.
3. Draw by w_i; equal use all round: uniformly.

Default: decay_per_token 0.001, so 2,300 tokens more in use make a worker ten times rarer: close to least used for long
prompts, close to uniform for short ones. Looks at no cached prefix: made for workers that receive a prompt's KV from
a prefill worker, but any fleet can be driven by it.

Source: alibaba/rtp-llm `rtp_llm/flexlb`, CostBasedDecodeStrategy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixwatch.router.policy import (
    Decision,
    Fleet,
    LoadReport,
    Needs,
    NoWorkers,
    Policy,
    RouteRequest,
    Worker,
    known_or_highest,
)

OUTPUT_RESERVED_TOKENS = 1000
OUTLIER_RATIO = 3
FULL = "no decode worker has room in its KV cache for the prompt beside what is reserved"
OUTLIERS = "each decode worker with room for the prompt has over 3 times the mean load or KV in use"


@dataclass(frozen=True, slots=True)
class FlexLbDecodeOptions:
    decay_per_token: float = 0.001


class FlexLbDecode(Policy):
    """Weighted random by KV cache in use; for the decode side of a split fleet."""

    name = "flexlb_decode"
    source = "FlexLB (alibaba/rtp-llm), CostBasedDecodeStrategy"
    needs = Needs(engine_load=True)
    reasons = ("weighted_random", "tie_random", "only_candidate")
    Options = FlexLbDecodeOptions
    options: FlexLbDecodeOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._books: dict[str, _Reservations] = {}

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        books = [self._book(worker.name) for worker in fleet.workers]
        reported = known_or_highest([book.hear(w.report) for book, w in zip(books, fleet.workers, strict=True)])
        found = [_looked_at(*known) for known in zip(fleet.workers, books, reported, strict=True)]
        left = _candidates(found, request.prompt_tokens)
        if not left:
            full = not any(_has_room(each, request.prompt_tokens) for each in found)
            raise NoWorkers(FULL if full else OUTLIERS)
        weights = selection_weights([each.used_tokens for each in left], self.options.decay_per_token)
        chosen = self.rng.choices(left, weights)[0]
        return Decision(chosen.name, _reason(weights), scores={each.name: float(each.used_tokens) for each in found})

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._book(worker).reserve(request)

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        if worker in self._books:
            self._books[worker].started(request, now_seconds)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        if worker in self._books:
            self._books[worker].release(request)

    def on_worker_removed(self, worker: str) -> None:
        self._books.pop(worker, None)

    def _book(self, worker: str) -> _Reservations:
        book = self._books.get(worker)
        if book is None:
            book = self._books[worker] = _Reservations()
        return book


@dataclass(frozen=True, slots=True)
class _WorkerKv:
    """What the choice goes by; `free_tokens` None where the capacity isn't known."""

    name: str
    load: int
    used_tokens: int
    free_tokens: int | None


def _looked_at(worker: Worker, book: _Reservations, reported_tokens: float) -> _WorkerKv:
    reported, free_tokens = int(reported_tokens), None
    if book.capacity_tokens is not None:
        free_tokens = max(0, book.capacity_tokens - reported - book.prompt_tokens)
    return _WorkerKv(worker.name, worker.in_flight, reported + book.expected_tokens, free_tokens)


@dataclass(slots=True)
class _Reservations:
    """One worker's requests that its reported KV use doesn't cover yet."""

    capacity_tokens: int | None = None
    prompt_tokens: int = 0
    expected_tokens: int = 0
    _expected: dict[RouteRequest, int] = field(default_factory=dict)
    _started: dict[RouteRequest, float] = field(default_factory=dict)

    def hear(self, report: LoadReport | None) -> int | None:
        """The tokens that this report says are in use, None where it doesn't; what it covers is no longer reserved."""
        if report is None:
            return None
        self.capacity_tokens = report.kv_capacity_tokens
        if report.kv_usage_ratio is None or report.kv_capacity_tokens is None:
            return None
        while self._started:
            request, started_at = next(iter(self._started.items()))
            if started_at > report.at_seconds:
                break
            self.release(request)
        return round(report.kv_usage_ratio * report.kv_capacity_tokens)

    def reserve(self, request: RouteRequest) -> None:
        self.release(request)
        expected = request.prompt_tokens + min(request.max_output_tokens, OUTPUT_RESERVED_TOKENS)
        if self.capacity_tokens is not None:
            expected = min(expected, self.capacity_tokens)
        self._expected[request] = expected
        self.prompt_tokens += request.prompt_tokens
        self.expected_tokens += expected

    def started(self, request: RouteRequest, now_seconds: float) -> None:
        if request in self._expected:
            self._started[request] = now_seconds

    def release(self, request: RouteRequest) -> None:
        expected = self._expected.pop(request, None)
        self._started.pop(request, None)
        if expected is not None:
            self.prompt_tokens -= request.prompt_tokens
            self.expected_tokens -= expected


def selection_weights(used_tokens: Sequence[int], decay_per_token: float = 0.001) -> list[float]:
    """How often each of these is drawn, relative to the least used (1)."""
    least = min(used_tokens)
    return [math.exp(-decay_per_token * (used - least)) for used in used_tokens]


def _reason(weights: Sequence[float]) -> str:
    if len(weights) == 1:
        return "only_candidate"
    return "tie_random" if min(weights) == max(weights) else "weighted_random"


def _has_room(worker: _WorkerKv, prompt_tokens: int) -> bool:
    return worker.free_tokens is None or worker.free_tokens >= prompt_tokens


def _candidates(workers: Sequence[_WorkerKv], prompt_tokens: int) -> list[_WorkerKv]:
    mean_load = sum(worker.load for worker in workers) // len(workers)
    mean_used = sum(worker.used_tokens for worker in workers) // len(workers)
    return [
        worker
        for worker in workers
        if _has_room(worker, prompt_tokens)
        and (not mean_load or worker.load <= OUTLIER_RATIO * mean_load)
        and (not mean_used or worker.used_tokens <= OUTLIER_RATIO * mean_used)
    ]
