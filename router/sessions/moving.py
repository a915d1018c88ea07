"""A policy whose sessions move on purpose: when their worker drains, dies, is overloaded or is scaled in.

It wraps another policy, so a router without it pays nothing, and the live router and the simulator use it alike. It
remembers where each session is (`router.sessions.book`) and learns from first tokens what a prompt token takes. When a
worker is about to leave, each of its sessions gets the destination and the way that `router.sessions.price` finds
cheapest, what was already assigned included; the session's next request goes there, whatever the wrapped policy thinks,
with the reason `moved_soft` or `moved_hard`. All others are the wrapped policy's own.

A dead worker's sessions are moved when they come back: until then nobody knows whether they will. An overloaded worker
(its queue takes longer than `overload_seconds`, and twice as long as the median one; looked for once a second) gives up
a tenth of its sessions at a time, of those that nobody waits for.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from prefixwatch.kvcache.transfer_link import KvLink
from prefixwatch.router.degradation.prediction import TtftLine
from prefixwatch.router.policy import Decision, Fleet, Memory, Policy, RouteRequest, SessionMove, Worker
from prefixwatch.router.sessions.book import SessionBook, SessionKey, Stay
from prefixwatch.router.sessions.price import Choice, Destination, Kind, cheapest

MOVED = {Kind.SOFT: "moved_soft", Kind.HARD: "moved_hard"}
_CANDIDATES = 4
"""Least queued workers that are priced for a session, beside those that hold some of its prompt."""
_RELIEF_SHARE = 0.1
_RELIEF_SECONDS = 5.0
_OVERLOAD_FACTOR = 2.0
_LOOK_SECONDS = 1.0
"""Between two looks for overloaded workers: one takes longer than a choice in a large fleet."""
_KEPT = 1000


class Trigger(StrEnum):
    """Why sessions leave a worker."""

    DRAIN = "drain"
    DEATH = "death"
    OVERLOAD = "overload"
    SCALE_IN = "scale_in"


@dataclass(frozen=True, slots=True)
class Move:
    """One session's move: both prices, the choice, and what is sent."""

    at: float
    trigger: Trigger
    stay: Stay
    choice: Choice
    sent_tokens: int
    """0 for a hard move."""
    transfer_seconds: float | None
    """Until its blocks are there; None for a hard move."""

    @property
    def facts(self) -> SessionMove:
        """For the record of the request that follows."""
        own = self.choice
        return SessionMove(
            own.kind.value,
            own.why.value,
            self.trigger.value,
            None if own.soft is None else own.soft.seconds,
            None if own.hard is None else own.hard.seconds,
            self.transfer_seconds,
        )


class Driver(Protocol):
    """Those around the policy: what workers hold, what connects them, and who carries soft moves out."""

    @property
    def sends_ahead(self) -> bool:
        """Whether a soft move's blocks leave at once, while the user thinks; else the session's next request waits for
        all of the transfer."""
        ...

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        """Leading blocks of any request's prompt by worker."""
        ...

    def may_take(self, worker: str, request: RouteRequest) -> bool:
        """Whether the worker serves such requests."""
        ...

    def link(self, source: str, destination: str) -> KvLink | None:
        """What carries blocks between two workers; None where nothing does."""
        ...

    def link_wait_seconds(self, source: str, now: float) -> float:
        """Until the source's link is free."""
        ...

    def carry(self, move: Move) -> None:
        """Send the blocks of a soft move."""


