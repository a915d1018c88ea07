"""Reuse across tenants, told from request records.

* `cross_tenant_hit`: the engine reused at least a block beyond all that the tenant had ever sent or been answered.
  Certain.
* `unsalted_traffic`: a named tenant's request went to an engine without a salt, although salts are in use, or another
  tenant has used that engine. Nothing need have leaked; nothing kept it from leaking.
* `fast_cold_prompt`: a prompt of which the tenant had sent nothing, and the engine reports nothing cached, had its
  first token as soon as a hit. Statistical: asked only where hits and misses of that length lie clearly apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

from exporters.requests.recent_times import RecentTimes
from exporters.requests.seen import SeenRequest
from exporters.requests.tally import Tally
from kvcache.cache_class import HIT, MISS
from kvcache.request_record import RequestRecord

CROSS_TENANT_HIT, UNSALTED, FAST_COLD = "cross_tenant_hit", "unsalted_traffic", "fast_cold_prompt"

_MIN_TIMES = 50
"""Hits, and misses, of a length before a single time is held against them."""
_TENANTS_A_WORKER = 1000
_WORKERS = 10_000


class Isolation:
    """The group `isolation`. A kind shows as 0 once requests could be judged for it."""

    def __init__(self) -> None:
        self._violations = Tally("isolation_violations")
        self._audited = Tally("isolation_audited_requests")
        self._unknown = 0
        self._salts_in_use = False
        self._tenants_at: defaultdict[str, set[str]] = defaultdict(set)
        self._hits: dict[str, RecentTimes] = defaultdict(RecentTimes)
        self._misses: dict[str, RecentTimes] = defaultdict(RecentTimes)

    def record(self, seen: SeenRequest) -> None:
        self._audit(seen)
        self._salting(seen.record)
        self._first_token(seen)

    def _audit(self, seen: SeenRequest) -> None:
        record, cached = seen.record, seen.cached_tokens
        if cached is None:
            return
        if record.own_tokens is None or not record.block_size:
            self._unknown += 1
            return
        self._audited.add(1)
        self._violations.add(cached >= record.own_tokens + record.block_size, CROSS_TENANT_HIT)

    def _salting(self, record: RequestRecord) -> None:
        if record.salted is None or not record.worker:
            return
        self._salts_in_use = self._salts_in_use or record.salted
        if not record.tenant:
            return
        tenants = self._tenants_of(record.worker)
        if len(tenants) < _TENANTS_A_WORKER:
            tenants.add(record.tenant)
        exposed = not record.salted and (self._salts_in_use or len(tenants) > 1)
        self._violations.add(exposed, UNSALTED)

    def _tenants_of(self, worker: str) -> set[str]:
        if worker not in self._tenants_at and len(self._tenants_at) >= _WORKERS:
            self._tenants_at.clear()
        return self._tenants_at[worker]

    def _first_token(self, seen: SeenRequest) -> None:
        ttft = seen.record.ttft_seconds
        if ttft is None or not seen.length:
            return
        hits, misses = self._hits[seen.length], self._misses[seen.length]
        if seen.cache == HIT:
            hits.add(ttft)
        elif seen.cache == MISS:
            apart = min(len(hits), len(misses)) >= _MIN_TIMES and hits.quantile(0.9) < misses.quantile(0.1)
            if apart and seen.record.own_tokens == 0:
                fast = ttft <= hits.quantile(0.5)
                self._violations.add(fast, FAST_COLD)
                if fast:
                    return  # it would teach that misses are that fast
            misses.add(ttft)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        yield self._violations.metric()
        yield self._audited.metric()

    def document(self) -> Mapping[str, Any]:
        kinds = (CROSS_TENANT_HIT, UNSALTED, FAST_COLD)
        found = {kind: count for kind in kinds if (count := self._violations.value(kind)) is not None}
        return {
            "violations": found,
            "audited_requests": self._audited.value() or 0,
            "not_audited_requests": self._unknown,
        }
