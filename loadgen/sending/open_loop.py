"""Sends a plan. Open loop: each request at its time, whatever became of the ones before.

A closed loop stops sending while the server stalls and so hides the stall (coordinated omission). In an open loop
nothing is dropped and nothing waits: a request that the client itself sends late counts from when it was due, and how
late it was is in the log. A plan of a closed loop is sent as one, because some ask for it: its requests count from when
they are sent, and its run says that it was one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gevent
import msgspec
from gevent.event import Event
from gevent.hub import Waiter

from prefixwatch.loadgen.client.answer_reader import Exchange
from prefixwatch.loadgen.client.http_client import HttpClient
from prefixwatch.loadgen.plan.request import MEASURED, PRIME, Plan, PlannedRequest
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.sending.answers import GeneratedAnswers
from prefixwatch.loadgen.sending.prediction import note_prediction_causes

CHAT_PATH = "/v1/chat/completions"
SHORT_WAIT_SECONDS = 0.1
STOP_LOOK_SECONDS = 0.2
"""How often a turn that waits for the one before looks whether the run was stopped."""
EXPLAIN = {"x-prefixwatch-explain": "1"}
"""Asks the router for the decision's scores."""

EndListener = Callable[[RequestRecord, Exchange], None]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What every request of a run carries besides its prompt."""

    model: str
    policy: str = ""
    repeat: int = 0
    tenant_header: str = "x-tenant-id"
    session_header: str = "x-session-id"
    session_suffix: str = ""
    """Sent behind the session's id; the log has the id as planned, so that runs can be compared."""
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class OpenLoop:
    """One run of a plan through one client: `prime`, then `measure`; `stop` may be called from another greenlet."""

    def __init__(
        self,
        plan: Plan,
        client: HttpClient,
        options: RequestOptions,
        *,
        on_end: EndListener = lambda record, exchange: None,
        clock: Callable[[], float] = time.monotonic,
        answers: GeneratedAnswers | None = None,
    ) -> None:
        """`answers` for a plan whose later turns carry the answers that this run generates."""
        self.plan = plan
        self.options = options
        self.records: list[RequestRecord] = []
        """Ended requests, in the order in which they ended; after `measure`, all of the plan, in its order."""
        self.in_flight = 0
        self.in_flight_max = 0
        self.zero: float | None = None
        """The client's clock at the start of the measured phase; None before it."""
        self._client = client
        self._on_end = on_end
        self._clock = clock
        self._answers = answers
        self._stop = Event()
        self._running: set[gevent.Greenlet] = set()
        self._free: list[Any] = []
        """Waiters of senders that have nothing to send."""
        self._all_handed_over = False
        self._ended = {
            (request.session, request.turn - 1): Event()
            for request in plan.requests
            if request.delay_seconds is not None
        }
        """Of the turns that later ones wait for."""
        self._primed: list[tuple[PlannedRequest, Exchange]] = []

    def prime(self) -> None:
        """Send the prime phase, one request after another, each waited for."""
        for request in self._of_phase(PRIME):
            if self._stop.is_set():
                return
            self._primed.append((request, self._send(request)))

    def measure(self, drain_seconds: float) -> None:
        """Send the measured phase, then wait up to `drain_seconds` for what is still running; the rest is cancelled."""
        self.zero = self._clock()
        for request, exchange in self._primed:
            self._log(request, exchange, scheduled_s=exchange.sent - self.zero)
        if self.plan.concurrency is None:
            self._send_on_time(self._of_phase(MEASURED))
            self._end_senders()
        else:
            self._send_closed(self._of_phase(MEASURED), self.plan.concurrency)
        if not self._stop.is_set():
            gevent.joinall(list(self._running), timeout=drain_seconds)
        self._client.cancel()
        gevent.joinall(list(self._running))
        self._log_unsent()

    def stop(self) -> None:
        """Send nothing more and end what is running; `measure` then returns with every request logged."""
        self._stop.set()
        self._client.cancel()

    @property
    def stopped(self) -> bool:
        return bool(self._stop.is_set())

    def begin(self) -> None:
        """Start the clock of the measured phase, for requests that are sent one by one with `send_now`."""
        self.zero = self._clock()

    def send_now(self, request: PlannedRequest) -> RequestRecord:
        """Send a request at once and wait for its answer; its times count from now. Returns its row of the log."""
        assert self.zero is not None
        scheduled_s = self._clock() - self.zero
        return self._log(request, self._send(request), scheduled_s=scheduled_s)

    @property
    def zero_unix_seconds(self) -> float | None:
        """The start of the measured phase as a Unix time; None before it."""
        return None if self.zero is None else time.time() - (self._clock() - self.zero)

    def _of_phase(self, phase: str) -> Iterable[PlannedRequest]:
        return [request for request in self.plan.requests if request.phase == phase]

    def _send_on_time(self, requests: Iterable[PlannedRequest]) -> None:
        assert self.zero is not None
        for request in requests:
            self._wait_until(self.zero + request.scheduled_s)
            if self._stop.is_set():
                return
            self._hand_over(request)

    def _hand_over(self, request: PlannedRequest) -> None:
        """To a sender that has nothing to do, or else to a new one: to start one costs more than to wake one."""
        if self._free:
            gevent.get_hub().loop.run_callback(self._free.pop().switch, request)
            return
        sender = gevent.Greenlet(self._be_sender, request)
        self._running.add(sender)
        sender.rawlink(self._running.discard)
        sender.start()

    def _be_sender(self, request: PlannedRequest | None) -> None:
        while request is not None:
            self._send_and_log(request)
            if self._all_handed_over:
                return
            free = Waiter()
            self._free.append(free)
            request = free.get()

    def _end_senders(self) -> None:
        """Those that are free end now, the others with the answers they wait for."""
        self._all_handed_over = True
        for free in self._free:
            gevent.get_hub().loop.run_callback(free.switch, None)

    def _wait_until(self, moment: float) -> None:
        """Returns sooner when the run is stopped, unless the wait is short: then a plain sleep costs less."""
        wait = moment - self._clock()
        if wait > SHORT_WAIT_SECONDS:
            self._stop.wait(wait)
        elif wait > 0:
            gevent.sleep(wait)

    def _send_closed(self, requests: Iterable[PlannedRequest], users: int) -> None:
        """Each user takes the next session when its last one is over; a session's turns follow one another."""
        sessions: dict[str, list[PlannedRequest]] = {}
        for request in requests:
            sessions.setdefault(request.session, []).append(request)
        waiting = deque(sessions.values())
        gevent.joinall([gevent.spawn(self._be_user, waiting) for _ in range(users)])

    def _be_user(self, waiting: deque[list[PlannedRequest]]) -> None:
        assert self.zero is not None
        while waiting:
            for request in waiting.popleft():
                if self._stop.wait(request.think_seconds) if request.think_seconds else self._stop.is_set():
                    return
                self._send_and_log(replace(request, scheduled_s=self._clock() - self.zero))

    def _send_and_log(self, request: PlannedRequest) -> None:
        """In an open loop, a turn that carries an answer of this run is due when that answer is there, if later."""
        if self._answers is None:
            scheduled_s = self._wait_for_turn(request)
            if self._stop.is_set():
                return
            self._log(request, self._send(request), scheduled_s=scheduled_s)
            if ended := self._ended.get((request.session, request.turn)):
                ended.set()
            return
        assert self.zero is not None
        waited = self._answers.wait_for_turn(request, self._stop)
        if self._stop.is_set():
            return
        request = self._answers.filled_in(request)
        if waited:
            request = replace(request, scheduled_s=max(request.scheduled_s, self._clock() - self.zero))
        exchange = self._send(request)
        self._answers.note(request, exchange)
        self._log(request, exchange, scheduled_s=request.scheduled_s)

    def _wait_for_turn(self, request: PlannedRequest) -> float:
        """When a request is due: one with a delay, that long after the turn before it has ended."""
        if request.delay_seconds is None:
            return request.scheduled_s
        assert self.zero is not None
        before = self._ended[request.session, request.turn - 1]
        while not before.wait(STOP_LOOK_SECONDS) and not self._stop.is_set():
            pass
        due = max(request.scheduled_s, self._clock() - self.zero + request.delay_seconds)
        self._wait_until(self.zero + due)
        return due

    def _send(self, request: PlannedRequest) -> Exchange:
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            keep = self._answers is not None
            return self._client.post(self._head(request), self._body(request), keep_text=keep)
        finally:
            self.in_flight -= 1

    def _head(self, request: PlannedRequest) -> bytes:
        options = self.options
        suffix = f"-{options.session_suffix}" if options.session_suffix else ""
        identity = {options.session_header: f"{request.session}{suffix}"}
        if request.tenant != "-":
            identity[options.tenant_header] = request.tenant
        return self._client.head(CHAT_PATH, {**EXPLAIN, **options.headers, **identity, **request.headers})

    def _body(self, request: PlannedRequest) -> bytes:
        body: dict[str, Any] = {
            "model": request.model or self.options.model,
            "messages": request.messages,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{key: value for key in ("tools", "tool_choice") if (value := getattr(request, key)) is not None},
            **self.options.extra_body,
        }
        if request.salt is not None:
            body["cache_salt"] = request.salt
        if request.priority is not None:
            body["priority"] = request.priority
        return msgspec.json.encode(body)

    def _log(self, request: PlannedRequest, exchange: Exchange, *, scheduled_s: float) -> RequestRecord:
        assert self.zero is not None
        record = self._planned_record(request, scheduled_s)
        fill_record(record, exchange, self.zero)
        self.records.append(record)
        self._on_end(record, exchange)
        return record

    def _log_unsent(self) -> None:
        """A run stopped early still has a row for every request of its plan."""
        logged = {record.index for record in self.records}
        for request in self.plan.requests:
            if request.index not in logged:
                record = self._planned_record(request, request.scheduled_s)
                record.error = "not sent: the run was stopped"
                self.records.append(record)
        self.records.sort(key=lambda record: record.index)
        note_prediction_causes(self.records)

    def _planned_record(self, request: PlannedRequest, scheduled_s: float) -> RequestRecord:
        options = self.options
        return RequestRecord(
            id=f"{options.policy or 'run'}-{options.repeat}-{request.index}",
            policy=options.policy,
            repeat=options.repeat,
            index=request.index,
            phase=PRIME if request.phase == PRIME else self.plan.trimming.phase_at(scheduled_s),
            tenant=request.tenant,
            session=request.session,
            turn=request.turn,
            group=request.group,
            request_class=request.request_class,
            scheduled_s=scheduled_s,
            outcome=Outcome.NEVER_SENT,
            planned_prompt_tokens=request.prompt_tokens,
            planned_shared_tokens=request.shared_tokens,
            planned_template_tokens=request.template_tokens,
            user=request.user,
            planned_part_classes=[part.block_class for part in request.parts],
            planned_part_tokens=[part.tokens for part in request.parts],
        )


