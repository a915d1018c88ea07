"""Request records, wherever they come from, as metric families: outcomes, latencies, goodput, isolation, sessions.

The ledger is a pure account: records go in one by one, families come out. What was counted never depends on how the
records were cut into pages. Every source has an account of its own, for the same request may be reported by two of
them; a family is taken from the most trusted one that has it: the router's records, then spans, then probes.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from prometheus_client.core import Metric

from prefixwatch.exporters.caches.cache_size import Capacity
from prefixwatch.exporters.caches.prefix_traffic import SpanCounts
from prefixwatch.exporters.isolation.serving_tiers import TierOf, unknown_tier
from prefixwatch.exporters.isolation.shared_namespaces import TreeNow, no_tree
from prefixwatch.exporters.isolation.tenant_routes import CERTAIN
from prefixwatch.exporters.isolation.verdicts import Isolation, Proof
from prefixwatch.exporters.live.live_trace import LiveTrace
from prefixwatch.exporters.metrics_page.families import NAMESPACE
from prefixwatch.exporters.metrics_page.rows import has_samples, rows
from prefixwatch.exporters.requests.absences import absences
from prefixwatch.exporters.requests.account import Account, AccountState, ModelWindow
from prefixwatch.exporters.requests.cold_prefill import Baseline
from prefixwatch.exporters.requests.config import Pricing, RequestSettings
from prefixwatch.exporters.requests.request import (
    COMPLETED,
    DEFAULT_CLASS,
    NO_TENANT,
    OTHER,
    OUTCOMES,
    BoundedNames,
    Identity,
    PlaceOf,
    Request,
    nowhere,
)
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.cache_class import cache_class
from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.slo.build import load_request_objectives, shipped_names
from prefixwatch.slo.objective import Objective

ROUTER, SPANS, PROBES = "router", "spans", "probes"
SOURCES = (ROUTER, SPANS, PROBES)
"""In order of trust."""

_TRACES = 100_000
_MODELS = 100
_PLACES = 100
"""Values of a label that fleets, not clients, choose."""


class RequestLedger:
    """All request families, as one source of the exporter.

    `objectives` are the shipped ones where none are given; `tenants` always have a label of their own; `place_of`
    knows the workers' zones and nodes; `baseline` is the cold prefill time that probes measured; `clock` is
    the monotonic one that `metrics` is asked with.
    """

    name = "requests"

    def __init__(
        self,
        settings: RequestSettings | None = None,
        *,
        objectives: Sequence[Objective] | None = None,
        pricing: Pricing | None = None,
        tenants: Sequence[str] = (),
        window_seconds: float = 60.0,
        place_of: PlaceOf = nowhere,
        baseline: Baseline | None = None,
        prove: Proof = lambda _: CERTAIN,
        tier_of: TierOf = unknown_tier,
        tree: TreeNow = no_tree,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or RequestSettings()
        self.objectives = load_request_objectives(shipped_names()) if objectives is None else objectives
        self._pricing = pricing or Pricing()
        self._window_seconds = window_seconds
        self._place_of = place_of
        self._baseline = baseline
        self._isolation = partial(Isolation, prove, tier_of, tree)
        self._clock = clock
        limit, classes = self._settings.label_values, self._settings.classes
        self._classes = BoundedNames(0 if classes else limit, (DEFAULT_CLASS, *classes), rest=DEFAULT_CLASS)
        self._tenants = BoundedNames(limit, (NO_TENANT, OTHER, *tenants))
        self._models = BoundedNames(_MODELS, ("",))
        self._places = BoundedNames(_PLACES, ("",))
        self._served: dict[Identity, None] = {}
        self._served_models: set[str] = set()
        self._accounts: dict[str, Account] = {}
        self._read: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._failed_reads: Counter[tuple[str, str, str]] = Counter()
        self._traces: OrderedDict[str, None] = OrderedDict()
        self.live_trace = LiveTrace()
        """The newest requests, for `prefixwatch trace export`."""

    @property
    def router_traces(self) -> Container[str]:
        """Ids of the traces whose requests are in the router's own records, the last 100,000."""
        return self._traces

    @property
    def has_traffic(self) -> bool:
        """Whether a router's records or spans are read, which are of the requests that users sent."""
        return any(source in self._accounts for source in (ROUTER, SPANS))

    def expect(self, source: str) -> None:
        """Records of this source are being read, even if there are none yet: its counts of served models begin at 0."""
        self._account(source)

    def serves(self, model: str, worker: str) -> None:
        """A worker serves this model: the model gets a label of its own, and its counts begin at 0."""
        identity = self._identity_at(model, worker)
        if identity not in self._served:
            self._served[identity] = None
            self._served_models.add(model)
            for account in self._accounts.values():
                account.begin(identity)

    def record(self, record: RequestRecord, source: str, read_at: str = "") -> None:
        """Count one request; `read_at` is the router that reported it, whose place counts where the worker's isn't
        known. Raises ValueError for a source that isn't in `SOURCES`."""
        account = self._account(source)
        self._read[source] += 1
        if source == ROUTER or (source == SPANS and record.trace_id not in self._traces):
            self.live_trace.add(record)  # traffic, each request once: no probes, no span of what a router reported
        if source == ROUTER and record.trace_id:
            self._traces[record.trace_id] = None
            if len(self._traces) > _TRACES:
                self._traces.popitem(last=False)
        account.record(self._request(record, account, read_at))

    def missed(self, source: str, records: int) -> None:
        """Records that were gone before they could be read."""
        self._missed[source] += records

    def read_failed(self, source: str, target: str, reason: str) -> None:
        """Records couldn't be read this time; they are asked for again."""
        self._failed_reads[source, target, reason] += 1

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        written: set[str] = set()
        for source in SOURCES:
            account = self._accounts.get(source)
            for family in account.metrics(now_seconds) if account else ():
                if has_samples(family) and family.name not in written:
                    written.add(family.name)
                    yield family
        overflow = rows("label_overflow_requests")
        for label, names in (("class", self._classes), ("tenant", self._tenants), ("model", self._models)):
            overflow.add_metric([label], names.overflowed)
        yield overflow
        read, missed = rows("request_records"), rows("request_records_missed")
        for source in self._accounts:
            read.add_metric([source], self._read[source])
            missed.add_metric([source], self._missed[source])
        yield read
        yield missed

    def state(self) -> LedgerState:
        """All that was counted. What is recent, such as sessions and the window, is not part of it."""
        return LedgerState(
            dict(self._read),
            dict(self._missed),
            {source: account.state() for source, account in self._accounts.items()},
        )

    def restore(self, state: LedgerState) -> None:
        """Continue from the state of an earlier process."""
        self._read.update(state.read)
        self._missed.update(state.missed)
        for source, account in state.accounts.items():
            if source in SOURCES:
                self._account(source).restore(account)

    def window(self, now_seconds: float) -> Mapping[str, ModelWindow]:
        """What the most trusted source of traffic says of the window, by model."""
        trusted = self._trusted()
        return trusted.window(now_seconds) if trusted else {}

    def locality(self, now_seconds: float) -> Mapping[str, float]:
        """`exporters.requests.routing`, by dimension, of the most trusted source of traffic."""
        trusted = self._trusted()
        return trusted.locality.ratios(now_seconds) if trusted else {}

    def seconds_per_token(self, model: str) -> float | None:
        """Prefill time of an uncached token of this model, by our routers' records of the last 5 minutes."""
        account = self._accounts.get(ROUTER)
        return account.seconds_per_token(model, self._clock()) if account else None

    def prefix_counts(self, now_seconds: float) -> SpanCounts | None:
        """Where the requests of our routers ended in the prefix tree; None before there are records."""
        account = self._accounts.get(ROUTER)
        return account.prefix_traffic.counts(now_seconds) if account else None

    def cache_size_hit_ratios(self, now_seconds: float, capacity: Capacity) -> Mapping[tuple[str, str], float]:
        """`exporters.caches.cache_size` of our routers' records, which alone name a prompt's blocks."""
        account = self._accounts.get(ROUTER)
        return account.cache_sizes.hit_ratios(now_seconds, capacity) if account else {}

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        written = {family.name.removeprefix(NAMESPACE) for family in self.metrics(now_seconds) if has_samples(family)}
        trusted = self._trusted()
        return {
            "records": dict(self._read),
            "records_missed": dict(self._missed),
            "failed_reads": [
                {"source": source, "target": target, "reason": reason, "reads": reads}
                for (source, target, reason), reads in self._failed_reads.items()
            ],
            **(trusted.document(now_seconds) if trusted else {}),
            "absent": absences(written, self._pricing, tuple(self._accounts), trusted.unmeasured() if trusted else {}),
        }

    def _trusted(self) -> Account | None:
        """The most trusted source of traffic."""
        return next((self._accounts[source] for source in SOURCES[:2] if source in self._accounts), None)

    def _account(self, source: str) -> Account:
        if source not in SOURCES:
            raise ValueError(f"'{source}' isn't a source of request records; use one of {', '.join(SOURCES)}")
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = Account(
                self._settings,
                self.objectives,
                self._pricing,
                window_seconds=self._window_seconds,
                place_of=self._place_of,
                baseline=self._baseline,
                isolation=self._isolation(),
                only_timed=source == PROBES,
            )
            for identity in self._served:
                account.begin(identity)
        return account

    def _identity(self, record: RequestRecord, read_at: str) -> Identity:
        """Clients choose the model's name: one that no worker has ever served is counted as `other`."""
        served = record.worker or record.outcome == COMPLETED or record.model in self._served_models
        at = record.worker if any(self._place_of(record.worker)) else read_at
        return self._identity_at(record.model if served or not record.model else OTHER, at, record)

    def _identity_at(self, model: str, name: str, record: RequestRecord | None = None) -> Identity:
        """What the configuration says of a place comes first, then what the router's record says."""
        place = self._place_of(name)
        where = [getattr(place, key) or getattr(record, key, "") for key in ("pool", "namespace", "cluster")]
        return Identity(self._models.label(model), *map(self._places.label, where))

    def _request(self, record: RequestRecord, account: Account, read_at: str) -> Request:
        prompt, cached = record.prompt_tokens, record.cached_tokens
        if prompt is not None and cached is not None:
            cached = min(cached, prompt)
        graded = cache_class(prompt, cached, record.block_size or DEFAULT_BLOCK_SIZE, record.reusable_tokens)
        return Request(
            record=record,
            at_seconds=self._clock(),
            identity=self._identity(record, read_at),
            request_class=self._classes.label(record.request_class or DEFAULT_CLASS),
            tenant=self._tenants.label(record.tenant or NO_TENANT),
            outcome=record.outcome if record.outcome in OUTCOMES else OTHER,
            cache=graded.name,
            cache_basis=graded.basis,
            cached_tokens=cached,
            turn=account.sessions.turn(record),
            read_at=read_at,
        )


class LedgerState(msgspec.Struct):
    """All that a ledger has counted, by source."""

    read: dict[str, int]
    missed: dict[str, int]
    accounts: dict[str, AccountState]
