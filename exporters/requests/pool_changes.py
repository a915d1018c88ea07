"""Whether the pool of workers changed, and how many sessions that moved: by who served what in the window.

* joined: workers whose first request came in the window, while others had served for longer;
* left: workers without a request for `SILENT_SECONDS` and for long enough that, by the share it had, it missed
  `MISSED_REQUESTS`; a worker that is back has joined again;
* moved: of the sessions with a request in the window that isn't their first, those that changed worker in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.requests.request import Request

SILENT_SECONDS = 30.0
MISSED_REQUESTS = 20
"""By chance in one case of e^20."""
LEAST_SESSIONS = 20
"""Fewer sessions prove nothing."""


@dataclass(slots=True)
class _Worker:
    first_at: float
    last_at: float
    first_number: int
    """Of its first request, of all."""
    last_number: int
    served: int = 1


@dataclass(slots=True)
class _Session:
    worker: str
    again_at: float
    """Of its last request after its first."""
    moved_at: float = -inf


class PoolChanges:
    """A part of the request ledger; `most_sessions` bounds its memory."""

    def __init__(self, most_sessions: int, window_seconds: float) -> None:
        self._most_sessions = most_sessions
        self._window_seconds = window_seconds
        self._began_at: float | None = None
        self._requests = 0
        self._workers: dict[str, _Worker] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def record(self, request: Request) -> None:
        record, now = request.record, request.at_seconds
        if not request.completed or not record.worker:
            return
        self._began_at = now if self._began_at is None else self._began_at
        self._requests += 1
        self._serve(record.worker, now)
        if record.session:
            self._visit(record.session, record.worker, now)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        oldest = now_seconds - self._window_seconds
        changed, moved = rows("workers_changed"), rows("sessions_moved_ratio")
        if self._began_at is not None and self._began_at < oldest:
            joined = sum(worker.first_at >= oldest for worker in self._workers.values())
            left = sum(self._left(worker, now_seconds) for worker in self._workers.values())
            self._forget(oldest)
            changed.add_metric(["joined"], joined)
            changed.add_metric(["left"], left)
        again = [session for session in self._sessions.values() if session.again_at >= oldest]
        if len(again) >= LEAST_SESSIONS:
            moved.add_metric([], sum(session.moved_at >= oldest for session in again) / len(again))
        yield from (changed, moved)

    def _serve(self, name: str, now: float) -> None:
        worker = self._workers.get(name)
        if worker is None or self._left(worker, now):
            self._workers[name] = _Worker(now, now, self._requests, self._requests)
        else:
            worker.last_at, worker.last_number = now, self._requests
            worker.served += 1

    def _forget(self, oldest: float) -> None:
        """Workers that left before the window. One that is only idle, as all are, stays known."""
        for name, worker in list(self._workers.items()):
            if worker.last_at < oldest and self._left(worker, oldest + self._window_seconds):
                del self._workers[name]

    def _left(self, worker: _Worker, now: float) -> bool:
        share = worker.served / (worker.last_number - worker.first_number + 1)
        missed = share * (self._requests - worker.last_number)
        return now - worker.last_at >= SILENT_SECONDS and missed >= MISSED_REQUESTS

    def _visit(self, name: str, worker: str, now: float) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            session = _Session(worker, -inf)
            if len(self._sessions) >= self._most_sessions:
                self._sessions.popitem(last=False)
        else:
            session.again_at = now
            if session.worker != worker:
                session.worker, session.moved_at = worker, now
        self._sessions[name] = session
