"""A fleet in virtual time: the router's policies and the engine model, driven by an event queue instead of a clock.

The same policy objects, ledger and cache view as the live router, and the same engine model as the simulated engine.
Engines jump from event to event (`simulator.event_engine`), so an hour's trace of 12,000 requests on 64 engines takes
about 2 s of CPU time under round robin. Nothing here reads a clock: equal inputs and seeds give equal results.
Requests end up in the load generator's own records, for the ordinary grader.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from prefixwatch.engines.model.accounts import BlockEvicted, BlocksStored
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.sequence import RequestError, SequenceState, SimRequest
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.router.placement.cache_view import CacheView
from prefixwatch.router.policy import NoWorkers, Place, Policy, Worker
from prefixwatch.simulator.engine_views import TruthView, load_report
from prefixwatch.simulator.event_engine import EventEngine
from prefixwatch.simulator.result import SimulationResult, WorkerTotals, new_record, note_parts
from prefixwatch.simulator.router import Placement, SimulatedRouter, ViewKind, make_views
from prefixwatch.simulator.snapshot_view import SnapshotView
from prefixwatch.simulator.traffic.closed_loop import ClosedLoop
from prefixwatch.simulator.traffic.trace import SimulatedRequest, infinite_cache_tokens
from prefixwatch.simulator.watching import Watcher

_STEP_END, _REPORT, EVENT, _ARRIVAL = range(4)  # in this order at equal times


class FleetSimulation:
    """One run: create, `run` once. Each of `policies` is a router of its own.

    `engine` describes every worker alike, or each one in a list. Behind the `workers` that serve from the start there
    may be `spare` ones, which join later (`simulator.fleet_events`). `keeps_scores`: each record has its decision's
    scores, which takes a tenth of the time of a large fleet. `places` says where the first workers are.
    """

    _hears_blocks = False
    """Whether engines report their blocks even where no policy looks at them."""

    def __init__(
        self,
        policies: Sequence[Policy],
        engine: EngineConfig | Sequence[EngineConfig],
        workers: int,
        *,
        view: ViewKind = "history",
        report_interval_s: float = 1.0,
        jumps: bool = True,
        spare: int = 0,
        keeps_scores: bool = True,
        places: Sequence[Place] = (),
    ) -> None:
        engines = [engine] if isinstance(engine, EngineConfig) else list(engine)
        if workers < 1:
            raise ValueError(f"a fleet needs at least 1 worker, got {workers}")
        if not policies:
            raise ValueError("a fleet needs at least 1 router, got none")
        self._view_kind = view
        views, self._index = make_views(policies, engines[0], view)
        hears = self._hears_blocks or self._index is not None
        self._configs = [replace(own, report_events=hears) for own in engines]
        self._engine = self._configs[0]
        self._report_interval_s = report_interval_s
        count = workers + spare
        self._names = [f"worker-{k}" for k in range(count)]
        self._number = {name: k for k, name in enumerate(self._names)}
        self._jumps = jumps
        self._models = [self._new_engine(k) for k in range(count)]
        self._by_name = dict(zip(self._names, self._models, strict=True))
        self._keeps_scores = keeps_scores
        self._places = dict(zip(self._names, places, strict=False))
        self._routers = [
            self._new_router(policy, router_view, self._names[:workers])
            for policy, router_view in zip(policies, views, strict=True)
        ]
        self._policy = policies[0]
        self._due_s = [math.inf] * count  # when each engine's jump ends, as scheduled
        self._now_s = 0.0
        if isinstance(views[0], TruthView):
            views[0].watch(self._by_name)
        self._snapshots = views[0] if isinstance(views[0], SnapshotView) else None
        self._past_lives: list[tuple[str, EventEngine]] = []
        self._placements: dict[str, Placement] = {}
        self._blocks: dict[str, list[int]] = {}
        self._users: ClosedLoop | None = None
        self._watchers: Sequence[Watcher] = ()
        self._events: list[tuple[float, int, int]] = []

    @property
    def engines(self) -> Mapping[str, EventEngine]:
        """The engines by worker."""
        return self._by_name

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers as the first router knows them."""
        return self._routers[0].workers

    def run(
        self,
        requests: Sequence[SimulatedRequest],
        *,
        serial: bool = False,
        via: Sequence[int] | None = None,
        concurrency: int | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> SimulationResult:
        """Serve these requests, given in order of arrival. A request that no engine can hold has `failed`; one for
        which a policy raises NoWorkers is `refused`, as by the live router.

        `via` has each request's router by number; None: the first router gets them all. `concurrency` makes it a
        closed loop with this many users, each with the next session when its last one ends; arrival times are ignored.
        """
        self._watchers = watchers
        self._via = via if via is not None else [0] * len(requests)
        self._requests = requests
        shared = infinite_cache_tokens(requests, self._engine.block_size)
        records = [new_record(self._policy.label, k, request, shared[k]) for k, request in enumerate(requests)]
        with _collector_at_rest():
            if serial:
                self._run_serially(requests, records)
            else:
                self._users = None if concurrency is None else ClosedLoop(requests, concurrency)
                self._run_as_recorded(requests, records)
        for watcher in watchers:
            watcher.end(self._now_s)
        for router in self._routers:
            router.policy.on_close()
        served = Counter(record.worker for record in records)
        totals = [
            WorkerTotals(name, served[name], model.counters, model.pool.evicted_blocks)
            for name, model in self._by_name.items()
        ]
        totals += [WorkerTotals(name, 0, m.counters, m.pool.evicted_blocks) for name, m in self._past_lives]
        return SimulationResult(self._policy.label, records, totals)

    def _run_serially(
        self,
        requests: Sequence[SimulatedRequest],
        records: Sequence[RequestRecord],
    ) -> None:
        now_s = 0.0
        for request, record, router in zip(requests, records, map(self._routers.__getitem__, self._via), strict=True):
            now_s = record.scheduled_s = record.sent_s = max(now_s, request.arrival_s)
            self._look(now_s)
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
            now_s = self._now_s = self._decoded_alone_s(request, sequence)
            self._note_end(request.id, now_s, request.output_tokens)

    def _run_as_recorded(
        self,
        requests: Sequence[SimulatedRequest],
        records: Sequence[RequestRecord],
    ) -> None:
        events = self._events
        first = range(len(requests)) if self._users is None else self._users.first()
        in_order = sorted(first, key=lambda k: (requests[k].arrival_s, k))
        arrivals = ((requests[k].arrival_s, _ARRIVAL, k) for k in in_order)
        events.extend(islice(arrivals, 1))
        if self._policy.needs.engine_load and requests:
            events.append((requests[0].arrival_s, _REPORT, 0))
        events.extend((at_s, EVENT, k) for k, at_s in enumerate(self._event_times()))
        heapq.heapify(events)
        last_arrival_s = requests[-1].arrival_s if requests else 0.0
        looks = bool(self._watchers) or self._snapshots is not None
        while events:
            now_s, kind, number = heapq.heappop(events)
            self._now_s = now_s
            if looks:
                self._look(now_s)
            if kind == _STEP_END:
                if now_s == self._due_s[number]:  # otherwise an arrival has cut this jump short
                    self._end_jump(number, now_s)
            elif kind == _ARRIVAL:
                for following in islice(arrivals, 1):  # one of them at a time, so that events stay few
                    heapq.heappush(events, following)
                self._arrive(requests[number], records[number], now_s)
            elif kind == EVENT:
                self._happen(number, now_s)
            else:
                self._report(now_s)
                if now_s < last_arrival_s:
                    heapq.heappush(events, (now_s + self._report_interval_s, _REPORT, 0))

    def _event_times(self) -> Iterable[float]:
        """When `_happen` is called, with the position in this list."""
        return ()

    def _happen(self, number: int, now_s: float) -> None:
        """Something happens to the fleet; to a plain one nothing does."""

    def _new_router(self, policy: Policy, view: CacheView, workers: Sequence[str]) -> SimulatedRouter:
        size, scores = self._engine.block_size, self._keeps_scores
        evicted, places = self._evicted_blocks, self._places
        return SimulatedRouter(policy, view, workers, size, evicted, keeps_scores=scores, places=places)

    def _new_engine(self, number: int) -> EventEngine:
        return EventEngine(self._configs[min(number, len(self._configs) - 1)], jumps=self._jumps)

    def _arrive(self, request: SimulatedRequest, record: RequestRecord, now_s: float) -> None:
        if self._users is not None:
            record.scheduled_s = record.sent_s = now_s
        self._send(request, record, now_s)

    def _send(self, request: SimulatedRequest, record: RequestRecord, now_s: float) -> None:
        """Through its router to a worker."""
        number = self._place(request, record, self._routers[self._via[record.index]], now_s)
        if number is not None:
            self._hand_over(request, number, now_s)

    def _hand_over(self, request: SimulatedRequest, number: int, now_s: float) -> None:
        """To its worker."""
        self._submit(
            SimRequest(request.id, request.blocks, request.prompt_tokens, request.output_tokens, now_s), number
        )

    def _submit(self, request: SimRequest, number: int) -> None:
        now_s = request.arrival_s
        try:
            self._models[number].submit(request)
        except RequestError as error:
            self._fail(request.id, error, now_s)
            return
        if self._models[number].busy:
            self._schedule(number, now_s)
        else:
            self._begin_jump(number, now_s)

    def _begin_jump(self, number: int, now_s: float) -> None:
        self._due_s[number] = math.inf
        if self._models[number].begin(now_s):
            self._schedule(number, now_s)

    def _schedule(self, number: int, now_s: float) -> None:
        ends_s = max(now_s, self._models[number].ends_s)
        if ends_s != self._due_s[number]:
            self._due_s[number] = ends_s
            heapq.heappush(self._events, (ends_s, _STEP_END, number))

    def _end_jump(self, number: int, now_s: float) -> None:
        tokens = self._models[number].end(now_s)
        self._apply_block_events(number)
        for token in tokens:
            if token.sequence.generated_tokens == 1:
                self._note_first_token(token.sequence)
            if token.finish_reason is not None:
                self._note_end(token.request_id, now_s, token.sequence.generated_tokens)
        self._begin_jump(number, now_s)

    def _place(
        self, request: SimulatedRequest, record: RequestRecord, router: SimulatedRouter, now_s: float
    ) -> int | None:
        """The number of the worker that this router sends the request to; None where it turns the request away."""
        try:
            self._placements[request.id] = router.place(request, record, now_s, self._step_ends_s)
        except NoWorkers as refusal:
            record.end_s, record.outcome, record.status = now_s, Outcome.REFUSED, 503
            record.error = str(refusal)
            self._send_next(record, now_s)
            return None
        if self._hears_blocks or self._index is not None:
            self._blocks[request.id] = request.blocks.tolist()
        return self._number[record.worker]

    def _step_ends_s(self) -> dict[str, float]:
        """When each engine's step in work ends."""
        for model in self._models:
            model.advance(self._now_s)
        return {name: model.step_ends_s for name, model in self._by_name.items()}

    def _evicted_blocks(self, name: str) -> int:
        model = self._models[self._number[name]]
        model.advance(self._now_s)
        return model.pool.evicted_blocks

    def _note_first_token(self, sequence: SequenceState) -> None:
        placement = self._placements[sequence.id]
        record = placement.record
        assert sequence.first_token_s is not None
        record.first_byte_s = record.first_token_s = sequence.first_token_s
        record.prompt_tokens, record.cached_tokens = sequence.prompt_tokens, sequence.cached_tokens
        if sequence.scheduled_s is not None:
            note_parts(record, sequence.first_token_s - sequence.scheduled_s, record.migrate_s or 0.0)
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
        for model in self._models:
            model.advance(now_s)
        reports = {name: load_report(model, now_s) for name, model in self._by_name.items()}
        for router in self._routers:
            router.hear(reports)

    def _look(self, now_s: float) -> None:
        """Before anything happens at `now_s`, so that a snapshot due earlier shows how it was then."""
        if self._snapshots is not None:
            self._snapshots.advance(now_s)
        for watcher in self._watchers:
            watcher.advance(now_s)

    def _apply_block_events(self, number: int) -> None:
        if not self._hears_blocks and self._index is None:
            return
        for event in self._models[number].drain_events():
            if isinstance(event, BlocksStored):
                blocks = self._blocks[event.request_id]
                self._note_stored(number, blocks[event.first : event.first + event.count])
            elif isinstance(event, BlockEvicted):
                self._note_evicted(number, event.block)

    def _note_stored(self, number: int, blocks: Sequence[int]) -> None:
        """These are in the worker's cache now."""
        if self._index is not None:
            self._index.store(self._names[number], blocks)

    def _note_evicted(self, number: int, block: int) -> None:
        if self._index is not None:
            self._index.remove(self._names[number], [block])

    def _decoded_alone_s(self, request: SimulatedRequest, sequence: SequenceState) -> float:
        """When an otherwise idle engine has generated the tokens after the first."""
        assert sequence.first_token_s is not None
        now_s, length, left = sequence.first_token_s, request.prompt_tokens + 1, request.output_tokens - 1
        while left:
            first_s = self._engine.step_time.duration_s(decode_sequences=1, context_tokens=length)
            growth_s, alike = self._engine.step_time.decode_growth_s(1, length)
            steps = min(left, 1 + int(min(alike, left)))
            now_s += steps * first_s + growth_s * (steps * (steps - 1) // 2)
            length, left = length + steps, left - steps
        return now_s


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A simulation makes millions of objects and no cycles: looking for cycles would take a tenth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
