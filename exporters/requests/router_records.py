"""Reads our router's request records, page by page, into the ledger."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec
from yarl import URL

from prefixwatch.exporters.config import split_shard
from prefixwatch.exporters.http.client_config import ClientConfig
from prefixwatch.exporters.isolation.tenant_routes import SHARDED, STARTING, UNREAD_TARGET, TenantRoutes
from prefixwatch.exporters.requests.ledger import ROUTER, RequestLedger
from prefixwatch.exporters.requests.witnesses import ALL_BUT_ONE, MISSES_UNREPORTED, RECORDS_DISAGREE, RecordWitness
from prefixwatch.exporters.scraping.scrape import ScrapeFault
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.request_record import RequestPage, RequestRecord

SYSTEM = "prefixwatch-router"
"""The catalogue's name for routers that have records."""

Get = Callable[[str, ClientConfig], Awaitable[bytes]]
"""Fetches a body. Raises ScrapeFault."""

_PAGES_AT_ONCE = 50
_NO_WORKER = ("", "none", "other", "unknown")
_LIVES = 64
_NEAR_E2E = 0.98
_MANY_TOKENS = 32
_FIGURES = tuple(name for name in RequestRecord.__struct_fields__ if name.endswith(("_seconds", "_tokens")))
_decode = msgspec.json.Decoder(RequestPage).decode


class ReaderState(msgspec.Struct):
    """How far one router's records were read."""

    started: str
    after: int


class RecordReader:
    """Where one router's records have been read up to. Pure: pages in, new records out.

    When the router is met for the first time, records that ended before `since_unix_seconds` are passed over: an
    exporter that was restarted would count them twice. Several routers may answer at one address, as behind a load
    balancer: where each has been read up to is remembered.
    """

    def __init__(self, since_unix_seconds: float) -> None:
        self.after = 0
        """The number to ask for."""
        self.finished = False
        """The last page had nothing more."""
        self.taking_turns = False
        """The last page was of a router that another one had stood in for."""
        self.passed_over: list[RequestRecord] = []
        """Records of the last page that ended before `since_unix_seconds`: not counted, but known."""
        self.complete_from_unix_seconds = math.inf
        """Every request that ended later is among what was read; 0 when that is all of the router's life."""
        self.new_life = False
        """The last page was of a router that was restarted."""
        self._lost = False
        """Records were lost, and none that ended later was read yet."""
        self._since_unix_seconds = since_unix_seconds
        self._started = ""
        self._caught_up = False
        self._read_up_to: OrderedDict[str, int] = OrderedDict()
        """By life, of those that another one followed."""

    def take(self, page: RequestPage) -> tuple[list[RequestRecord], int]:
        """The records that are new, and how many were overwritten before they could be read."""
        self.taking_turns, self.passed_over, self.new_life = False, [], False
        if page.started != self._started:
            met_before = bool(self._started)
            self._leave(self._started)
            self._started = page.started
            if met_before:  # the number that was asked for was of another life; of one that is new all is new
                known = self._read_up_to.pop(page.started, None)
                self._caught_up, self.after, self.taking_turns = True, known or 0, known is not None
                self.new_life, self._lost = True, True
                return [], 0
        missed = max(0, page.first - self.after - 1) if self._caught_up else 0
        records = page.records[max(0, self.after + 1 - page.first) :]
        self._lost = self._lost or missed > 0 or (page.first > 1 and not self._caught_up and self.after == 0)
        if self._lost and page.records:
            self.complete_from_unix_seconds, self._lost = page.records[0].ended_unix_seconds, False
        elif self._lost:
            self.complete_from_unix_seconds = math.inf
        elif math.isinf(self.complete_from_unix_seconds):
            self.complete_from_unix_seconds = 0.0
        if not self._caught_up:
            self.passed_over = [one for one in records if one.ended_unix_seconds < self._since_unix_seconds]
            records = [one for one in records if one.ended_unix_seconds >= self._since_unix_seconds]
        self.after = page.first + len(page.records) - 1
        self.finished = not page.records
        self._caught_up = self._caught_up or self.finished
        return records, missed

    def state(self) -> ReaderState | None:
        """To continue from; None before all of the log was read once."""
        return ReaderState(self._started, self.after) if self._caught_up else None

    def restore(self, state: ReaderState, saved_unix_seconds: float) -> None:
        """Continue where another reader ended; what it had read isn't known any more."""
        self._started, self.after, self._caught_up = state.started, state.after, True
        self.complete_from_unix_seconds = saved_unix_seconds

    def _leave(self, life: str) -> None:
        self._read_up_to[life] = self.after
        if len(self._read_up_to) > _LIVES:
            self._read_up_to.popitem(last=False)


