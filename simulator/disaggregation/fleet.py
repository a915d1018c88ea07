"""A split fleet in virtual time: engines that compute prompts, engines that generate, and KV that moves between them.

A request is prefilled on an engine of the one side (which generates one token, as real ones must), its KV moves to its
engine of the other, and that engine generates the whole answer. It computes the prompt's last token again, as vLLM's
does, so the first token that a client sees comes from there:

    TTFT = prefill queue + prefill + transfer + decode queue + one step

Only the blocks that the decode worker lacks at that moment are moved. Transfers share a link only where its rate is
given, and a prefill worker keeps no block back for one that is under way. The prefill engines may be others than the
decode engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.engines.model.accounts import BlockEvicted, BlocksStored
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.sequence import RequestError, SequenceState, SimRequest
from prefixwatch.kvcache.transfer_link import arrival
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.router.exchange.explain import scores_json
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import NO_TOKENS, NoWorkers, RouteRequest
from prefixwatch.simulator.disaggregation.policies import Disaggregated, DisaggregationOptions, Split
from prefixwatch.simulator.disaggregation.side import Side, SideView, Stay
from prefixwatch.simulator.result import SimulationResult, WorkerTotals, explain, new_record, note_parts
from prefixwatch.simulator.traffic.trace import SimulatedRequest, infinite_cache_tokens

LOCAL, REMOTE = "local", "remote"

_STEP_END, _TRANSFERRED, _REPORT, _ARRIVAL = range(4)  # in this order at equal times


@dataclass(frozen=True, slots=True)
class DisaggregatedResult(SimulationResult):
    """`workers` are the decode workers, who are also the ones that records name; hits count on both sides.

    A record's `reason` is `local`, or `remote:` and the prefill worker; its predictions are those for the prompt.
    """

    prefill_workers: list[WorkerTotals]

    @property
    def block_hit_ratio(self) -> float | None:
        return self._both_sides().block_hit_ratio

    @property
    def token_hit_ratio(self) -> float | None:
        return self._both_sides().token_hit_ratio

    def _both_sides(self) -> SimulationResult:
        return SimulationResult(self.policy, self.records, [*self.prefill_workers, *self.workers])


def simulate_disaggregated(
    requests: Sequence[SimulatedRequest],
    *,
    prefill_workers: int,
    decode_workers: int,
    prefill_policy: str,
    decode_policy: str,
    engine: EngineConfig,
    seed: int = 0,
    prefill_options: Mapping[str, Any] | None = None,
    decode_options: Mapping[str, Any] | None = None,
    options: DisaggregationOptions | None = None,
    view: SideView = "history",
    report_interval_s: float = 1.0,
    prefill_engine: EngineConfig | None = None,
) -> DisaggregatedResult:
    """Serve these requests, given in order of arrival, as they arrive; `engine` describes the engines of both sides,
    unless `prefill_engine` describes the prefill side's.

    The result's policy is named `prefill>decode`. Raises ValueError for a wrong policy, option or number.
    """
    policies = Disaggregated(
        make_policy(prefill_policy, seed=seed, options=prefill_options),
        make_policy(decode_policy, seed=seed + 1, options=decode_options),
        options or DisaggregationOptions(),
    )
    simulation = DisaggregatedSimulation(
        policies,
        engine,
        prefill_workers,
        decode_workers,
        view=view,
        report_interval_s=report_interval_s,
        prefill_engine=prefill_engine,
    )
    return simulation.run(requests)


@dataclass(slots=True, eq=False)
class _Journey:
    """A request on its way through both sides."""

    request: SimulatedRequest
    route: RouteRequest
    record: RequestRecord
    split: Split
    decode: Stay
    prefill: Stay | None
    computing_s: float = 0.0
    """At the prefill worker."""
    transfer_s: float = 0.0
    """From the end of that until its KV is at the decode worker."""


class DisaggregatedSimulation:
    """One run: create, `run` once."""

    def __init__(
        self,
        policies: Disaggregated,
        engine: EngineConfig,
        prefill_workers: int,
        decode_workers: int,
        *,
        view: SideView = "history",
        report_interval_s: float = 1.0,
        prefill_engine: EngineConfig | None = None,
    ) -> None:
        """`prefill_engine` describes the prefill side; None: it is like the other."""
        self._policies = policies
        self._report_interval_s = report_interval_s
        self._wire = policies.options.wire()
        self._block_size = engine.block_size
        prefill, decode = policies.prefill, policies.decode
        far, looks = prefill_engine or engine, prefill.needs.cache_view
        self.prefill = Side("prefill", prefill_workers, prefill, far, view, looks=looks)
        self.decode = Side("decode", decode_workers, decode, engine, view, looks=policies.looks_at_decode_caches)
        self._side = {worker.name: side for side in (self.prefill, self.decode) for worker in side.workers}
        self._engines = list(self._side)
        self._number = {name: k for k, name in enumerate(self._engines)}
        self._busy = [False] * len(self._engines)
        self._journeys: dict[str, _Journey] = {}
        self._transfers: list[_Journey] = []
        self._events: list[tuple[float, int, int]] = []

    def run(self, requests: Sequence[SimulatedRequest]) -> DisaggregatedResult:
        """Serve these requests, given in order of arrival. One that an engine can't hold has `failed`; one for which a
        policy raises NoWorkers is `refused`."""
        name = f"{self._policies.prefill.label}>{self._policies.decode.label}"
        shared = infinite_cache_tokens(requests, self._block_size)
        records = [new_record(name, k, request, shared[k]) for k, request in enumerate(requests)]
        events = self._events
        events.extend((request.arrival_s, _ARRIVAL, k) for k, request in enumerate(requests))
        if requests and (self.prefill.needs_load or self.decode.needs_load):
            events.append((requests[0].arrival_s, _REPORT, 0))
        heapq.heapify(events)
        while events:
            now_s, kind, number = heapq.heappop(events)
            if kind == _STEP_END:
                self._end_step(number, now_s)
            elif kind == _TRANSFERRED:
                self._decode(self._transfers[number], now_s)
            elif kind == _ARRIVAL:
                self._arrive(requests[number], records[number], now_s)
            else:
                self._report(now_s, requests[-1].arrival_s)
        return DisaggregatedResult(name, records, self.decode.totals(), self.prefill.totals())

    def _arrive(self, request: SimulatedRequest, record: RequestRecord, now_s: float) -> None:
        route = self._route(request)
        try:
            split = self._policies.choose(route, self.prefill.fleet(now_s), self.decode.fleet(now_s))
        except NoWorkers as refusal:
            record.end_s, record.outcome, record.status = now_s, Outcome.REFUSED, 503
            record.error = str(refusal)
            return
        expected = self._note_choice(record, route, split)
        uncached = request.prompt_tokens - expected
        prefill = None
        if split.prefill is not None:
            prefill = self.prefill.admit(route, split.prefill.worker, uncached, now_s)
        decode = self.decode.admit(route, split.decode.worker, 0 if prefill else uncached, now_s)
        self._policies.on_admit(route, split, now_s)
        journey = self._journeys[request.id] = _Journey(request, route, record, split, decode, prefill)
        if prefill is None:
            self._decode(journey, now_s)
        else:
            self._submit(journey, prefill.worker, 1, now_s)

    def _route(self, request: SimulatedRequest) -> RouteRequest:
        needs = self._policies.prefill.needs, self._policies.decode.needs
        return RouteRequest(
            id=request.id,
            prompt_tokens=request.prompt_tokens,
            tokens=request.tokens() if any(each.tokens or each.text for each in needs) else NO_TOKENS,
            blocks=request.blocks,
            block_size=self._block_size,
            max_output_tokens=request.output_tokens,
            tenant=request.tenant,
            session=request.session,
        )

    def _note_choice(self, record: RequestRecord, route: RouteRequest, split: Split) -> int:
        """What the policies decided, and the cached tokens that they expect where the prompt is computed."""
        decision = split.prefill or split.decode
        record.worker = split.decode.worker
        record.reason = LOCAL if split.prefill is None else f"{REMOTE}:{split.prefill.worker}"
        record.scores = scores_json(decision)
        record.predicted_queue_s = decision.predicted_queue_seconds
        record.predicted_prefill_s = decision.predicted_prefill_seconds
        held = split.decode_hit_blocks
        if split.prefill is not None:
            held = split.prefill.hit_blocks if self._policies.prefill.needs.cache_view else None
        if held is None:
            return 0
        record.predicted_tokens = min(held * self._block_size, route.prompt_tokens)
        return record.predicted_tokens

    def _submit(
        self, journey: _Journey, worker: str, max_tokens: int, now_s: float, *, arrived_with_kv: bool = False
    ) -> None:
        request = journey.request
        engine_request = SimRequest(
            request.id,
            request.blocks,
            request.prompt_tokens,
            max_tokens,
            now_s,
            arrived_with_kv=arrived_with_kv,
        )
        try:
            self._side[worker].models[worker].submit(engine_request)
        except RequestError as error:
            self._fail(journey, error, now_s)
            return
        if not self._busy[self._number[worker]]:
            self._begin_step(self._number[worker], now_s)

    def _begin_step(self, number: int, now_s: float) -> None:
        name = self._engines[number]
        step = self._side[name].models[name].begin_step(now_s)
        self._busy[number] = step is not None
        if step is not None:
            heapq.heappush(self._events, (now_s + step.duration_s, _STEP_END, number))

    def _end_step(self, number: int, now_s: float) -> None:
        name = self._engines[number]
        side = self._side[name]
        tokens = side.models[name].end_step(now_s)
        self._hear_events(side, name)
        for token in tokens:
            journey = self._journeys[token.request_id]
            if side is self.prefill:
                self._prefilled(journey, token.sequence, now_s)
                continue
            if token.sequence.generated_tokens == 1:
                self._first_token(journey, token.sequence, now_s)
            if token.finish_reason is not None:
                self._end(journey, token.sequence.generated_tokens, now_s)
        self._begin_step(number, now_s)

    def _prefilled(self, journey: _Journey, sequence: SequenceState, now_s: float) -> None:
        assert journey.prefill is not None
        self._note_prefill(journey, journey.prefill, sequence)
        self.prefill.end(journey.route, journey.prefill)
        self._policies.on_prefilled(journey.route, journey.split, now_s)
        journey.prefill = None
        held_blocks = self.decode.models[journey.decode.worker].hit_depth(journey.request.blocks)
        missing = max(0, journey.request.prompt_tokens - held_blocks * self._block_size)
        alone_s = self._policies.options.transfer_seconds(missing)
        arrives_s = arrival([self._wire], missing, now_s, alone_s, book=True)
        journey.computing_s, journey.transfer_s = _computing_s(sequence, now_s), arrives_s - now_s
        heapq.heappush(self._events, (arrives_s, _TRANSFERRED, len(self._transfers)))
        self._transfers.append(journey)

    def _decode(self, journey: _Journey, now_s: float) -> None:
        remote = journey.split.prefill is not None
        self._submit(journey, journey.decode.worker, journey.request.output_tokens, now_s, arrived_with_kv=remote)

    def _first_token(self, journey: _Journey, sequence: SequenceState, now_s: float) -> None:
        journey.record.first_byte_s = journey.record.first_token_s = now_s
        if journey.split.prefill is None:
            self._note_prefill(journey, journey.decode, sequence)
        note_parts(journey.record, journey.computing_s + _computing_s(sequence, now_s), journey.transfer_s)
        self.decode.first_token(journey.route, journey.decode)
        self._policies.on_first_token(journey.route, journey.split, now_s)

    def _note_prefill(self, journey: _Journey, stay: Stay, sequence: SequenceState) -> None:
        """The prompt has been computed: what was reused, and why it was more or less than expected."""
        record = journey.record
        record.prompt_tokens, record.cached_tokens = sequence.prompt_tokens, sequence.cached_tokens
        explain(record, journey.route, stay.computing, evicted=self._side[stay.worker].evicted_since(stay))

    def _end(self, journey: _Journey, output_tokens: int, now_s: float) -> None:
        record = journey.record
        record.output_tokens, record.outcome, record.status = output_tokens, Outcome.COMPLETED, 200
        self._leave(journey, now_s)

    def _fail(self, journey: _Journey, error: RequestError, now_s: float) -> None:
        record = journey.record
        record.outcome, record.status, record.error = Outcome.FAILED, 400, str(error)
        if journey.prefill is not None:
            self.prefill.end(journey.route, journey.prefill)
            self._policies.on_prefill_failed(journey.route, journey.split, now_s)
        self._leave(journey, now_s)

    def _leave(self, journey: _Journey, now_s: float) -> None:
        journey.record.end_s = now_s
        del self._journeys[journey.request.id]
        self.decode.end(journey.route, journey.decode)
        self._policies.on_end(journey.route, journey.split, now_s)

    def _report(self, now_s: float, last_arrival_s: float) -> None:
        for side in (self.prefill, self.decode):
            if side.needs_load:
                side.report(now_s)
        if now_s < last_arrival_s:
            heapq.heappush(self._events, (now_s + self._report_interval_s, _REPORT, 0))

    def _hear_events(self, side: Side, worker: str) -> None:
        if side.index is None:
            return
        for event in side.models[worker].drain_events():
            if isinstance(event, BlocksStored):
                blocks = self._journeys[event.request_id].request.blocks.tolist()
                side.index.store(worker, blocks[event.first : event.first + event.count])
            elif isinstance(event, BlockEvicted):
                side.index.remove(worker, [event.block])


def _computing_s(sequence: SequenceState, now_s: float) -> float:
    """From its admission to the batch to its first token, which it has now."""
    assert sequence.scheduled_s is not None
    return now_s - sequence.scheduled_s
