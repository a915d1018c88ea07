"""Requests as they ended: latencies by cache class, outcomes, tenants, and what a miss costs in time."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from prometheus_client.core import Metric

from exporters.families import MIN_OBSERVATIONS, gauge, quantiles
from exporters.requests.seen import DEFAULT_CLASS, OUTCOMES, SeenRequest
from exporters.requests.tally import Distributions, Tally
from kvcache.cache_class import HIT, MISS, UNKNOWN

_QUANTILES = (0.5, 0.95)


class RequestCounts:
    """The group `requests`, without what objectives say."""

    def __init__(self) -> None:
        self._hit_tokens = Distributions("request_hit_tokens")
        self._tpot = Distributions("tpot_seconds")
        self._e2e = Distributions("e2e_seconds")
        self._requests = Tally("requests")
        self._tenant_requests = Tally("tenant_requests")
        self._tenant_prompt_tokens = Tally("tenant_prompt_tokens")
        self._tenant_hit_tokens = Tally("tenant_hit_tokens")
        self._classes: set[str] = set()
        self._begin_class(DEFAULT_CLASS)

    def record(self, seen: SeenRequest) -> None:
        record = seen.record
        if seen.request_class not in self._classes:
            self._begin_class(seen.request_class)
        self._requests.add(1, seen.request_class, seen.outcome)
        self._tenant_requests.add(1, seen.tenant, seen.outcome)
        if seen.cached_tokens is not None and record.prompt_tokens is not None:
            self._hit_tokens.observe(seen.cached_tokens)
            self._tenant_prompt_tokens.add(record.prompt_tokens, seen.tenant)
            self._tenant_hit_tokens.add(seen.cached_tokens, seen.tenant)
        if seen.completed:
            if record.tpot_seconds is not None:
                self._tpot.observe(record.tpot_seconds, seen.request_class, of=record)
            if record.e2e_seconds is not None:
                self._e2e.observe(record.e2e_seconds, seen.request_class, of=record)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        yield self._hit_tokens.metric()
        yield self._tpot.metric()
        yield self._e2e.metric()
        yield self._requests.metric()
        yield self._tenant_requests.metric()
        yield self._tenant_prompt_tokens.metric()
        yield self._tenant_hit_tokens.metric()

    def _begin_class(self, name: str) -> None:
        self._classes.add(name)
        for outcome in OUTCOMES:
            self._requests.add(0, name, outcome)


@dataclass(frozen=True, slots=True)
class _FirstToken:
    at_seconds: float
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
        self._recent: deque[_FirstToken] = deque(maxlen=window_requests)

    def record(self, seen: SeenRequest) -> None:
        ttft = seen.record.ttft_seconds
        if ttft is None or seen.cache == UNKNOWN:
            return
        self._ttft.observe(ttft, seen.cache, of=seen.record)
        self._by_length.observe(ttft, seen.cache, seen.length, of=seen.record)
        self._by_tenant.observe(ttft, seen.tenant, seen.cache, of=seen.record)
        self._recent.append(_FirstToken(seen.at_seconds, seen.cache, seen.length, ttft))

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        yield self._ttft.metric()
        yield self._by_length.metric()
        yield self._by_tenant.metric()
        delta, counted = quantiles("ttft_miss_minus_hit_seconds"), gauge("ttft_window_requests")
        pairs, counts = self._comparable(now_seconds)
        if pairs:
            weights = [min(len(hits), len(misses)) for hits, misses in pairs]
            deltas = [np.quantile(misses, _QUANTILES) - np.quantile(hits, _QUANTILES) for hits, misses in pairs]
            for q, seconds in zip(_QUANTILES, np.average(deltas, axis=0, weights=weights), strict=True):
                delta.add_metric([repr(q)], float(seconds))
        for cache, count in counts.items():
            counted.add_metric([cache], count)
        yield delta
        yield counted

    def _comparable(self, now_seconds: float) -> tuple[list[tuple[list[float], list[float]]], Counter[str]]:
        """Hits and misses of the window, by length bucket with enough of both; and how many there are at all."""
        times: dict[str, dict[str, list[float]]] = defaultdict(lambda: {HIT: [], MISS: []})
        counts: Counter[str] = Counter()
        for first in self._recent:
            if first.at_seconds >= now_seconds - self._window_seconds:
                counts[first.cache] += 1
                if first.cache in (HIT, MISS):
                    times[first.length][first.cache].append(first.seconds)
        pairs = [(by[HIT], by[MISS]) for by in times.values() if min(map(len, by.values())) >= MIN_OBSERVATIONS]
        return pairs, counts
