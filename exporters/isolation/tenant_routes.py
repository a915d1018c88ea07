"""What a tenant sent to a worker through other routers: the evidence that a reuse was another tenant's.

A router knows what a tenant sent through it, not what the same tenant sent through another router. When an engine
reuses more than a router knows the tenant to own, that is another tenant's cache only if no other router can have
warmed the worker with as much of this prompt. `TenantRoutes` judges that from the records of all routers.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prefixwatch.exporters.requests.request import Request
from prefixwatch.kvcache.request_record import RequestRecord, mark_depths, owner

CERTAIN = ""
PENDING = "pending"
STARTING = "starting"
UNREAD_TARGET = "unread_target"
SHARDED = "sharded"
FOREIGN_ROUTER = "foreign_router"
ROUTER_DOWN = "router_down"
HISTORY_UNKNOWN = "history_unknown"
OTHER_ROUTER = "other_router"
UNSETTLED = "unsettled"

REASONS = {
    STARTING: "the exporter has run for less than two intervals",
    SHARDED: "routers that other shards of the exporter scrape may send to the worker",
    UNREAD_TARGET: "a target was never read, so it may be a router",
    FOREIGN_ROUTER: "a router without request records may send to the worker",
    ROUTER_DOWN: "a router that sends to the worker could not be read",
    HISTORY_UNKNOWN: "it is not known what another router had sent to the worker before the exporter read it",
    OTHER_ROUTER: "the tenant may have sent this opening to the worker through another router",
    UNSETTLED: "another router still had older requests in flight after 10 minutes",
}
"""Why a suspicious request could not be judged."""

_CLOCKS_DIFFER_SECONDS = 2.0
_LONGEST_WAIT_SECONDS = 600.0
_MOST_PSEUDONYMS = 10_000
_MOST_PAIRS = 200_000
_FILTER_BITS = 2**26
_MOST_MARKS = _FILTER_BITS // 8
"""With three bits each, this many fill a third of the filter: 4 % of what was never sent seems to have been."""
_DEPTHS = mark_depths(1 << 17)

_Key = tuple[str, int, int]
"""A tenant, a depth in blocks, and the mark there."""


@dataclass(slots=True)
class RouterHistory:
    """What is known of one router. Times are Unix seconds."""

    has_records: bool
    workers: set[str] | None = field(default_factory=set)
    """All that it ever named, by target; None when it names none and so may send to any."""
    up: bool = False
    started: float = 0.0
    complete_from: float = float("inf")
    """Every request that ended later is known."""
    settled_to: float = 0.0
    """Every request that began earlier has ended, and its record was read."""
    block_sizes: set[int | None] = field(default_factory=set)
    pseudonyms: set[str] = field(default_factory=set)
    """Tenants without a configured name; equal in two routers that share a secret."""


@dataclass(slots=True)
class _Sent:
    """Of one tenant, through all routers."""

    shortest_prompt_tokens: float = float("inf")
    most_output_tokens: float = 0.0
    unreadable: bool = False
    """Some record doesn't say what was sent."""


