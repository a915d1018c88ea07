"""Families of what engines, caches and GPUs tell of themselves: waits, transfers, evictions, speculation, power.

Scraped numbers only; each is in its family's unit already (`exporters.catalogue`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from prometheus_client.core import GaugeMetricFamily, Metric

from exporters.families import counter, gauge, histogram
from exporters.fleet import HasStore, merged_over, stores
from exporters.histogram_text import add_histogram
from exporters.scraping.signals import SignalStore
from exporters.scraping.target import Target

_UNKNOWN = "unknown"

_BY_MODEL = {
    "preemptions": "preemptions",
    "speculative_draft_tokens": "speculative_draft_tokens",
    "speculative_accepted_tokens": "speculative_accepted_tokens",
}
"""Signal → counter family by target and model."""

_BY_TARGET = {
    "evicted_tokens": "kv_evicted_tokens",
    "evicted_objects": "kv_evicted_objects",
    "lookup_objects": "kv_store_query_objects",
    "lookup_hit_objects": "kv_store_hit_objects",
}
"""Signal → counter family by target."""

_BLOCK_TIMES = {
    "kv_block_lifetime": "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict": "kv_block_idle_before_evict_seconds",
}
"""Signal → histogram family by target."""

_Fresh = Sequence[tuple[str, SignalStore]]
"""Targets that are up, by name."""

_GPU_GAUGES = ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_power_watts")


def engine_families(targets: Sequence[Target]) -> list[Metric]:
    """What each target tells; a family that none gives has no sample. A target that is down has no series, for frozen
    numbers would pass for fresh ones."""
    fresh = [(target.name, target.store) for target in targets if target.up and target.store is not None]
    return [
        *_counters(fresh),
        *_stores(fresh),
        *_block_times(fresh, {target.name for target in targets if _tells_lifetimes(target)}),
        _moe_alignment(fresh),
        *_gpus([(name, store) for name, store in fresh if store.system.role == "gpu"]),
    ]


def engine_sums(ever: Sequence[HasStore]) -> list[Metric]:
    """What all targets tell together: those that are down or gone keep what they counted."""
    return [_waits(ever), *_transfers(ever)]


def _counters(fresh: _Fresh) -> list[Metric]:
    families = {name: counter(name) for name in (*_BY_MODEL.values(), *_BY_TARGET.values())}
    for target, store in fresh:
        for signal, name in _BY_MODEL.items():
            for (model,), count in store.totals_by(signal, "model").items():
                families[name].add_metric([target, model], count)
        for signal, name in _BY_TARGET.items():
            total = store.total(signal)
            if total is not None:
                families[name].add_metric([target], total)
    return list(families.values())


def _stores(fresh: _Fresh) -> list[Metric]:
    """Lookups at KV stores. A family of their own: engines have the same hits in theirs, by tier, and the store's
    queries are but those that the engines' caches missed (LMCache/LMCache#4962)."""
    queries, hits = counter("kv_store_query_tokens"), counter("kv_store_hit_tokens")
    for target, store in fresh:
        if store.system.role == "cache":
            for (model,), tokens in store.totals_by("prefix_query_tokens", "model").items():
                queries.add_metric([target, model], tokens)
            for (model, tier), tokens in store.totals_by("prefix_hit_tokens", "model", "tier").items():
                hits.add_metric([target, model, tier], tokens)
    return [queries, hits]


def _tells_lifetimes(target: Target) -> bool:
    counts = target.kv_events.counts() if target.kv_events else None
    return counts is not None and bool(counts.lifetimes)


def _block_times(fresh: _Fresh, by_events: AbstractSet[str]) -> list[Metric]:
    """KV events tell the lifetimes of all blocks, `by_events` whose; an engine's own page those of a sample."""
    families = {name: histogram(name) for name in _BLOCK_TIMES.values()}
    for target, store in fresh:
        for signal, name in _BLOCK_TIMES.items():
            if signal == "kv_block_lifetime" and target in by_events:
                continue
            for merged in merged_over([store], signal).values():
                add_histogram(families[name], [target], merged.histogram)
    return list(families.values())


def _waits(targets: Iterable[HasStore]) -> Metric:
    family = histogram("prefill_wait_seconds")
    for merged in merged_over(stores(targets, "engine"), "queue_seconds").values():
        add_histogram(family, [], merged.histogram)
    return family


def _transfers(targets: Sequence[HasStore]) -> list[Metric]:
    seconds, moved, failed = (histogram("kv_transfer_seconds"), counter("kv_transfer_bytes"),
                              counter("kv_transfer_failures"))  # fmt: skip
    known = [target.store for target in targets if target.store]
    for labels, merged in merged_over(known, "kv_transfer", "source", "destination").items():
        add_histogram(seconds, [label or _UNKNOWN for label in labels], merged.histogram)
    for signal, family in (("kv_transfer_bytes", moved), ("kv_transfer_failures", failed)):
        for labels, count in _summed(known, signal, "source", "destination").items():
            family.add_metric([label or _UNKNOWN for label in labels], count)
    return [seconds, moved, failed]


def _summed(known: Iterable[SignalStore], signal: str, *labels: str) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for store in known:
        for values, count in store.totals_by(signal, *labels).items():
            sums[values] += count
    return sums


def _moe_alignment(fresh: _Fresh) -> Metric:
    """Mean over the window's passes of the experts' mean load over the busiest one's."""
    family = gauge("moe_expert_alignment_ratio")
    for target, store in fresh:
        balance, passes = store.grown("moe_balance_sum"), store.grown("moe_balance_count")
        if balance is not None and passes:
            family.add_metric([target], balance / passes)
    return family


def _gpus(fresh: _Fresh) -> list[Metric]:
    """By GPU of a node; of one that is cut into instances the largest value, as they repeat the whole GPU's."""
    gauges = {name: gauge(name) for name in _GPU_GAUGES}
    energy = counter("gpu_energy_joules")
    for target, store in fresh:
        for name, family in gauges.items():
            _add_largest(family, target, store.gauges_of(name))
        joules: dict[str, float] = {}
        for (gpu, _), total in store.totals_by("gpu_energy_joules", "gpu", "instance").items():
            joules[gpu] = max(total, joules.get(gpu, 0.0))
        for gpu, total in joules.items():
            energy.add_metric([target, gpu], total)
    return [*gauges.values(), energy]


def _add_largest(family: GaugeMetricFamily, target: str, values: Mapping[tuple[tuple[str, str], ...], float]) -> None:
    largest: dict[str, float] = {}
    for labels, value in values.items():
        gpu = dict(labels).get("gpu", "")
        largest[gpu] = max(value, largest.get(gpu, value))
    for gpu, value in largest.items():
        family.add_metric([target, gpu], value)
