"""What a miss costs now: prefill + queue + migrate of the last 5 minutes' misses, by prompt length.

From the router's records, which split each time to first token (`router.records.miss_cost`). Misses are requests of
which nothing, or not all that could be, was reused.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.requests.request import Identity, Request
from prefixwatch.kvcache.cache_class import MISS, PARTIAL

WINDOW_SECONDS = 300.0
MIN_MISSES = 5
PARTS = ("prefill", "queue", "migrate", "total")
_QUANTILES = (0.5, 0.95)
_KEPT = 2048
"""Of one model at one place and one prompt length."""


class _Miss(NamedTuple):
    at: float
    uncached_tokens: int
    prefill: float
    queue: float
    migrate: float


class MissCost:
    """A part of the request ledger."""

    def __init__(self) -> None:
        self._misses: defaultdict[tuple[Identity, str], deque[_Miss]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def record(self, request: Request) -> None:
        record, cached = request.record, request.cached_tokens
        prefill, queue, migrate = record.miss_prefill_seconds, record.miss_queue_seconds, record.miss_migrate_seconds
        if prefill is None or queue is None or migrate is None or cached is None or record.prompt_tokens is None:
            return
        if request.cache in (MISS, PARTIAL):
            uncached = record.prompt_tokens - cached
            self._misses[request.identity, request.length].append(
                _Miss(request.at_seconds, uncached, prefill, queue, migrate)
            )

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        family = rows("miss_cost_seconds")
        for (identity, length), misses in self._recent(now_seconds):
            if len(misses) < MIN_MISSES:
                continue
            parts = np.array([miss[2:] for miss in misses])
            columns = np.column_stack([parts, parts.sum(axis=1)])
            values = np.quantile(columns, _QUANTILES, axis=0, method="inverted_cdf")
            for quantile, of_parts in zip(_QUANTILES, values.tolist(), strict=True):
                for part, value in zip(PARTS, of_parts, strict=True):
                    family.add_metric([*identity, part, length, repr(quantile)], value)
        yield family

    def seconds_per_token(self, model: str, now_seconds: float) -> float | None:
        """Prefill time of an uncached token of this model's misses in the window; None of too few."""
        found = [
            miss for (identity, _), misses in self._recent(now_seconds) if identity.model == model for miss in misses
        ]
        tokens = sum(miss.uncached_tokens for miss in found)
        return sum(miss.prefill for miss in found) / tokens if len(found) >= MIN_MISSES and tokens else None

    def _recent(self, now_seconds: float) -> Iterator[tuple[tuple[Identity, str], deque[_Miss]]]:
        for key in list(self._misses):
            misses = self._misses[key]
            while misses and misses[0].at < now_seconds - WINDOW_SECONDS:
                misses.popleft()
            if misses:
                yield key, misses
            else:
                del self._misses[key]