class TenantRoutes:
    """The evidence, in bounded memory: what is forgotten, or only seems to have been sent, is never certain.

    `worker_name` returns the one name of the worker that a router calls so; `worker_started` when the process of the
    worker of this name began, 0 if unknown.
    """

    def __init__(
        self,
        worker_name: Callable[[str], str] = lambda name: name,
        worker_started: Callable[[str], float] = lambda _: 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.routers: dict[str, RouterHistory] = {}
        self.blocked = ""
        """A reason why nothing can be certain at the moment, whichever worker it concerns."""
        self.worker_name = worker_name
        self._worker_started = worker_started
        self._clock = clock
        self._last_sent: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        self._of_tenant: defaultdict[str, _Sent] = defaultdict(_Sent)
        self._filter = bytearray()
        self._marks = 0
        self._forgot_before = 0.0
        self._pending: dict[int, tuple[Request, _Key | None]] = {}
        """By identity: suspects that can't be judged yet, with the first mark that was new to the tenant."""

    def router(self, name: str, *, has_records: bool) -> RouterHistory:
        """The router's history, begun when it is new."""
        return self.routers.setdefault(name, RouterHistory(has_records))

    def sent(self, router: str, record: RequestRecord) -> None:
        """A request of this router's records, whether it is counted or not; to be called before it is judged."""
        if not record.worker:
            return
        history = self.router(router, has_records=True)
        tenant = owner(record)
        if len(self._last_sent) > _MOST_PAIRS or self._marks > _MOST_MARKS:
            self._forget()
        last = self._last_sent[self.worker_name(record.worker), tenant]
        last[router] = max(last.get(router, 0.0), record.ended_unix_seconds)
        history.block_sizes.add(record.block_size)
        if tenant.startswith("#") and len(history.pseudonyms) < _MOST_PSEUDONYMS:
            history.pseudonyms.add(tenant)
        sent = self._of_tenant[tenant]
        if record.prompt_tokens is None or record.output_tokens is None or not record.marks:
            sent.unreadable = sent.unreadable or record.prompt_tokens is None or bool(record.prompt_tokens)
        else:
            sent.shortest_prompt_tokens = min(sent.shortest_prompt_tokens, record.prompt_tokens)
            sent.most_output_tokens = max(sent.most_output_tokens, record.output_tokens)

    def remember(self, record: RequestRecord) -> None:
        """Its opening was sent by its tenant; to be called after it was judged."""
        if not record.worker:
            return
        keys = set(_keys(record))
        self._marks += sum(map(self._put, keys))
        began = record.ended_unix_seconds - (record.e2e_seconds or 0.0)
        for name, (suspect, first_new) in self._pending.items():
            if first_new in keys and began <= suspect.record.ended_unix_seconds and suspect.record is not record:
                self._pending[name] = suspect, None

    def prove(self, request: Request) -> str:
        """Whether reuse beyond what the router knows the tenant to own is certainly another tenant's cache: `CERTAIN`,
        `PENDING` while another router's requests are still in flight, or a reason among `REASONS`."""
        record, worker = request.record, self.worker_name(request.record.worker)
        own = self.routers.get(request.read_at)
        since = max(self._worker_started(worker), own.started if own else 0.0) - _CLOCKS_DIFFER_SECONDS
        others = {
            name: other
            for name, other in self.routers.items()
            if name != request.read_at and (other.workers is None or worker in other.workers)
        }
        if self.blocked or not others:
            return self.blocked
        known = self._pending.pop(id(request), None)
        first_new = known[1] if known else self._first_new(request)
        refuted = first_new is not None and self._out_of_reach(request, first_new[1])
        verdicts = {self._against(name, other, request, since, refuted=refuted) for name, other in others.items()}
        reason = next((reason for reason in REASONS if reason in verdicts), CERTAIN)
        if reason or PENDING not in verdicts:
            return reason
        if self._clock() - record.ended_unix_seconds > _LONGEST_WAIT_SECONDS:
            return UNSETTLED
        self._pending[id(request)] = request, first_new
        return PENDING

    def _against(self, name: str, other: RouterHistory, request: Request, since: float, *, refuted: bool) -> str:
        """Whether this router can have warmed the worker with the tenant's prompts, by what it sent after `since`."""
        record = request.record
        if not other.has_records:
            return FOREIGN_ROUTER
        if max(other.complete_from, self._forgot_before) > max(since, 0.0):
            return HISTORY_UNKNOWN
        if not other.up:
            return ROUTER_DOWN
        last = self._last_sent.get((self.worker_name(record.worker), owner(record)), {}).get(name, 0.0)
        comparable = self._same_tenants(request.read_at, other, owner(record))
        if not comparable or (last > since and not (refuted and other.block_sizes == {record.block_size})):
            return OTHER_ROUTER
        return PENDING if other.settled_to < record.ended_unix_seconds + _CLOCKS_DIFFER_SECONDS else CERTAIN

    def _same_tenants(self, router: str, other: RouterHistory, tenant: str) -> bool:
        """Whether both routers call this tenant the same."""
        if not tenant.startswith("#") or not other.pseudonyms:
            return True
        own = self.routers.get(router)
        return own is not None and not own.pseudonyms.isdisjoint(other.pseudonyms)

    def _first_new(self, request: Request) -> _Key | None:
        """The first mark of the reused opening, beyond what the router knows, that the tenant never sent."""
        own_blocks = (request.record.own_tokens or 0) // (request.record.block_size or 1)
        return next((key for key in _keys(request.record) if key[1] > own_blocks and not self._has(key)), None)

    def _out_of_reach(self, request: Request, depth: int) -> bool:
        """Whether the tenant, who never sent this opening's first `depth` blocks, can't own all that was reused.

        Its prompts share fewer blocks with this one, but the answer to a prompt that ended there may continue it.
        """
        record, cached = request.record, request.cached_tokens or 0
        sent, block_size = self._of_tenant[owner(record)], record.block_size or 1
        if sent.unreadable:
            return False
        if depth == 1 and sent.shortest_prompt_tokens >= block_size:
            return True
        return cached >= (depth + 1) * block_size + sent.most_output_tokens

    def shared(self, router: str) -> bool:
        """Whether another router may send to one of this router's workers, now or earlier."""
        own = self.routers.get(router)
        if own is None:
            return False
        return any(_overlap(own.workers, other.workers) for name, other in self.routers.items() if name != router)

    def _forget(self) -> None:
        self._last_sent.clear()
        self._of_tenant.clear()
        self._filter, self._marks = bytearray(), 0
        self._forgot_before = self._clock()

    def _bits(self, key: _Key) -> tuple[int, int, int]:
        hashed = hash(key) & 0xFFFFFFFFFFFFFFFF
        return hashed % _FILTER_BITS, (hashed >> 20) % _FILTER_BITS, (hashed * 0x9E3779B97F4A7C15 >> 37) % _FILTER_BITS

    def _put(self, key: _Key) -> bool:
        """Remember it; False if it seems to have been there."""
        if not self._filter:
            self._filter = bytearray(_FILTER_BITS // 8)
        new = False
        for bit in self._bits(key):
            place, mask = bit >> 3, 1 << (bit & 7)
            new = new or not self._filter[place] & mask
            self._filter[place] |= mask
        return new

    def _has(self, key: _Key) -> bool:
        return bool(self._filter) and all(self._filter[bit >> 3] & 1 << (bit & 7) for bit in self._bits(key))


def _keys(record: RequestRecord) -> list[_Key]:
    return [(owner(record), depth, mark) for depth, mark in zip(_DEPTHS, record.marks, strict=False)]


def _overlap(one: Iterable[str] | None, other: Iterable[str] | None) -> bool:
    return one is None or other is None or not set(one).isdisjoint(other)