def fill_record(record: RequestRecord, exchange: Exchange, zero: float) -> None:
    """Put into a planned record what its exchange was; `zero` is the client's clock at the run's time 0."""

    def since_zero(moment: float | None) -> float | None:
        return None if moment is None else moment - zero

    record.sent_s = exchange.sent - zero
    record.first_byte_s = since_zero(exchange.first_byte)
    record.first_token_s = since_zero(exchange.first_token)
    record.first_answer_s = since_zero(exchange.first_answer)
    record.end_s = since_zero(exchange.end)
    record.outcome, record.error, record.status = exchange.outcome, exchange.error, exchange.status
    record.chunk_gaps_ms = [gap * 1000.0 for gap in exchange.gaps_seconds]
    record.prompt_tokens, record.cached_tokens, record.output_tokens = exchange.usage
    headers = exchange.headers
    record.worker = headers.get("x-prefixwatch-worker", "")
    record.reason = headers.get("x-prefixwatch-reason", "")
    predicted = _number(headers.get("x-prefixwatch-predicted-tokens"))
    record.predicted_tokens = None if predicted is None else int(predicted)
    record.decision_us = _number(headers.get("x-prefixwatch-decision-us"))
    record.retries = int(_number(headers.get("x-prefixwatch-retries")) or 0)
    record.scores = headers.get("x-prefixwatch-scores", "")
    record.predicted_queue_s = _number(headers.get("x-prefixwatch-predicted-queue-s"))
    record.predicted_prefill_s = _number(headers.get("x-prefixwatch-predicted-prefill-s"))
    record.move = headers.get("x-prefixwatch-move", "")
    record.move_why = headers.get("x-prefixwatch-move-why", "")
    record.move_trigger = headers.get("x-prefixwatch-move-trigger", "")
    record.move_soft_s = _number(headers.get("x-prefixwatch-move-soft-s"))
    record.move_hard_s = _number(headers.get("x-prefixwatch-move-hard-s"))
    record.move_transfer_s = _number(headers.get("x-prefixwatch-move-transfer-s"))
    _split_first_token(record, _number(headers.get("x-prefixwatch-prefill-s")))


def _split_first_token(record: RequestRecord, prefill_s: float | None) -> None:
    """The parts of a miss, of the time from sending to the first token; unknown without the router's estimate."""
    if prefill_s is None or record.first_token_s is None or record.sent_s is None:
        return
    waited_s = record.first_token_s - record.sent_s
    record.prefill_s = min(waited_s, prefill_s)
    record.migrate_s = min(waited_s - record.prefill_s, record.move_transfer_s or 0.0)
    record.queue_s = waited_s - record.prefill_s - record.migrate_s


def _number(text: str | None) -> float | None:
    """A header's number; None when the header is absent or no number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
