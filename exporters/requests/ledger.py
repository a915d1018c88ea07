"""Request records, wherever they come from, as metric families: outcomes, latencies, goodput, isolation, sessions.

The ledger is a pure account: records go in one by one, families come out. What was counted never depends on how the
records were cut into pages. Every source has an account of its own, for the same request may be told by two of
them; a family is taken from the most trusted one that has it: the router's records, then spans, then probes.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import Metric

from exporters.caches.prefix_traffic import BlockCounts, PrefixTraffic
from exporters.families import NAMESPACE, counter
from exporters.requests.absences import absences
from exporters.requests.cold_prefill import Baseline, ColdPrefill
from exporters.requests.counts import FirstTokens, RequestCounts
from exporters.requests.goodput import Goodput
from exporters.requests.isolation import Isolation
from exporters.requests.locality import Locality
from exporters.requests.routing import Routing
from exporters.requests.seen import DEFAULT_CLASS, NO_TENANT, OTHER, OUTCOMES, BoundedNames, SeenRequest
from exporters.requests.sessions import PlaceOf, Sessions, nowhere
from exporters.requests.settings import Pricing, RequestSettings
from kvcache.blocks import DEFAULT_BLOCK_SIZE
from kvcache.cache_class import cache_class
from kvcache.request_record import RequestRecord
from slo.document import load_request_objectives, shipped_names
from slo.objective import Objective

ROUTER, SPANS, PROBES = "router", "spans", "probes"
SOURCES = (ROUTER, SPANS, PROBES)
"""In order of trust."""

_TRACES = 100_000


class _Part(Protocol):
    def record(self, seen: SeenRequest) -> None: ...

    def metrics(self, now_seconds: float) -> Iterable[Metric]: ...


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or RequestSettings()
        self._objectives = load_request_objectives(shipped_names()) if objectives is None else objectives
        self._pricing = pricing or Pricing()
        self._window_seconds = window_seconds
        self._place_of = place_of
        self._baseline = baseline
        self._clock = clock
        limit, classes = self._settings.label_values, self._settings.classes
        self._classes = BoundedNames(0 if classes else limit, (DEFAULT_CLASS, *classes), rest=DEFAULT_CLASS)
        self._tenants = BoundedNames(limit, (NO_TENANT, OTHER, *tenants))
        self._accounts: dict[str, _Account] = {}
        self._read: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._failed_reads: Counter[tuple[str, str, str]] = Counter()
        self._traces: OrderedDict[str, None] = OrderedDict()

    @property
    def router_traces(self) -> Container[str]:
        """Ids of the traces whose requests the router's own records told, the last 100,000."""
        return self._traces

    def expect(self, source: str) -> None:
        """Records of this source are being read, though none may have come: what it counts begins at 0."""
        self._account(source)

    def record(self, record: RequestRecord, source: str) -> None:
        """Count one request. Raises ValueError for a source that isn't in `SOURCES`."""
        account = self._account(source)
        self._read[source] += 1
        if source == ROUTER and record.trace_id:
            self._traces[record.trace_id] = None
            if len(self._traces) > _TRACES:
                self._traces.popitem(last=False)
        account.record(self._seen(record, account))

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
                if family.samples and family.name not in written:
                    written.add(family.name)
                    yield family
        read, missed = counter("request_records"), counter("request_records_missed")
        for source in self._accounts:
            read.add_metric([source], self._read[source])
            missed.add_metric([source], self._missed[source])
        yield read
        yield missed

    def locality(self, now_seconds: float) -> Mapping[str, float]:
        """`exporters.requests.locality`, by dimension, of the most trusted source of traffic."""
        trusted = next((self._accounts[source] for source in SOURCES[:2] if source in self._accounts), None)
        return trusted.locality.ratios(now_seconds) if trusted else {}

    def prefix_counts(self, now_seconds: float) -> BlockCounts | None:
        """Where the requests of our routers ended in the prefix tree; None before there are records."""
        account = self._accounts.get(ROUTER)
        return account.prefix_traffic.counts(now_seconds) if account else None

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        written = {family.name.removeprefix(NAMESPACE) for family in self.metrics(now_seconds) if family.samples}
        trusted = next((self._accounts[source] for source in SOURCES[:2] if source in self._accounts), None)
        return {
            "records": dict(self._read),
            "records_missed": dict(self._missed),
            "failed_reads": [
                {"source": source, "target": target, "reason": reason, "reads": reads}
                for (source, target, reason), reads in self._failed_reads.items()
            ],
            **(trusted.document() if trusted else {}),
            "absent": absences(written, self._pricing, sources=tuple(self._accounts)),
        }

    def _account(self, source: str) -> _Account:
        if source not in SOURCES:
            raise ValueError(f"'{source}' is no source of request records: use one of {', '.join(SOURCES)}")
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = _Account(
                self._settings,
                self._objectives,
                self._pricing,
                window_seconds=self._window_seconds,
                place_of=self._place_of,
                baseline=self._baseline,
                only_timed=source == PROBES,
            )
        return account

    def _seen(self, record: RequestRecord, account: _Account) -> SeenRequest:
        prompt, cached = record.prompt_tokens, record.cached_tokens
        if prompt is not None and cached is not None:
            cached = min(cached, prompt)
        return SeenRequest(
            record=record,
            at_seconds=self._clock(),
            request_class=self._classes.label(record.request_class or DEFAULT_CLASS),
            tenant=self._tenants.label(record.tenant or NO_TENANT),
            outcome=record.outcome if record.outcome in OUTCOMES else OTHER,
            cache=cache_class(prompt, cached, record.block_size or DEFAULT_BLOCK_SIZE),
            cached_tokens=cached,
            turn=account.sessions.turn(record),
        )


class _Account:
    """What one source's records add up to. Probes are no traffic: only their times count."""

    def __init__(
        self,
        settings: RequestSettings,
        objectives: Sequence[Objective],
        pricing: Pricing,
        *,
        window_seconds: float,
        place_of: PlaceOf,
        baseline: Baseline | None,
        only_timed: bool,
    ) -> None:
        self.sessions = Sessions(settings.sessions, window_seconds, place_of)
        self.locality = Locality(window_seconds, settings.sessions, place_of)
        self.prefix_traffic = PrefixTraffic()
        self._goodput = Goodput(objectives)
        self._isolation = Isolation()
        first_tokens = FirstTokens(window_seconds, settings.window_requests)
        cold_prefill = ColdPrefill(pricing.gpus_per_worker, pricing.gpu_usd_per_hour, baseline)
        traffic = (
            RequestCounts(),
            self._goodput,
            self._isolation,
            self.sessions,
            self.locality,
            self.prefix_traffic,
            Routing(place_of),
            cold_prefill,
        )
        self._parts: tuple[_Part, ...] = (first_tokens, *(() if only_timed else traffic))

    def record(self, seen: SeenRequest) -> None:
        for part in self._parts:
            part.record(seen)

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.metrics(now_seconds)

    def document(self) -> Mapping[str, Any]:
        return {"objectives": self._goodput.document(), "isolation": self._isolation.document()}
