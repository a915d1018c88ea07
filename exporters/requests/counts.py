"""Requests as they ended: latencies by cache class, outcomes, tenants, and what a miss costs in time."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.requests.request import DEFAULT_CLASS, OUTCOMES, Identity, Request
from prefixwatch.exporters.requests.tally import Distributions, Tally
from prefixwatch.kvcache.cache_class import BASES, CACHE_CLASSES, HIT, MISS, UNKNOWN

_QUANTILES = (0.5, 0.95)

UNMEASURED: Mapping[str, Callable[[Request], bool]] = {
    "prompt_tokens": lambda request: request.record.prompt_tokens is None,
    "cached_tokens": lambda request: request.cached_tokens is None,
    "output_tokens": lambda request: request.record.output_tokens is None,
    "ttft": lambda request: request.record.ttft_seconds is None,
    "tpot": lambda request: request.record.tpot_seconds is None,
    "session": lambda request: not request.record.session,
    "goodput": lambda request: request.record.ttft_seconds is None and request.record.tpot_seconds is None,
}
"""Figures, and when a completed request has nothing to say of them."""


class RequestCounts:
    """The group `requests`, without what objectives say."""

    def __init__(self) -> None:
        self._hit_tokens = Distributions("request_hit_tokens")
        self._tpot = Distributions("tpot_seconds")
        self._e2e = Distributions("e2e_seconds")
        self._requests = Tally("requests")
        self._cache_classes = Tally("cache_class_requests")
        self._tenant_requests = Tally("tenant_requests")
        self._tenant_prompt_tokens = Tally("tenant_prompt_tokens")
        self._tenant_hit_tokens = Tally("tenant_hit_tokens")
        self._unmeasured = Tally("unmeasured_requests")
        self._completed = 0
        self._begun: set[tuple[Identity, str]] = set()

    def begin(self, identity: Identity, request_class: str = DEFAULT_CLASS) -> None:
        """Outcomes count from 0: a rate only sees what is added to a series that exists."""
        if (identity, request_class) not in self._begun:
            self._begun.add((identity, request_class))
            for outcome in OUTCOMES:
                self._requests.add(0, *identity, request_class, outcome)
            for figure in UNMEASURED:
                self._unmeasured.add(0, *identity, figure)

    def record(self, request: Request) -> None:
        record, identity = request.record, request.identity
        self.begin(identity, request.request_class)
        self._requests.add(1, *identity, request.request_class, request.outcome)
        self._tenant_requests.add(1, *identity, request.tenant, request.outcome)
        if request.cache != UNKNOWN:
            self._cache_classes.add(1, *identity, request.cache, request.cache_basis)
        if request.cached_tokens is not None and record.prompt_tokens is not None:
            self._hit_tokens.observe(request.cached_tokens, *identity)
            self._tenant_prompt_tokens.add(record.prompt_tokens, *identity, request.tenant)
            self._tenant_hit_tokens.add(request.cached_tokens, *identity, request.tenant)
        if request.completed:
            self._completed += 1
            for figure, missing in UNMEASURED.items():
                if missing(request):
                    self._unmeasured.add(1, *identity, figure)
            if record.tpot_seconds is not None:
                self._tpot.observe(record.tpot_seconds, *identity, request.request_class, of=record)
            if record.e2e_seconds is not None:
                self._e2e.observe(record.e2e_seconds, *identity, request.request_class, of=record)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        yield self._hit_tokens.metric()
        yield self._tpot.metric()
        yield self._e2e.metric()
        yield self._requests.metric()
        yield self._unmeasured.metric()
        yield self._cache_classes.metric()
        yield self._tenant_requests.metric()
        yield self._tenant_prompt_tokens.metric()
        yield self._tenant_hit_tokens.metric()

    def unmeasured_ratios(self) -> dict[str, float]:
        """Share of the completed requests that lack what a figure needs; empty before any request completed."""
        if not self._completed:
            return {}
        return {figure: (self._unmeasured.total(figure) or 0.0) / self._completed for figure in UNMEASURED}

    def cache_classes(self) -> dict[str, dict[str, int]]:
        """Requests by cache class and what the class is measured against."""
        return {
            name: {basis: int(self._cache_classes.total(name, basis) or 0) for basis in BASES} for name in CACHE_CLASSES
        }


@dataclass(frozen=True, slots=True)
class FirstToken:
    at_seconds: float
    identity: Identity
    cache: str
    length: str
    seconds: float


class FirstTokens:
    """TTFT by what was cached, and of misses minus hits.

    The delta is taken between prompts of the same length bucket, and the buckets' deltas averaged, each weighted by
    the fewer of its hits and misses: else the misses' longer prompts would pass for the cache's gain.
    """

    def __init__(self, window_seconds: float, window_requests: int) -> None:
        self._window_seconds = window_seconds
        self._ttft = Distributions("ttft_seconds")
        self._by_length = Distributions("ttft_by_length_seconds")
        self._by_tenant = Distributions("tenant_ttft_seconds")
        self._recent: deque[FirstToken] = deque(maxlen=window_requests)

    def record(self, request: Request) -> None:
        ttft = request.record.ttft_seconds
        if ttft is None or request.cache == UNKNOWN:
            return
        identity = request.identity
        self._ttft.observe(ttft, *identity, request.cache, of=request.record)
        self._by_length.observe(ttft, *identity, request.cache, request.length, of=request.record)
        self._by_tenant.observe(ttft, *identity, request.tenant, request.cache, of=request.record)
        self._recent.append(FirstToken(request.at_seconds, identity, request.cache, request.length, ttft))

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        yield self._ttft.metric()
        yield self._by_length.metric()
        yield self._by_tenant.metric()
        delta, counted = rows("ttft_miss_minus_hit_seconds"), rows("ttft_window_requests")
        for identity, recent in self.window(now_seconds).items():
            for q, seconds in miss_minus_hit(recent).items():
                delta.add_metric((*identity, repr(q)), seconds)
            for cache, count in Counter(first.cache for first in recent).items():
                counted.add_metric((*identity, cache), count)
        yield delta
        yield counted

    def window(self, now_seconds: float) -> dict[Identity, list[FirstToken]]:
        """The window's first tokens."""
        found: dict[Identity, list[FirstToken]] = defaultdict(list)
        for first in self._recent:
            if first.at_seconds >= now_seconds - self._window_seconds:
                found[first.identity].append(first)
        return found


def miss_minus_hit(recent: Iterable[FirstToken]) -> dict[float, float]:
    """By quantile; empty where no length bucket has enough of both."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: {HIT: [], MISS: []})
    for first in recent:
        if first.cache in (HIT, MISS):
            times[first.length][first.cache].append(first.seconds)
    pairs = [(by[HIT], by[MISS]) for by in times.values() if min(map(len, by.values())) >= MIN_OBSERVATIONS]
    if not pairs:
        return {}
    weights = [min(len(hits), len(misses)) for hits, misses in pairs]
    deltas = [np.quantile(misses, _QUANTILES) - np.quantile(hits, _QUANTILES) for hits, misses in pairs]
    return dict(zip(_QUANTILES, map(float, np.average(deltas, axis=0, weights=weights)), strict=True))
