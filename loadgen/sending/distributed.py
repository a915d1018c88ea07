"""One plan sent by several Locust processes or machines: `--processes N`, or `--master` and `--worker`.

The master decides the run (seed, nonce) and deals the plan's sessions out to the workers, so that together they send
exactly what one process would. Workers prepare, then prime, then begin to measure when all of them are ready. Each
sends its request log to the master, row by row, so that the merged log, and every percentile of it, is that of one
process; nothing is averaged. Locust's own tables add up counters of tenths of a millisecond and are as exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from math import inf
from typing import Any

import gevent
from gevent.event import Event
from gevent.queue import Empty, Queue

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.plan.request import Plan
from prefixwatch.loadgen.request_log.records import RequestRecord, record_from
from prefixwatch.loadgen.sending.client_check import count_outcomes, schedule_lag_ms
from prefixwatch.loadgen.sending.load_run import EndListener, LoadRun, make_folder, write_run
from prefixwatch.loadgen.sending.run_config import RunConfig

PREPARE_SECONDS = 120.0
ROWS_A_MESSAGE = 500
LOOK_SECONDS = 1.0
"""How often the master looks whether its workers are still there."""

_PREPARE, _PRIME, _MEASURE, _STOP = (f"prefixwatch_{step}" for step in ("prepare", "prime", "measure", "stop"))
_STATE, _ROWS, _PROGRESS = "prefixwatch_state", "prefixwatch_rows", "prefixwatch_progress"
PROGRESS_SECONDS = 1.0

_MISSING = "missing"
"""`locust.runners.STATE_MISSING`. Importing Locust here would patch the sockets of whoever merges reports."""


def share_of(plan: Plan, position: int, count: int) -> Plan:
    """The part of a plan that worker `position` of `count` sends: whole sessions, dealt in turn.

    Users of a closed loop are dealt as evenly, and workers for whom none is left send nothing. Every request keeps its
    place in the whole plan.
    """
    users = plan.concurrency
    if users is not None and users < count:
        if position >= users:
            return replace(plan, requests=[], concurrency=0)
        count = users
    sessions = list(dict.fromkeys(request.session for request in plan.requests))
    own = set(sessions[position::count])
    return replace(
        plan,
        requests=[request for request in plan.requests if request.session in own],
        concurrency=None if users is None else users * (position + 1) // count - users * position // count,
    )


class Worker:
    """The worker's side: does what the master's messages say, and answers."""

    def __init__(
        self,
        runner: Any,
        prepare: Callable[[RunConfig, int, int], LoadRun],
        listener: EndListener,
    ) -> None:
        """`prepare` gets the run, this worker's position and the number of workers; an InputError that it raises is
        sent to the master."""
        self._runner = runner
        self._prepare = prepare
        self._listener = listener
        self._run: LoadRun | None = None
        for message, handler in (
            (_PREPARE, self._on_prepare),
            (_PRIME, self._on_prime),
            (_MEASURE, self._on_measure),
            (_STOP, self._on_stop),
        ):
            runner.register_message(message, handler, concurrent=True)

    def _on_prepare(self, environment: Any, msg: Any, **_: Any) -> None:
        config, (position, count) = RunConfig.model_validate_json(msg.data["config"]), msg.data["share"]
        try:
            self._run = self._prepare(config, position, count)
        except InputError as error:
            self._say("failed", error=str(error))
            return
        self._say("prepared")

    def _on_prime(self, environment: Any, msg: Any, **_: Any) -> None:
        assert self._run is not None
        self._run.prime()
        self._say("primed")

    def _on_measure(self, environment: Any, msg: Any, **_: Any) -> None:
        run = self._run
        assert run is not None
        telling = gevent.spawn(self._tell_progress, run)
        run.measure(self._listener)
        telling.kill()
        rows = [asdict(record) for record in run.records]
        for first in range(0, len(rows), ROWS_A_MESSAGE):
            self._runner.send_message(_ROWS, {"rows": rows[first : first + ROWS_A_MESSAGE]})
        # The master ends the test when all workers are done, and would not wait for the statistics of the last seconds.
        self._runner._send_stats()
        self._say("done", report=run.report())

    def _tell_progress(self, run: LoadRun) -> None:
        while True:
            gevent.sleep(PROGRESS_SECONDS)
            self._runner.send_message(_PROGRESS, run.progress())

    def _on_stop(self, environment: Any, msg: Any, **_: Any) -> None:
        if self._run is not None:
            self._run.stop()

    def _say(self, state: str, **more: Any) -> None:
        self._runner.send_message(_STATE, {"state": state, **more})


class Master:
    """The master's side: `run` blocks until all workers have sent their rows, and writes the merged log."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._states: Queue[tuple[str, dict[str, Any]]] = Queue()
        self._records: list[RequestRecord] = []
        self._progress: dict[str, dict[str, Any]] = {}
        self._measured_at: float | None = None
        self.running = False
        self.finished = Event()
        """Set when no run is under way."""
        runner.register_message(_STATE, self._on_state)
        runner.register_message(_ROWS, self._on_rows)
        runner.register_message(_PROGRESS, self._on_progress)

    def progress(self) -> dict[str, Any]:
        """How far the run is: the workers' counts added up. Quantiles aren't known before their rows are."""
        counts = ("planned", "sent", "in_flight", "completed", "refused", "failed", "timed_out", "cut_off")
        begun = self._measured_at
        return {
            "phase": "prime" if begun is None else "measured",
            "elapsed_s": None if begun is None else round(time.time() - begun, 3),
            **{name: sum(said[name] for said in self._progress.values()) for name in counts},
            **dict.fromkeys(("ttft_p50_ms", "ttft_p95_ms", "lag_max_ms")),
        }

    def run(self, config: RunConfig) -> dict[str, Any]:
        """Return run.json's content. Raises InputError, also for a worker that is lost or can't prepare its part."""
        make_folder(config.out)
        self.running = True
        self.finished.clear()
        try:
            return self._run(config)
        finally:
            self.running = False
            self.finished.set()

    def _run(self, config: RunConfig) -> dict[str, Any]:
        self._records, self._progress, self._measured_at = [], {}, None
        workers = sorted(client.id for client in self._runner.clients.ready)
        if not workers:
            raise InputError("no worker is connected: start one with --worker, or use --processes")
        shared = config.model_copy(update={"out": None})
        for position, worker in enumerate(workers):
            data = {"config": shared.model_dump_json(), "share": [position, len(workers)]}
            self._runner.send_message(_PREPARE, data, worker)
        self._await_all(workers, "prepared", PREPARE_SECONDS)
        self._tell(workers, _PRIME)
        self._await_all(workers, "primed")
        self._measured_at = time.time()
        self._tell(workers, _MEASURE)
        said = self._await_all(workers, "done")
        self._records.sort(key=lambda record: record.index)
        report = merged_report([said[worker]["report"] for worker in workers], workers, self._records)
        report["zero_unix_seconds"] = self._measured_at  # workers on other machines may have other clocks
        if config.out is not None:
            write_run(config.out, self._records, report)
        return report

    def stop(self) -> None:
        """End the run; the workers send what they have."""
        self._tell([client.id for client in self._runner.clients.all], _STOP)

    def _tell(self, workers: Sequence[str], message: str) -> None:
        for worker in workers:
            self._runner.send_message(message, {}, worker)

    def _await_all(self, workers: Sequence[str], state: str, seconds: float = inf) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while missing := [worker for worker in workers if worker not in found]:
            try:
                worker, said = self._states.get(timeout=LOOK_SECONDS)
            except Empty:
                self._check(missing)
                if time.monotonic() > deadline:
                    raise InputError(f"not {state} within {seconds:g} s: worker {', '.join(missing)}") from None
                continue
            if said["state"] == "failed":
                raise InputError(f"worker {worker}: {said['error']}")
            if said["state"] == state:
                found[worker] = said
        return found

    def _check(self, workers: Sequence[str]) -> None:
        clients = self._runner.clients
        for worker in workers:
            if worker not in clients or clients[worker].state == _MISSING:
                raise InputError(f"worker {worker} is gone, and its rows with it: run again")

    def _on_state(self, environment: Any, msg: Any, **_: Any) -> None:
        self._states.put((msg.node_id, msg.data))

    def _on_progress(self, environment: Any, msg: Any, **_: Any) -> None:
        self._progress[msg.node_id] = msg.data

    def _on_rows(self, environment: Any, msg: Any, **_: Any) -> None:
        self._records += [record_from(row) for row in msg.data["rows"]]


