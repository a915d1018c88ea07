"""Sessions: how much of a conversation's prompts is reused, and whether it stays where its cache is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric

from exporters.families import gauge
from exporters.requests.seen import SeenRequest
from exporters.requests.tally import Tally
from kvcache.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands; empty where it isn't known."""

    zone: str = ""
    node: str = ""


PlaceOf = Callable[[str], Place]


def nowhere(worker: str) -> Place:
    """For fleets whose workers have no zones or nodes."""
    return Place()


@dataclass(slots=True)
class _Session:
    worker: str
    at_seconds: float


class Sessions:
    """The group `sessions`. A session is known by the sticky key of its completed requests; those without one are
    left out.

    * migration: served by another worker (scope worker), or another node (scope node), than last time;
    * collision: the same, while a better place was there: the last worker was up and held more of this prompt than
      the chosen one. Requests where nobody looked who held what are in neither count.
    """

    def __init__(self, most_sessions: int, window_seconds: float, place_of: PlaceOf = nowhere) -> None:
        self._most_sessions = most_sessions
        self._window_seconds = window_seconds
        self._place_of = place_of
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._prompt_tokens = Tally("session_prompt_tokens")
        self._hit_tokens = Tally("session_hit_tokens")
        self._sticky = Tally("sticky_requests")
        self._collisions = Tally("sticky_collisions")
        self._migrations = Tally("session_migrations")

    def turn(self, record: RequestRecord) -> Literal["first", "later"] | None:
        """Whether its session was seen before; None without a session."""
        if not record.session:
            return None
        return "later" if record.session in self._sessions else "first"

    def record(self, seen: SeenRequest) -> None:
        record = seen.record
        if not record.session or not record.worker or not seen.completed:
            return
        last = self._sessions.get(record.session)
        self._sessions[record.session] = _Session(record.worker, seen.at_seconds)
        self._sessions.move_to_end(record.session)
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)
        if last is None:
            return
        if record.prompt_tokens is not None and seen.cached_tokens is not None:
            self._prompt_tokens.add(record.prompt_tokens)
            self._hit_tokens.add(seen.cached_tokens)
        self._moved(record, last.worker)

    def _moved(self, record: RequestRecord, before: str) -> None:
        moved = record.worker != before
        self._migrations.add(moved, "worker")
        nodes = self._place_of(before).node, self._place_of(record.worker).node
        if all(nodes):
            self._migrations.add(nodes[0] != nodes[1], "node")
        if not moved or record.held_tokens is not None:
            self._sticky.add(1)
            self._collisions.add(moved and record.held_by == before)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        sessions = gauge("sessions")
        if self._sessions:
            oldest = now_seconds - self._window_seconds
            recent = 0
            for session in reversed(self._sessions.values()):
                if session.at_seconds < oldest:
                    break
                recent += 1
            sessions.add_metric([], recent)
        yield sessions
        for tally in (self._prompt_tokens, self._hit_tokens, self._sticky, self._collisions, self._migrations):
            yield tally.metric()