class RouterRecords:
    """All routers' records. `since_unix_seconds` as in `RecordReader`, for routers met from now on.

    `routes` is given what every router sends where, counted or not; `targets` are all of the exporter's. Nothing is
    certain in the first two intervals, nor while there is a target that was never read and that no router names as its
    worker: it may be a router.
    """

    def __init__(
        self,
        ledger: RequestLedger,
        targets: Iterable[Target] = (),
        since_unix_seconds: float = 0.0,
        *,
        routes: TenantRoutes | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.since_unix_seconds = since_unix_seconds
        self._targets = targets
        self._ledger = ledger
        self._routes = routes or TenantRoutes()
        self._clock = clock
        self._wall_clock = wall_clock
        self._readers: dict[str, RecordReader] = {}
        self._doubted: dict[tuple[str, str], float] = {}
        self._witness = RecordWitness()
        self._named: dict[str, tuple[int, frozenset[str]]] = {}
        """By router the workers that its page names, and after how many scrapes: a page names a thousand."""

    def state(self) -> dict[str, ReaderState]:
        """How far each router was read, by the address of its records."""
        return {url: state for url, reader in self._readers.items() if (state := reader.state())}

    def restore(self, readers: Mapping[str, ReaderState], saved_unix_seconds: float) -> None:
        """Continue from `state` of an earlier process."""
        for url, state in readers.items():
            self._readers[url] = RecordReader(self.since_unix_seconds)
            self._readers[url].restore(state, saved_unix_seconds)

    async def read(self, target: Target, get: Get) -> None:
        """Read what is new at a router; a failure is counted and leaves everything for the next time."""
        url = URL(target.config.url, encoded=True).parent / "router" / "requests"
        reader = self._readers.setdefault(str(url), RecordReader(self.since_unix_seconds))
        reader.finished = False
        began = self._wall_clock()
        self.look(began)
        for _ in range(_PAGES_AT_ONCE):
            try:
                page = _decode(await get(str(url.with_query(after=reader.after)), target.config))
            except ScrapeFault as fault:
                self._ledger.read_failed(ROUTER, target.name, fault.reason)
                break
            except msgspec.MsgspecError:
                self._ledger.read_failed(ROUTER, target.name, "not_records")
                break
            self._ledger.expect(ROUTER)
            records, missed = reader.take(page)
            if reader.taking_turns:
                self._doubted[target.name, SEVERAL_ROUTERS] = self._clock()
            self._ledger.missed(ROUTER, missed)
            if reader.new_life:  # its pseudonyms may be others, too
                self._routes.router(target.name, has_records=True).pseudonyms.clear()
            for record in [*reader.passed_over, *records]:
                self._routes.sent(target.name, record)
            for record in reader.passed_over:
                self._routes.remember(record)
            for record in records:
                self._doubt(target.name, record)
                self._witness.add(target.name, self._routes.worker_name(record.worker), record, self._clock())
                if plausible(record):
                    self._ledger.record(record, ROUTER, target.name)
                self._routes.remember(record)
            if reader.finished:
                break
        self._learn(target, reader)
        target.record_flags = {**self._flags(target), "shared_workers": self._routes.shared(target.name)}
        self._hold_against_engines(target)

    def look(self, now_unix_seconds: float) -> None:
        """Note which routers there are, which are down, and whether anything can be certain."""
        named: set[str] = set()
        for target in self._targets:
            if target.system is not None and target.system.role == "router":
                history = self._routes.router(target.name, has_records=is_router(target))
                history.up = history.up and target.up
                workers = self._workers(target)
                if workers and history.workers is not None:
                    history.workers |= workers
                elif not workers and target.up and not history.workers:
                    history.workers = None
                named |= workers
        settings = [target.settings for target in self._targets]
        interval = settings[0].interval_seconds if settings else 0.0
        unread = any(target.system is None and target.name not in named for target in self._targets)
        sharded = any(split_shard(one.shard)[1] > 1 for one in settings[:1])
        starting = now_unix_seconds - self.since_unix_seconds < 2 * interval
        self._routes.blocked = SHARDED if sharded else STARTING if starting else UNREAD_TARGET if unread else ""

    def _workers(self, router: Target) -> frozenset[str]:
        """The workers that the router's last page names, by target."""
        found = self._named.get(router.name)
        if found is None or found[0] != router.health.scrapes:
            workers = frozenset(map(self._routes.worker_name, _workers_of(router)))
            found = self._named[router.name] = router.health.scrapes, workers
        return found[1]

    def _learn(self, target: Target, reader: RecordReader) -> None:
        history = self._routes.router(target.name, has_records=True)
        history.up = target.up and reader.finished
        if target.store is None:
            return
        history.started = target.store.started_unix_seconds or 0.0
        # what an earlier process of the same router had sent is unknown
        history.complete_from = max(reader.complete_from_unix_seconds, history.started or math.inf)
        oldest = max(target.store.gauges_of("oldest_in_flight_seconds").values(), default=0.0)  # absent: none in flight
        if reader.finished:
            age = max(oldest, 0.0) + self._clock() - (target.health.succeeded_at_seconds or 0.0)
            history.settled_to = self._wall_clock() - age

    def _hold_against_engines(self, router: Target) -> None:
        """Set the flags of this router and its engines that come from comparing its records with their counters."""
        now, window = self._clock(), router.settings.window_seconds
        self._witness.forget(now - 2 * window)
        held_of = {ALL_BUT_ONE: self._witness.of_router, MISSES_UNREPORTED: self._witness.misses}
        found = {flag: held(router.name, now, window) for flag, held in held_of.items()}
        router.witnesses = {flag: reason for flag, reason in found.items() if reason is not None}
        workers = set(self._witness.workers())
        for target in self._targets:
            if target.name in workers and target.store is not None and target.up:
                held = self._witness.of_engine(target.name, target.store, now)
                target.witnesses = {} if held is None else {RECORDS_DISAGREE: held}

    def _doubt(self, target: str, record: RequestRecord) -> None:
        for flag in doubts(record):
            self._doubted[target, flag] = self._clock()

    def _flags(self, target: Target) -> dict[str, bool]:
        oldest = self._clock() - target.settings.window_seconds
        return {flag: self._doubted.get((target.name, flag), oldest - 1) >= oldest for flag in DOUBTS}


def is_router(target: Target) -> bool:
    """Whether the target is a router that has records."""
    return target.system is not None and target.system.system == SYSTEM


def _workers_of(target: Target) -> set[str]:
    """The workers that a router's page names, by whatever signal."""
    if target.store is None:
        return set()
    shown = {dict(labels).get("worker", "") for labels in target.store.gauges_of("worker_up")}
    counted = {worker for (worker,) in target.store.totals_by("routed_requests", "worker")}
    return {name for name in {*shown, *counted, *target.loads.means()} if name not in _NO_WORKER}


SEVERAL_ROUTERS = "several_routers"
"""Routers take turns at one address: their counters, too, and those can't be told apart."""

DOUBTS: Sequence[str] = ("cached_exceeds_prompt", "ttft_near_e2e", "bad_records", SEVERAL_ROUTERS)
"""Flags that a router's records can raise, for as long as the window."""


def plausible(record: RequestRecord) -> bool:
    """No figure is negative: counters must not go backwards."""
    return all((value := getattr(record, name)) is None or value >= 0 for name in _FIGURES)


def doubts(record: RequestRecord) -> list[str]:
    """What can't be right in a record: more cached than there was (kvcache-ai/Mooncake#4164, RT12), a first token that
    came with the last of many (vllm-project/aibrix#2477, RT38), or a figure below 0."""
    found = []
    prompt, cached, output = record.prompt_tokens, record.cached_tokens, record.output_tokens
    if prompt is not None and cached is not None and cached > prompt:
        found.append(DOUBTS[0])
    ttft, e2e = record.ttft_seconds, record.e2e_seconds
    if ttft is not None and e2e and output is not None and output > _MANY_TOKENS and ttft / e2e > _NEAR_E2E:
        found.append(DOUBTS[1])
    if not plausible(record):
        found.append(DOUBTS[2])
    return found