def merged_report(
    reports: Sequence[dict[str, Any]], workers: Sequence[str], records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """One run.json of several: what can be added is, of lateness and CPU it is the worst process that counts."""
    users = [report["concurrency"] for report in reports if report["concurrency"] is not None]
    lost = [report["retokenization_loss_tokens"] for report in reports]
    reasons = [
        f"worker {worker}: {reason}"
        for worker, report in zip(workers, reports, strict=True)
        for reason in report["reasons"]
    ]
    return {
        **reports[0],
        "processes": len(reports),
        "counts": count_outcomes(records),
        "schedule_lag_ms": schedule_lag_ms(records),
        "concurrency": sum(users) if users else None,
        "retokenization_loss_tokens": None if None in lost else sum(lost),
        "client_floor_ms": _worst(report["client_floor_ms"] for report in reports),
        "loop_lag_ms": _worst(report["loop_lag_ms"] for report in reports),
        "cpu_share": max(report["cpu_share"] for report in reports),
        "in_flight_max": sum(report["in_flight_max"] for report in reports),
        "valid": not reasons,
        "reasons": reasons,
    }


def _worst(spreads: Iterable[dict[str, float] | None]) -> dict[str, float] | None:
    """The highest of each figure; None where no process has any."""
    known = [spread for spread in spreads if spread is not None]
    return {name: max(spread[name] for spread in known) for name in known[0]} if known else None
