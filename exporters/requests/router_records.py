"""Reads our router's request records, page by page, into the ledger."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
from msgspec import structs
from yarl import URL

from exporters.http.client_config import ClientConfig
from exporters.requests.ledger import ROUTER, RequestLedger
from exporters.scraping.scrape import ScrapeFault
from exporters.scraping.target import Target
from kvcache.request_record import RequestPage, RequestRecord

SYSTEM = "prefixwatch-router"
"""The catalogue's name for routers that have records."""

Get = Callable[[str, ClientConfig], Awaitable[bytes]]
"""Fetches a body. Raises ScrapeFault."""

_PAGES_AT_ONCE = 50
_LIVES = 64
_NEAR_E2E = 0.98
_MANY_TOKENS = 32
_FIGURES = tuple(name for name in RequestRecord.__struct_fields__ if name.endswith(("_seconds", "_tokens")))
_decode = msgspec.json.Decoder(RequestPage).decode


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
        self._since_unix_seconds = since_unix_seconds
        self._started = ""
        self._caught_up = False
        self._read_up_to: OrderedDict[str, int] = OrderedDict()
        """By life, of those that another one followed."""

    def take(self, page: RequestPage) -> tuple[list[RequestRecord], int]:
        """The records that are new, and how many were overwritten before they could be read."""
        self.taking_turns = False
        if page.started != self._started:
            met_before = bool(self._started)
            self._leave(self._started)
            self._started = page.started
            if met_before:  # the number that was asked for was of another life; of one that is new all is new
                known = self._read_up_to.pop(page.started, None)
                self._caught_up, self.after, self.taking_turns = True, known or 0, known is not None
                return [], 0
        missed = max(0, page.first - self.after - 1) if self._caught_up else 0
        records = page.records[max(0, self.after + 1 - page.first) :]
        if not self._caught_up:
            records = [record for record in records if record.ended_unix_seconds >= self._since_unix_seconds]
        self.after = page.first + len(page.records) - 1
        self.finished = not page.records
        self._caught_up = self._caught_up or self.finished
        return records, missed

    def _leave(self, life: str) -> None:
        self._read_up_to[life] = self.after
        if len(self._read_up_to) > _LIVES:
            self._read_up_to.popitem(last=False)


class RouterRecords:
    """All routers' records. `since_unix_seconds` as in `RecordReader`, for routers met from now on.

    A router can't tell what a tenant sent through another one, so at a worker that several of `targets` send to what
    the tenant owned isn't known.
    """

    def __init__(self, ledger: RequestLedger, targets: Iterable[Target] = (), since_unix_seconds: float = 0.0) -> None:
        self.since_unix_seconds = since_unix_seconds
        self._targets = targets
        self._ledger = ledger
        self._readers: dict[str, RecordReader] = {}
        self._doubted: dict[tuple[str, str], float] = {}

    async def read(self, target: Target, get: Get) -> None:
        """Read what is new at a router; a failure is counted and leaves everything for the next time."""
        url = URL(target.config.url, encoded=True).parent / "router" / "requests"
        reader = self._readers.setdefault(str(url), RecordReader(self.since_unix_seconds))
        reader.finished = False
        shared = self._workers_of_others(target)
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
                self._doubted[target.name, SEVERAL_ROUTERS] = time.monotonic()
            self._ledger.missed(ROUTER, missed)
            for record in records:
                self._doubt(target.name, record)
                if not plausible(record):
                    continue
                known = record.worker not in shared
                self._ledger.record(record if known else structs.replace(record, own_tokens=None), ROUTER)
            if reader.finished:
                break
        target.record_flags = {**self._flags(target), "shared_workers": bool(shared & _workers_of(target))}

    def _workers_of_others(self, target: Target) -> frozenset[str]:
        others = (other for other in self._targets if other is not target and is_router(other))
        return frozenset().union(*map(_workers_of, others))

    def _doubt(self, target: str, record: RequestRecord) -> None:
        for flag in doubts(record):
            self._doubted[target, flag] = time.monotonic()

    def _flags(self, target: Target) -> dict[str, bool]:
        oldest = time.monotonic() - target.settings.window_seconds
        return {flag: self._doubted.get((target.name, flag), oldest - 1) >= oldest for flag in DOUBTS}


def is_router(target: Target) -> bool:
    """Whether the target is a router that has records."""
    return target.system is not None and target.system.system == SYSTEM


def _workers_of(target: Target) -> frozenset[str]:
    """The engines that a router sends to, by its metrics page."""
    found = target.store.gauges_of("worker_up") if target.store else {}
    return frozenset(dict(labels).get("worker", "") for labels in found)


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
