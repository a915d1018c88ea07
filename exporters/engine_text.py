"""Families of what engines, caches and GPUs tell of themselves: waits, transfers, evictions, speculation, power.

Scraped numbers only; each is in its family's unit already (`exporters.catalogue`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

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

_BY_TARGET = {"evicted_tokens": "kv_evicted_tokens", "evicted_objects": "kv_evicted_objects"}
"""Signal → counter family by target."""

_BLOCK_TIMES = {
    "kv_block_lifetime": "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict": "kv_block_idle_before_evict_seconds",
}
"""Signal → histogram family by target."""

_GPU_GAUGES = ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_power_watts")


def engine_families(targets: Sequence[Target], gone: Sequence[HasStore] = ()) -> list[Metric]:
    """All of them; a family that no target gives has no sample. Sums over the fleet keep what `gone` ones counted."""
    ever: list[HasStore] = [*targets, *gone]
    return [
        *_counters(targets),
        *_block_times(targets),
        _waits(ever),
        *_transfers(ever),
        _moe_alignment(targets),
        *_gpus(targets),
    ]


def _counters(targets: Iterable[Target]) -> list[Metric]:
    families = {name: counter(name) for name in (*_BY_MODEL.values(), *_BY_TARGET.values())}
    for target in targets:
        store = target.store
        if store is None:
            continue
        for signal, name in _BY_MODEL.items():
            for (model,), count in store.totals_by(signal, "model").items():
                families[name].add_metric([target.name, model], count)
        for signal, name in _BY_TARGET.items():
            total = store.total(signal)
            if total is not None:
                families[name].add_metric([target.name], total)
    return list(families.values())


def _block_times(targets: Iterable[Target]) -> list[Metric]:
    families = {name: histogram(name) for name in _BLOCK_TIMES.values()}
    for target in targets:
        for signal, name in _BLOCK_TIMES.items():
            for merged in merged_over([target.store] if target.store else [], signal).values():
                add_histogram(families[name], [target.name], merged.histogram)
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


def _moe_alignment(targets: Iterable[Target]) -> Metric:
    """Mean over the window's passes of the experts' mean load over the busiest one's."""
    family = gauge("moe_expert_alignment_ratio")
    for target in targets:
        if not target.up or target.store is None:
            continue
        balance, passes = target.store.grown("moe_balance_sum"), target.store.grown("moe_balance_count")
        if balance is not None and passes:
            family.add_metric([target.name], balance / passes)
    return family


def _gpus(targets: Iterable[Target]) -> list[Metric]:
    """By GPU of a node; of one that is cut into instances the largest value, as they repeat the whole GPU's."""
    gauges = {name: gauge(name) for name in _GPU_GAUGES}
    energy = counter("gpu_energy_joules")
    for target in targets:
        if target.store is None or target.store.system.role != "gpu":
            continue
        if target.up:
            for name, family in gauges.items():
                _add_largest(family, target.name, target.store.gauges_of(name))
        joules: dict[str, float] = {}
        for (gpu, _), total in target.store.totals_by("gpu_energy_joules", "gpu", "instance").items():
            joules[gpu] = max(total, joules.get(gpu, 0.0))
        for gpu, total in joules.items():
            energy.add_metric([target.name, gpu], total)
    return [*gauges.values(), energy]


def _add_largest(family: GaugeMetricFamily, target: str, values: Mapping[tuple[tuple[str, str], ...], float]) -> None:
    largest: dict[str, float] = {}
    for labels, value in values.items():
        gpu = dict(labels).get("gpu", "")
        largest[gpu] = max(value, largest.get(gpu, value))
    for gpu, value in largest.items():
        family.add_metric([target, gpu], value)
