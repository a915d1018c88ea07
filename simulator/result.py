"""What a simulation returns: a record per request and the totals of each worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixwatch.engines.model.accounts import Counters
from prefixwatch.kvcache.prediction import longest_common_blocks, prediction_cause
from prefixwatch.loadgen.request_log.cache_moves import CacheLog
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.router.policy import RouteRequest
from prefixwatch.simulator.balance import max_over_mean_in_flight
from prefixwatch.simulator.traffic.trace import SimulatedRequest


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """What one simulated engine did in the whole run."""

    name: str
    requests: int
    counters: Counters
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """`records` are in order of arrival, times in virtual seconds."""

    policy: str
    records: list[RequestRecord]
    workers: list[WorkerTotals]
    cache_log: CacheLog | None = field(default=None, kw_only=True)
    """What was moved between caches; None where nothing is."""

    @property
    def block_hit_ratio(self) -> float | None:
        """Leading blocks found, of all blocks asked for (before the rule that a prompt's last token is computed)."""
        asked = sum(worker.counters.query_blocks for worker in self.workers)
        return sum(worker.counters.hit_blocks for worker in self.workers) / asked if asked else None

    @property
    def token_hit_ratio(self) -> float | None:
        """Prompt tokens reused, of all."""
        asked = sum(worker.counters.query_tokens for worker in self.workers)
        return sum(worker.counters.hit_tokens for worker in self.workers) / asked if asked else None

    @property
    def busiest_share(self) -> float:
        """Share of the requests that the most used worker got."""
        return max(worker.requests for worker in self.workers) / max(1, sum(w.requests for w in self.workers))

    @property
    def in_flight_max_over_mean(self) -> float | None:
        """Requests in flight on the busiest worker over the fleet's mean, averaged over the time any was in flight."""
        return max_over_mean_in_flight(self.records, [worker.name for worker in self.workers])


def note_parts(record: RequestRecord, prefill_s: float, migrate_s: float) -> None:
    """The three parts of the time to its first token, which it has had; what the two leave of it is the queue."""
    assert record.ttft_s is not None
    record.prefill_s, record.migrate_s = prefill_s, migrate_s
    record.queue_s = max(0.0, record.ttft_s - prefill_s - migrate_s)  # rounding must not make it negative


def explain(record: RequestRecord, route: RouteRequest, computing: Iterable[RouteRequest], *, evicted: bool) -> None:
    """Note why more or less was reused than expected. `computing`: requests whose prompts weren't computed when this
    one was placed; `evicted`: whether its engine has evicted blocks since."""
    record.prediction_cause = prediction_cause(
        record.predicted_tokens,
        record.cached_tokens,
        block_size=route.block_size,
        computing_tokens=longest_common_blocks(route.blocks, (other.blocks for other in computing)) * route.block_size,
        evicted=evicted,
    )


def new_record(policy: str, index: int, request: SimulatedRequest, shared_tokens: int) -> RequestRecord:
    """The record of a request that arrives as planned, yet to be served; `shared_tokens` if its plan doesn't say."""
    return RequestRecord(
        id=request.id,
        policy=policy,
        repeat=0,
        index=index,
        phase="measured",
        tenant=request.tenant,
        session=request.session,
        turn=request.turn,
        group=request.group,
        request_class=request.request_class,
        scheduled_s=request.arrival_s,
        sent_s=request.arrival_s,
        planned_prompt_tokens=request.prompt_tokens,
        planned_shared_tokens=shared_tokens if request.shared_tokens is None else request.shared_tokens,
        user=request.user,
        planned_part_classes=[part.block_class for part in request.parts],
        planned_part_tokens=[part.tokens for part in request.parts],
    )
