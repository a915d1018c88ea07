"""Users in several Locust processes: one set of sessions dealt out, and one request log.

When a test starts, the master gives every worker the same nonce and a position; a worker plays each `count`-th session
of the plans that all of them make. So together they send what one process would. When the test ends, the master asks
for the rows, puts them on one clock, writes and grades them.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import gevent
from locust.runners import MasterRunner, WorkerRunner

from prefixwatch.loadgen.request_log.records import RequestRecord, record_from
from prefixwatch.loadgen.sending.distributed import ROWS_A_MESSAGE, merged_report

COLLECT_SECONDS = 30.0
"""How long the master waits for the rows of its workers."""

_SHARE, _COLLECT, _ROWS, _DONE = (f"prefixwatch_sessions_{step}" for step in ("share", "collect", "rows", "done"))


@dataclass(frozen=True, slots=True)
class Share:
    """Which sessions this process plays: each `count`-th from `position` on."""

    nonce: str
    position: int = 0
    count: int = 1


Collected = dict[str, tuple[list[RequestRecord], dict[str, Any]]]
"""By user class: rows of the request log, and what run.json says."""

_shares: WeakKeyDictionary[Any, Share] = WeakKeyDictionary()


def share_of(environment: Any) -> Share:
    """The share of this process; all sessions where it is alone."""
    return _shares.get(environment) or Share(secrets.token_hex(8))


def connect(environment: Any, own: Callable[[], Collected], write: Callable[[Collected], None]) -> None:
    """Take part in tests of several processes; nothing for one process.

    `own` ends this worker's requests and gives what it has; `write` writes, on the master, what all workers had.
    """
    runner = environment.runner
    if isinstance(runner, WorkerRunner):
        _connect_worker(environment, runner, own)
    elif isinstance(runner, MasterRunner):
        _connect_master(environment, runner, write)


def _connect_worker(environment: Any, runner: Any, own: Callable[[], Collected]) -> None:
    def take_share(environment: Any, msg: Any, **_: Any) -> None:
        _shares[environment] = Share(**msg.data)

    def send_all(environment: Any, msg: Any, **_: Any) -> None:
        reports = {}
        for kind, (records, report) in own().items():
            reports[kind] = report
            rows = [asdict(record) for record in records]
            for first in range(0, len(rows), ROWS_A_MESSAGE):
                runner.send_message(_ROWS, {"kind": kind, "rows": rows[first : first + ROWS_A_MESSAGE]})
        runner._send_stats()
        runner.send_message(_DONE, {"reports": reports})

    runner.register_message(_SHARE, take_share)
    runner.register_message(_COLLECT, send_all, concurrent=True)


def _connect_master(environment: Any, runner: Any, write: Callable[[Collected], None]) -> None:
    rows: dict[tuple[str, str], list[RequestRecord]] = {}
    reports: dict[str, dict[str, dict[str, Any]]] = {}

    def deal(**_: Any) -> None:
        rows.clear()
        reports.clear()
        workers = sorted(client.id for client in runner.clients.ready)
        nonce = secrets.token_hex(8)
        for position, worker in enumerate(workers):
            runner.send_message(_SHARE, {"nonce": nonce, "position": position, "count": len(workers)}, worker)

    def take_rows(environment: Any, msg: Any, **_: Any) -> None:
        own = rows.setdefault((msg.node_id, msg.data["kind"]), [])
        own += [record_from(row) for row in msg.data["rows"]]

    def take_report(environment: Any, msg: Any, **_: Any) -> None:
        reports[msg.node_id] = msg.data["reports"]

    def collect(**_: Any) -> None:
        workers = sorted(client.id for client in runner.clients.all)
        for worker in workers:
            runner.send_message(_COLLECT, {}, worker)
        with gevent.Timeout(COLLECT_SECONDS, False):
            while set(workers) - set(reports):
                gevent.sleep(0.05)
        if missing := sorted(set(workers) - set(reports)):
            print(f"prefixwatch: no rows from worker {', '.join(missing)}", file=sys.stderr, flush=True)
        write(_merged(rows, reports))

    runner.register_message(_ROWS, take_rows)
    runner.register_message(_DONE, take_report)
    environment.events.test_start.add_listener(deal)
    environment.events.test_stop.add_listener(collect)


def _merged(
    rows: dict[tuple[str, str], list[RequestRecord]], reports: dict[str, dict[str, dict[str, Any]]]
) -> Collected:
    found: Collected = {}
    for kind in dict.fromkeys(kind for own in reports.values() for kind in own):
        workers = [worker for worker, own in reports.items() if kind in own]
        began = [reports[worker][kind]["zero_unix_seconds"] for worker in workers]
        zero = min(began)
        records = [
            record
            for worker, own_zero in zip(workers, began, strict=True)
            for record in _later(rows.get((worker, kind), []), own_zero - zero)
        ]
        records.sort(key=lambda record: (record.scheduled_s, record.index))
        records = [replace(record, index=index) for index, record in enumerate(records)]
        report = merged_report([reports[worker][kind] for worker in workers], workers, records)
        found[kind] = records, {**report, "zero_unix_seconds": zero}
    return found


def _later(records: Iterable[RequestRecord], seconds: float) -> Iterable[RequestRecord]:
    """On a clock that began this much earlier."""
    times = ("scheduled_s", "sent_s", "first_byte_s", "first_token_s", "first_answer_s", "end_s")
    for record in records:
        moved = {name: value + seconds for name in times if (value := getattr(record, name)) is not None}
        yield replace(record, **moved)