class MovingPolicy(Policy):
    """The wrapped policy, except for the next request of a session that was moved."""

    name = "moving"
    source = "prefixwatch"

    def __init__(self, inner: Policy, *, overload_seconds: float | None = None, sessions: int = 10_000) -> None:
        """`overload_seconds` None: sessions stay at an overloaded worker. `driver` must be set before the first use."""
        super().__init__()
        self.inner = inner
        self.name, self.label = inner.name, inner.label
        self.needs = replace(inner.needs, cache_view=True)
        self.reasons = (*inner.reasons, *MOVED.values())
        self.driver: Driver
        self.book = SessionBook(sessions)
        self.line = TtftLine()
        self.moves: deque[Move] = deque(maxlen=_KEPT)
        """The newest."""
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """Of all moves, by trigger, kind and why."""
        self._overload_seconds = overload_seconds
        self._pending: dict[SessionKey, Move] = {}
        self._orphans = SessionBook(sessions)
        self._chosen: tuple[RouteRequest, int | None] | None = None
        self._computing: dict[RouteRequest, tuple[str, int | None, float]] = {}
        """By request without a first token: its worker, the tokens before that (None: blocks on their way, too), and
        when it was sent."""
        self._looked_at = -math.inf
        self._relieved_at: dict[str, float] = {}

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths = fleet.lookup(request)
        if self._overload_seconds is not None and fleet.now_seconds - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = fleet.now_seconds
            self._relieve(fleet)
        move = self._move_of(request, fleet, depths) if request.session else None
        workers = {worker.name: worker for worker in fleet.workers}
        if move is not None and move.choice.worker in workers:
            held = depths.get(move.choice.worker, 0)
            decision = Decision(move.choice.worker, MOVED[move.choice.kind], held, move=move.facts)
        else:
            decision = self.inner.choose(request, replace(fleet, lookup=lambda _: depths))
        hit = min(depths.get(decision.worker, 0) * request.block_size, request.prompt_tokens)
        ahead = workers[decision.worker].prefill_tokens + request.prompt_tokens - hit
        self._chosen = request, None if decision.sends_blocks and not self.driver.sends_ahead else ahead
        return decision

    def leave(self, worker: str, trigger: Trigger, staying: Sequence[Worker], now: float) -> list[Move]:
        """Move all sessions of a worker that is about to leave to those that stay; none where none stays."""
        return self._assign(trigger, list(self.book.of(worker)), staying, now) if staying else []

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.inner.on_admit(request, worker, now_seconds)
        self.book.came(request, worker, now_seconds)
        tokens = self._chosen[1] if self._chosen is not None and self._chosen[0] is request else request.prompt_tokens
        self._computing[request] = worker, tokens, now_seconds

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.inner.on_first_token(request, worker, now_seconds)
        sent = self._computing.pop(request, None)
        if sent is not None and sent[1] is not None:
            self.line.add(sent[1], now_seconds - sent[2])

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.inner.on_end(request, worker, now_seconds)
        self._computing.pop(request, None)

    def on_close(self) -> None:
        self.inner.on_close()

    def memory(self) -> Memory:
        return self.inner.memory()

    def on_worker_removed(self, worker: str) -> None:
        self.inner.on_worker_removed(worker)
        for stay in self.book.of(worker):
            self.book.forget(stay.key)
            self._orphans.put(stay)
        self._relieved_at.pop(worker, None)

    def prefill_seconds(self, tokens: int) -> float | None:
        """Time to compute this number of prompt tokens on an idle worker, as first tokens show it; None at first."""
        return self.line.seconds(tokens)

    def _move_of(self, request: RouteRequest, fleet: Fleet, depths: Mapping[str, int]) -> Move | None:
        """The move that this request completes; a dead worker's session is moved now."""
        key = SessionKey(request.tenant, request.session)
        orphan = self._orphans.get(key)
        if orphan is not None:
            self._orphans.forget(key)
            if self.book.get(key) is None:
                now = fleet.now_seconds
                self._assign(Trigger.DEATH, [replace(orphan, request=request)], fleet.workers, now, depths)
        return self._pending.pop(key, None)

    def _assign(
        self,
        trigger: Trigger,
        stays: Iterable[Stay],
        workers: Sequence[Worker],
        now: float,
        of_the_dead: Mapping[str, int] | None = None,
    ) -> list[Move]:
        """Choose for one session after another, each with what those before it add to queues and link.

        `of_the_dead`: the source is dead, and this is what the others hold of the one session's prompt.
        """
        queued = {worker.name: self._queue_seconds(worker) for worker in workers}
        alive, driver, moves = of_the_dead is None, self.driver, []
        soon = self.book.return_seconds(now) if driver.sends_ahead else 0.0
        for stay in stays:
            request = stay.request
            able = {name: seconds for name, seconds in queued.items() if driver.may_take(name, request)}
            depths = driver.depths(request) if of_the_dead is None else of_the_dead
            held = {name: depth * request.block_size for name, depth in depths.items()}
            source = min(held.get(stay.worker, 0), request.prompt_tokens) if alive else None
            wait = driver.link_wait_seconds(stay.worker, now) if alive else 0.0
            destinations = [
                Destination(
                    name, held.get(name, 0), queued[name], driver.link(stay.worker, name) if alive else None, wait
                )
                for name in _candidates(able, held, stay.worker)
            ]
            if not destinations:
                continue
            choice = cheapest(request.prompt_tokens, source, destinations, self.prefill_seconds, soon)
            soft = choice.kind is Kind.SOFT
            sent = (source or 0) - held.get(choice.worker, 0) if soft else 0
            link = driver.link(stay.worker, choice.worker) if soft else None
            move = Move(now, trigger, stay, choice, sent, None if link is None else wait + link.seconds(sent))
            price = choice.soft if soft else choice.hard
            queued[choice.worker] += price.prefill_seconds if price is not None else 0.0
            self._note(move)
            moves.append(move)
            if soft:
                driver.carry(move)
        return moves

    def _note(self, move: Move) -> None:
        self.book.put(replace(move.stay, worker=move.choice.worker))
        self._pending[move.stay.key] = move
        if len(self._pending) > 2 * len(self.book) + _KEPT:  # sessions that never came back
            self._pending = {key: one for key, one in self._pending.items() if self.book.get(key) is not None}
        self.moves.append(move)
        self.counts[move.trigger.value, move.choice.kind.value, move.choice.why.value] += 1

    def _queue_seconds(self, worker: Worker) -> float:
        """Time until the worker has computed what it was sent; 0 while nothing is known of its speed."""
        ahead, idle = self.line.seconds(worker.prefill_tokens), self.line.seconds(0)
        return 0.0 if ahead is None or idle is None else ahead - idle

    def _relieve(self, fleet: Fleet) -> None:
        """Take some quiet sessions from every overloaded worker."""
        queues = {worker.name: self._queue_seconds(worker) for worker in fleet.workers}
        usual, now = statistics.median_low(queues.values()), fleet.now_seconds  # of two workers: the less queued
        for name, seconds in queues.items():
            overloaded = seconds > (self._overload_seconds or 0.0) and seconds > _OVERLOAD_FACTOR * usual
            if not overloaded or now - self._relieved_at.get(name, -_RELIEF_SECONDS) < _RELIEF_SECONDS:
                continue
            self._relieved_at[name] = now
            waiting = {SessionKey(one.tenant, one.session) for one, (at, _, _) in self._computing.items() if at == name}
            quiet = [stay for stay in self.book.of(name) if stay.key not in waiting]
            others = [worker for worker in fleet.workers if worker.name != name]
            self._assign(Trigger.OVERLOAD, quiet[: max(1, int(_RELIEF_SHARE * len(quiet)))], others, now)


def _candidates(queued: Mapping[str, float], held: Mapping[str, int], source: str) -> Sequence[str]:
    """The workers that hold some of the prompt, and the least queued; the source isn't one of them."""
    least = sorted(queued, key=queued.__getitem__)[: _CANDIDATES + 1]
    return [name for name in dict.fromkeys([*held, *least]) if name in queued and name != source]
