"""Sessions: how much of a conversation's prompts is reused, and whether it stays where its cache is."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.requests.request import BoundedNames, Identity, PlaceOf, Request, nowhere
from prefixwatch.exporters.requests.tally import Tally
from prefixwatch.kvcache.request_record import RequestRecord

_WORDS = 32
"""Distinct values of the labels of moves that a router may bring."""


@dataclass(slots=True)
class _Session:
    worker: str
    at_seconds: float
    identity: Identity


class Sessions:
    """The group `sessions`. A session is known by the sticky key of its completed requests; those without one are
    left out.

    * migration: served by another worker (scope worker), or another node (scope node), than last time;
    * move: a migration on purpose, by the router that made it;
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
        self._moved_prompt_tokens = Tally("session_moved_prompt_tokens")
        self._moved_hit_tokens = Tally("session_moved_hit_tokens")
        self._sticky = Tally("sticky_requests")
        self._collisions = Tally("sticky_collisions")
        self._migrations = Tally("session_migrations")
        self._moves = Tally("session_moves")
        self._words = BoundedNames(_WORDS)

    def turn(self, record: RequestRecord) -> Literal["first", "later"] | None:
        """Whether its session was seen before; None without a session."""
        if not record.session:
            return None
        return "later" if record.session in self._sessions else "first"

    def record(self, request: Request) -> None:
        record = request.record
        if record.move:
            told = (record.move_trigger, record.move, record.move_why)
            self._moves.add(1, *request.identity, *map(self._words.label, told))
        if not record.session or not record.worker or not request.completed:
            return
        last = self._sessions.get(record.session)
        self._sessions[record.session] = _Session(record.worker, request.at_seconds, request.identity)
        self._sessions.move_to_end(record.session)
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)
        if last is None:
            return
        if record.prompt_tokens is not None and request.cached_tokens is not None:
            self._prompt_tokens.add(record.prompt_tokens, *request.identity)
            self._hit_tokens.add(request.cached_tokens, *request.identity)
            moved = record.worker != last.worker
            self._moved_prompt_tokens.add(moved * record.prompt_tokens, *request.identity)
            self._moved_hit_tokens.add(moved * request.cached_tokens, *request.identity)
        self._moved(request, last.worker)

    def _moved(self, request: Request, before: str) -> None:
        record, identity = request.record, request.identity
        moved = record.worker != before
        self._migrations.add(moved, *identity, "worker")
        nodes = self._place_of(before).node, self._place_of(record.worker).node
        if all(nodes):
            self._migrations.add(nodes[0] != nodes[1], *identity, "node")
        if record.held_tokens is not None:
            self._sticky.add(1, *identity)
            self._collisions.add(moved and record.held_by == before, *identity)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        recent = Counter(dict.fromkeys((session.identity for session in self._sessions.values()), 0))
        oldest = now_seconds - self._window_seconds
        for session in reversed(self._sessions.values()):
            if session.at_seconds < oldest:
                break
            recent[session.identity] += 1
        yield rows("sessions", recent.items())
        for tally in (
            self._prompt_tokens,
            self._hit_tokens,
            self._moved_prompt_tokens,
            self._moved_hit_tokens,
            self._sticky,
            self._collisions,
            self._migrations,
            self._moves,
        ):
            yield tally.metric()
