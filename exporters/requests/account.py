"""What the records of one source add up to: the part of every family that it gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from prometheus_client.core import Metric

from prefixwatch.exporters.caches.cache_size import CacheSizes
from prefixwatch.exporters.caches.prefix_traffic import PrefixTraffic
from prefixwatch.exporters.isolation.verdicts import Isolation
from prefixwatch.exporters.requests.cold_prefill import Baseline, ColdPrefill
from prefixwatch.exporters.requests.config import Pricing, RequestSettings
from prefixwatch.exporters.requests.counts import FirstToken, FirstTokens, RequestCounts
from prefixwatch.exporters.requests.goodput import Goodput
from prefixwatch.exporters.requests.pool_changes import PoolChanges
from prefixwatch.exporters.requests.request import Identity, PlaceOf, Request
from prefixwatch.exporters.requests.routing import RequestLocality, Routing
from prefixwatch.exporters.requests.sessions import Sessions
from prefixwatch.exporters.requests.tally import Distributions, HistogramSeries, Series, Share, Tally
from prefixwatch.exporters.scaling.miss_cost import MissCost
from prefixwatch.slo.objective import Objective


class _Part(Protocol):
    def record(self, request: Request) -> None: ...

    def metrics(self, now_seconds: float) -> Iterable[Metric]: ...


class AccountState(msgspec.Struct):
    """Counters and histograms of one source, by family."""

    tallies: dict[str, Series] = {}
    distributions: dict[str, HistogramSeries] = {}


@dataclass(slots=True)
class ModelWindow:
    """What request records say of one model in the window."""

    first_tokens: list[FirstToken] = field(default_factory=list)
    goodput: Share | None = None
    violations: float | None = None
    """Certain ones, since the exporter's start; None where none could be judged."""
    audited: Share | None = None
    """Of the last 10 minutes."""


class Account:
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
        isolation: Isolation,
        only_timed: bool,
    ) -> None:
        self._only_timed = only_timed
        self.sessions = Sessions(settings.sessions, window_seconds, place_of)
        self.locality = RequestLocality(window_seconds, settings.sessions, place_of)
        self.prefix_traffic = PrefixTraffic()
        self.cache_sizes = CacheSizes()
        self._counts = RequestCounts()
        self._goodput = Goodput(objectives, window_seconds)
        self._isolation = isolation
        self._miss_cost = MissCost()
        self._first_tokens = FirstTokens(window_seconds, settings.window_requests)
        cold_prefill = ColdPrefill(pricing.gpus_per_worker, pricing.gpu_usd_per_hour, baseline)
        traffic = (
            self._counts,
            self._goodput,
            self._isolation,
            self.sessions,
            self.locality,
            PoolChanges(settings.sessions, window_seconds),
            self.prefix_traffic,
            self.cache_sizes,
            Routing(place_of),
            cold_prefill,
            self._miss_cost,
        )
        self._parts: tuple[_Part, ...] = (self._first_tokens, *(() if only_timed else traffic))

    def _accumulators(self) -> Iterator[Tally | Distributions]:
        for part in self._parts:
            yield from (one for one in vars(part).values() if isinstance(one, Tally | Distributions))

    def state(self) -> AccountState:
        state = AccountState({}, {})
        for one in self._accumulators():
            if isinstance(one, Tally):
                state.tallies[one.name] = one.state()
            else:
                state.distributions[one.name] = one.state()
        return state

    def restore(self, state: AccountState) -> None:
        for one in self._accumulators():
            if isinstance(one, Tally):
                one.restore(state.tallies.get(one.name, []))
            else:
                one.restore(state.distributions.get(one.name, []))

    def begin(self, identity: Identity) -> None:
        """What is counted of this identity starts at 0. Probes are no traffic: nothing of theirs has to."""
        if not self._only_timed:
            self._counts.begin(identity)
            self._goodput.begin(identity)

    def record(self, request: Request) -> None:
        for part in self._parts:
            part.record(request)

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.metrics(now_seconds)

    def window(self, now_seconds: float) -> dict[str, ModelWindow]:
        found: defaultdict[str, ModelWindow] = defaultdict(ModelWindow)
        for identity, recent in self._first_tokens.window(now_seconds).items():
            found[identity.model].first_tokens += recent
        shares: defaultdict[str, list[Share]] = defaultdict(list)
        for identity, goodput in self._goodput.recent.items():
            if share := goodput.share(now_seconds):
                shares[identity.model].append(share)
        for model, of_model in shares.items():
            found[model].goodput = Share.over(of_model)
        for model, (violations, audited) in self._isolation.by_model(now_seconds).items():
            found[model].violations, found[model].audited = violations, audited
        return found

    def seconds_per_token(self, model: str, now_seconds: float) -> float | None:
        return self._miss_cost.seconds_per_token(model, now_seconds)

    def unmeasured(self) -> Mapping[str, float]:
        return self._counts.unmeasured_ratios()

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        return {
            "unmeasured_ratio": self.unmeasured(),
            "cache_classes": self._counts.cache_classes(),
            "objectives": self._goodput.document(),
            "isolation": self._isolation.document(now_seconds),
        }
