"""One plan sent by several Locust processes or machines: `--processes N`, or `--master` and `--worker`.

The master decides the run (seed, nonce) and deals the plan's sessions out to the workers, so that together they send
exactly what one process would. Workers prepare, then prime, then begin to measure when all of them are ready. Each
sends its request log to the master, row by row, so that the merged log, and every percentile of it, is that of one
process; nothing is averaged. Locust's own tables add up counters of tenths of a millisecond and are as exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import inf
from typing import Any

from gevent.event import Event
from gevent.queue import Empty, Queue
from locust.runners import STATE_MISSING

from loadgen.load_run import EndListener, LoadRun, make_folder, write_run
from loadgen.merged_report import merged_report
from loadgen.plan import Plan
from loadgen.records import RequestRecord, record_from
from loadgen.run_config import RunConfig

PREPARE_SECONDS = 120.0
ROWS_A_MESSAGE = 500
LOOK_SECONDS = 1.0
"""How often the master looks whether its workers are still there."""

_PREPARE, _PRIME, _MEASURE, _STOP = (f"prefixwatch_{step}" for step in ("prepare", "prime", "measure", "stop"))
_STATE, _ROWS = "prefixwatch_state", "prefixwatch_rows"


class DistributedError(Exception):
    """A worker couldn't prepare its part, or was lost; the message says which and why."""


def share_of(plan: Plan, position: int, count: int) -> Plan:
    """The part of a plan that worker `position` of `count` sends: whole sessions, dealt in turn.

    Users of a closed loop are dealt as evenly. Every request keeps its place in the whole plan.
    """
    sessions = list(dict.fromkeys(request.session for request in plan.requests))
    own = set(sessions[position::count])
    users = plan.concurrency
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
        input_errors: tuple[type[Exception], ...],
    ) -> None:
        """`prepare` gets the run, this worker's position and the number of workers; of what it may raise,
        `input_errors` are told to the master."""
        self._runner = runner
        self._prepare = prepare
        self._listener = listener
        self._input_errors = input_errors
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
        except self._input_errors as error:
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
        run.measure(self._listener)
        rows = [asdict(record) for record in run.records]
        for first in range(0, len(rows), ROWS_A_MESSAGE):
            self._runner.send_message(_ROWS, {"rows": rows[first : first + ROWS_A_MESSAGE]})
        self._say("done", report=run.report())

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
        self.running = False
        self.finished = Event()
        """Set when no run is under way."""
        runner.register_message(_STATE, self._on_state)
        runner.register_message(_ROWS, self._on_rows)

    def run(self, config: RunConfig) -> dict[str, Any]:
        """Answers run.json's content. Raises DistributedError, or RunConfigError for the output folder."""
        make_folder(config.out)
        self.running = True
        self.finished.clear()
        try:
            return self._run(config)
        finally:
            self.running = False
            self.finished.set()

    def _run(self, config: RunConfig) -> dict[str, Any]:
        self._records = []
        workers = sorted(client.id for client in self._runner.clients.ready)
        if not workers:
            raise DistributedError("no worker is connected: start one with --worker, or use --processes")
        shared = config.model_copy(update={"out": None})
        for position, worker in enumerate(workers):
            data = {"config": shared.model_dump_json(), "share": [position, len(workers)]}
            self._runner.send_message(_PREPARE, data, worker)
        self._await_all(workers, "prepared", PREPARE_SECONDS)
        self._tell(workers, _PRIME)
        self._await_all(workers, "primed")
        self._tell(workers, _MEASURE)
        said = self._await_all(workers, "done")
        self._records.sort(key=lambda record: record.index)
        report = merged_report([said[worker]["report"] for worker in workers], workers, self._records)
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
                    raise DistributedError(f"not {state} within {seconds:g} s: worker {', '.join(missing)}") from None
                continue
            if said["state"] == "failed":
                raise DistributedError(f"worker {worker}: {said['error']}")
            if said["state"] == state:
                found[worker] = said
        return found

    def _check(self, workers: Sequence[str]) -> None:
        clients = self._runner.clients
        for worker in workers:
            if worker not in clients or clients[worker].state == STATE_MISSING:
                raise DistributedError(f"worker {worker} is gone, and its rows with it: run again")

    def _on_state(self, environment: Any, msg: Any, **_: Any) -> None:
        self._states.put((msg.node_id, msg.data))

    def _on_rows(self, environment: Any, msg: Any, **_: Any) -> None:
        self._records += [record_from(row) for row in msg.data["rows"]]
