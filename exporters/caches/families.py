"""The metric families that KV events give, a target each. Names and meanings: `exporters.metrics_page.families`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import Metric

from prefixwatch.exporters.caches.kv_events import KvEventCounts
from prefixwatch.exporters.metrics_page.rows import histograms, rows
from prefixwatch.kvcache.index.block_table import LIFETIME_BOUNDS_SECONDS

_COUNTERS = {
    "kv_blocks_evicted": "evicted_blocks",
    "kv_blocks_regretted": "regretted_blocks",
    "kv_blocks_stored": "stored_blocks",
    "kv_event_batches": "batches",
    "kv_event_batches_missed": "missed_batches",
    "kv_event_batches_replayed": "replayed_batches",
    "kv_cache_clears": "clears",
}
"""Family → the count it shows."""


def kv_event_families(targets: Iterable[tuple[str, KvEventCounts]]) -> Iterator[Metric]:
    """All families of the group `kv blocks`."""
    known = list(targets)
    for name, attribute in _COUNTERS.items():
        family = rows(name)
        for target, counts in known:
            family.add_metric([target], getattr(counts, attribute))
        yield family
    resident, lag, lifetime = rows("kv_blocks_resident"), rows("kv_events_lag_seconds"), histograms(_LIFETIME)
    for target, counts in known:
        if counts.connected:  # an engine that is gone holds nothing, one that is cut off nobody knows what
            resident.add_metric([target], counts.resident_blocks)
        if counts.lag_seconds is not None:
            lag.add_metric([target], counts.lag_seconds)
        if counts.lifetimes:
            buckets = list(zip(_BOUNDS, accumulate(counts.lifetimes), strict=True))
            lifetime.add_metric([target], buckets, counts.lifetimes_sum_seconds)
    yield from (resident, lag, lifetime)


_LIFETIME = "kv_block_lifetime_seconds"
_BOUNDS = [*map(repr, LIFETIME_BOUNDS_SECONDS), "+Inf"]
