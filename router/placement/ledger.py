"""The router's own account of what it has sent where and what is still running.

Each time a worker joins it gets a fresh `Worker` object: its generation. A request's ticket holds the one that
it was admitted to, so requests that outlive their worker's departure never touch its successor. A ticket ends
when its stream ends, however long that takes: nothing is dropped by age.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefixwatch.router.policy import NOWHERE, Place, Worker


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at one worker."""

    worker: Worker
    admitted_at: float
    prefill_tokens: int
    """Still to be prefilled; 0 after the first token."""
    alone: bool = False
    """No other prompt was to be computed at the worker when this one was sent."""
    streams: int = 0
    """Requests at the worker at this one's first token, with itself."""
    open: bool = True


class Ledger:
    """Requests in flight by worker. Every operation may come twice or late; counters never go below zero."""

    def __init__(self, places: Mapping[str, Place] | None = None) -> None:
        """`places` says where workers are, by name; those it leaves out are nowhere."""
        self._places = places or {}
        self._present: dict[str, Worker] = {}
        self.reported_at: dict[str, float] = {}
        """When each worker present last reported its load."""
        self._open: dict[Ticket, None] = {}

    @property
    def workers(self) -> list[Worker]:
        """The workers present."""
        return list(self._present.values())

    def worker(self, name: str) -> Worker | None:
        """One of them; None when it isn't present."""
        return self._present.get(name)

    def join(self, name: str) -> Worker:
        """The worker is part of the fleet from now on; no effect when it already is."""
        worker = self._present.get(name)
        if worker is None:
            worker = self._present[name] = Worker(name, place=self._places.get(name, NOWHERE))
        return worker

    def leave(self, name: str) -> None:
        """The worker is gone; requests it still had end on their own."""
        self._present.pop(name, None)
        self.reported_at.pop(name, None)

    def admit(self, name: str, prefill_tokens: int, now: float) -> Ticket:
        """Count a request at a worker, before it is sent. Raises KeyError for a worker that isn't present."""
        worker = self._present[name]
        alone = not worker.prefill_tokens
        worker.in_flight += 1
        worker.served += 1
        worker.prefill_tokens += prefill_tokens
        ticket = Ticket(worker, now, prefill_tokens, alone)
        self._open[ticket] = None
        return ticket

    def first_token(self, ticket: Ticket) -> None:
        """The prompt is prefilled."""
        if ticket.open:
            ticket.worker.prefill_tokens -= ticket.prefill_tokens
            ticket.prefill_tokens = 0
            ticket.streams = ticket.streams or ticket.worker.in_flight

    def end(self, ticket: Ticket) -> None:
        """The request has left the worker, for whatever reason."""
        self.first_token(ticket)
        if ticket.open:
            ticket.open = False
            ticket.worker.in_flight -= 1
            del self._open[ticket]

    def learn(
        self,
        ticket: Ticket,
        *,
        uncached_tokens: int | None,
        first_token_at: float,
        output_tokens: int | None,
        ended_at: float,
    ) -> None:
        """What an answer that ended, completed, shows of its worker; None: the engine didn't say."""
        rates = ticket.worker.rates
        if ticket.alone and uncached_tokens is not None:
            rates.first_token(uncached_tokens, first_token_at - ticket.admitted_at)
        if output_tokens is not None and ticket.streams:
            streams = (ticket.streams + ticket.worker.in_flight + (0 if ticket.open else 1)) / 2
            rates.answered(output_tokens, ended_at - first_token_at, streams)

    def in_flight(self) -> dict[str, int]:
        """Open requests by worker name, over all its stays, so that what outlived a departure still shows."""
        counts = dict.fromkeys(self._present, 0)
        for ticket in self._open:
            counts[ticket.worker.name] = counts.get(ticket.worker.name, 0) + 1
        return counts

    def oldest_seconds(self, now: float) -> float | None:
        """Age of the oldest open request; None when there is none."""
        oldest = next(iter(self._open), None)
        return None if oldest is None else now - oldest.admitted_at
