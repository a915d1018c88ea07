"""A fleet in virtual time: the router's policies and the engine model, driven by an event queue instead of a clock.

The same policy objects, ledger and cache view as the live router and the same engine model as the simulated engine,
so that an hour's trace on 64 engines takes 20 s on one core. Nothing here reads a clock; equal inputs and
seeds give equal results. Requests end up in the load generator's own records, for the ordinary grader.

Arrivals:
    `trace`   as recorded (divided by `speed`): requests overlap and queue.
    `serial`  each request is served to its end before the next one starts: an exact study of the caches alone. Output
              tokens take their time but no cache blocks.
    `auto`    serial for one worker, trace for several.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engines.model import (
    BlockEvicted,
    BlocksStored,
    Counters,
    EngineConfig,
    EngineModel,
    RequestError,
    SequenceState,
    SimRequest,
)
from engines.step_time import DEFAULT_PROFILE, profile
from loadgen.records import Outcome, RequestRecord
from router.policies import make_policy
from router.policy import NoWorkers, Policy
from stack.balance import max_over_mean_in_flight
from stack.closed_loop import ClosedLoop
from stack.engine_views import TruthView, load_report
from stack.simulated_router import Placement, SimulatedRouter, ViewKind, make_views
from stack.snapshot_view import SnapshotView
from stack.synthetic import infinite_cache_tokens
from stack.trace import TRACE_BLOCK_TOKENS, SimulatedRequest, read_trace

Arrivals = Literal["auto", "serial", "trace"]

_STEP_END, _REPORT, _ARRIVAL = range(3)  # in this order at equal times


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


class FleetSimulation:
    """One run: create, `run` once. `engine` describes every worker alike; each of `policies` is a router of its own."""

    def __init__(
        self,
        policies: Sequence[Policy],
        engine: EngineConfig,
        workers: int,
        *,
        view: ViewKind = "history",
        report_interval_s: float = 1.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"a fleet needs at least 1 worker, got {workers}")
        if not policies:
            raise ValueError("a fleet needs at least 1 router, got none")
        views, self._index = make_views(policies, engine, view)
        self._engine = engine if self._index is None else replace(engine, report_events=True)
        self._report_interval_s = report_interval_s
        self._names = [f"worker-{k}" for k in range(workers)]
        self._number = {name: k for k, name in enumerate(self._names)}
        self._routers = [
            SimulatedRouter(policy, router_view, self._names, engine.block_size, self._evicted_blocks)
            for policy, router_view in zip(policies, views, strict=True)
        ]
        self._policy = policies[0]
        self._models = [EngineModel(self._engine) for _ in range(workers)]
        self._busy = [False] * workers
        self._step_ends_s = [0.0] * workers
        if isinstance(views[0], TruthView):
            views[0].watch(dict(zip(self._names, self._models, strict=True)))
        self._snapshots = views[0] if isinstance(views[0], SnapshotView) else None
        self._placements: dict[str, Placement] = {}
        self._blocks: dict[str, list[int]] = {}
        self._users: ClosedLoop | None = None
        self._events: list[tuple[float, int, int]] = []

    def run(
        self,
        requests: Sequence[SimulatedRequest],
        *,
        serial: bool = False,
        via: Sequence[int] | None = None,
        concurrency: int | None = None,
    ) -> SimulationResult:
        """Serve these requests, given in order of arrival. A request that no engine can hold has `failed`; one for
        which a policy raises NoWorkers is `refused`, as by the live router.

        `via` has each request's router by number; None: the first router gets them all. `concurrency` makes it a
        closed loop: so many users, each with the next session when its last one is over, whatever the arrival times.
        """
        routers = [self._routers[number] for number in (via if via is not None else [0] * len(requests))]
        shared = infinite_cache_tokens(requests, self._engine.block_size)
        records = [new_record(self._policy.name, k, request, shared[k]) for k, request in enumerate(requests)]
        if serial:
            self._run_serially(requests, records, routers)
        else:
            self._users = None if concurrency is None else ClosedLoop(requests, concurrency)
            self._run_as_recorded(requests, records, routers)
        totals = [
            WorkerTotals(name, sum(served), model.counters, model.pool.evicted_blocks)
            for name, model, *served in zip(self._names, self._models, *(r.served for r in self._routers), strict=True)
        ]
        return SimulationResult(self._policy.name, records, totals)

    def _run_serially(
        self,
        requests: Sequence[SimulatedRequest],
        records: Sequence[RequestRecord],
        routers: Sequence[SimulatedRouter],
    ) -> None:
        now_s = 0.0
        for request, record, router in zip(requests, records, routers, strict=True):
            now_s = record.scheduled_s = record.sent_s = max(now_s, request.arrival_s)
            self._take_snapshots(now_s)
            if self._policy.needs.engine_load:
                self._report(now_s)
            number = self._place(request, record, router, now_s)
            if number is None:
                continue
            engine_request = SimRequest(request.id, request.blocks, request.prompt_tokens, 1, now_s)
            try:
                sequence = self._models[number].run_alone(engine_request)
            except RequestError as error:
                self._fail(request.id, error, now_s)
                continue
            self._note_first_token(sequence)
            self._apply_block_events(number)
            now_s = self._decoded_alone_s(request, sequence)
            self._note_end(request.id, now_s, request.output_tokens)

    def _run_as_recorded(
        self,
        requests: Sequence[SimulatedRequest],
        records: Sequence[RequestRecord],
        routers: Sequence[SimulatedRouter],
    ) -> None:
        events = self._events
        first = range(len(requests)) if self._users is None else self._users.first()
        events.extend((requests[k].arrival_s, _ARRIVAL, k) for k in first)
        if self._policy.needs.engine_load and requests:
            events.append((requests[0].arrival_s, _REPORT, 0))
        heapq.heapify(events)
        last_arrival_s = requests[-1].arrival_s if requests else 0.0
        while events:
            now_s, kind, number = heapq.heappop(events)
            self._take_snapshots(now_s)
            if kind == _STEP_END:
                self._end_step(number, now_s)
            elif kind == _ARRIVAL:
                self._arrive(requests[number], records[number], routers[number], now_s)
            else:
                self._report(now_s)
                if now_s < last_arrival_s:
                    heapq.heappush(events, (now_s + self._report_interval_s, _REPORT, 0))

    def _arrive(self, request: SimulatedRequest, record: RequestRecord, router: SimulatedRouter, now_s: float) -> None:
        if self._users is not None:
            record.scheduled_s = record.sent_s = now_s
        number = self._place(request, record, router, now_s)
        if number is None:
            return
        engine_request = SimRequest(request.id, request.blocks, request.prompt_tokens, request.output_tokens, now_s)
        try:
            self._models[number].submit(engine_request)
        except RequestError as error:
            self._fail(request.id, error, now_s)
            return
        if not self._busy[number]:
            self._begin_step(number, now_s)

    def _begin_step(self, number: int, now_s: float) -> None:
        step = self._models[number].begin_step(now_s)
        self._busy[number] = step is not None
        if step is not None:
            self._step_ends_s[number] = now_s + step.duration_s
            heapq.heappush(self._events, (self._step_ends_s[number], _STEP_END, number))

    def _end_step(self, number: int, now_s: float) -> None:
        tokens = self._models[number].end_step(now_s)
        self._apply_block_events(number)
        for token in tokens:
            if token.sequence.generated_tokens == 1:
                self._note_first_token(token.sequence)
            if token.finish_reason is not None:
                self._note_end(token.request_id, now_s, token.sequence.generated_tokens)
        self._begin_step(number, now_s)

    def _place(
        self, request: SimulatedRequest, record: RequestRecord, router: SimulatedRouter, now_s: float
    ) -> int | None:
        """The number of the worker that this router sends the request to; None where it turns the request away."""
        try:
            self._placements[request.id] = router.place(request, record, now_s, self._step_ends_s)
        except NoWorkers:
            record.end_s, record.outcome, record.status = now_s, Outcome.REFUSED, 503
            self._send_next(record, now_s)
            return None
        if self._index is not None:
            self._blocks[request.id] = request.blocks.tolist()
        return self._number[record.worker]

    def _evicted_blocks(self, name: str) -> int:
        return self._models[self._number[name]].pool.evicted_blocks

    def _note_first_token(self, sequence: SequenceState) -> None:
        placement = self._placements[sequence.id]
        record = placement.record
        assert sequence.first_token_s is not None
        record.first_byte_s = record.first_token_s = sequence.first_token_s
        record.prompt_tokens, record.cached_tokens = sequence.prompt_tokens, sequence.cached_tokens
        placement.router.first_token(placement, sequence.first_token_s)

    def _note_end(self, request_id: str, now_s: float, output_tokens: int) -> None:
        placement = self._placements.pop(request_id)
        self._blocks.pop(request_id, None)
        record = placement.record
        record.end_s, record.output_tokens = now_s, output_tokens
        record.outcome, record.status = Outcome.COMPLETED, 200
        placement.router.end(placement, now_s)
        self._send_next(record, now_s)

    def _fail(self, request_id: str, error: RequestError, now_s: float) -> None:
        placement = self._placements.pop(request_id)
        self._blocks.pop(request_id, None)
        record = placement.record
        record.end_s, record.outcome, record.status, record.error = now_s, Outcome.FAILED, 400, str(error)
        placement.router.fail(placement, now_s)
        self._send_next(record, now_s)

    def _send_next(self, record: RequestRecord, now_s: float) -> None:
        """Closed loop: the user whose request has ended sends the next one."""
        if self._users is not None and (following := self._users.after(record.index)) is not None:
            number, think_seconds = following
            heapq.heappush(self._events, (now_s + think_seconds, _ARRIVAL, number))

    def _report(self, now_s: float) -> None:
        reports = [load_report(model, now_s) for model in self._models]
        for router in self._routers:
            router.hear(reports)

    def _take_snapshots(self, now_s: float) -> None:
        """Before anything happens at `now_s`, so that a snapshot due earlier shows how it was then."""
        if self._snapshots is not None:
            self._snapshots.advance(now_s)

    def _apply_block_events(self, number: int) -> None:
        if self._index is None:
            return
        name = self._names[number]
        for event in self._models[number].drain_events():
            if isinstance(event, BlocksStored):
                blocks = self._blocks[event.request_id]
                self._index.store(name, blocks[event.first : event.first + event.count])
            elif isinstance(event, BlockEvicted):
                self._index.remove(name, [event.block])

    def _decoded_alone_s(self, request: SimulatedRequest, sequence: SequenceState) -> float:
        """When an otherwise idle engine has generated the tokens after the first."""
        assert sequence.first_token_s is not None
        steps = request.output_tokens - 1
        contexts = steps * request.prompt_tokens + steps * (steps + 1) // 2
        time = self._engine.step_time
        return (
            sequence.first_token_s
            + steps * (time.base_s + time.per_decode_sequence_s)
            + contexts * time.per_context_token_s
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
    )


def simulate_requests(
    requests: Sequence[SimulatedRequest],
    *,
    policy: str,
    workers: int,
    engine: EngineConfig,
    seed: int = 0,
    policy_options: Mapping[str, Any] | None = None,
    arrivals: Arrivals = "auto",
    view: ViewKind = "history",
    concurrency: int | None = None,
) -> SimulationResult:
    """Serve these requests by `workers` engines under this policy. Raises ValueError for a wrong policy or option."""
    chosen = make_policy(policy, seed=seed, options=policy_options)
    serial = arrivals == "serial" or (arrivals == "auto" and workers == 1 and concurrency is None)
    return FleetSimulation([chosen], engine, workers, view=view).run(requests, serial=serial, concurrency=concurrency)


def simulate_trace(
    path: Path | str,
    *,
    workers: int = 1,
    capacity_blocks: int | None = None,
    policy: str = "round_robin",
    policy_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    arrivals: Arrivals = "auto",
    speed: float = 1.0,
    limit: int | None = None,
    step_time_profile: str = DEFAULT_PROFILE,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    view: ViewKind = "history",
) -> SimulationResult:
    """Replay the (first `limit`) requests of a trace, `speed` times as fast as recorded.

    `capacity_blocks` is each engine's cache in blocks of 512 tokens; None: nothing is ever evicted. Raises ValueError
    (TraceError for the file) with what is wrong and where.
    """
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    engine = EngineConfig(
        step_time=profile(step_time_profile),
        block_size=TRACE_BLOCK_TOKENS,
        capacity_blocks=capacity_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    requests = [replace(request, arrival_s=request.arrival_s / speed) for request in read_trace(path, limit)]
    return simulate_requests(
        requests,
        policy=policy,
        workers=workers,
        engine=engine,
        seed=seed,
        policy_options=policy_options,
        arrivals=arrivals,
        view=view,
    )
