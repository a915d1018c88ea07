"""Families that engines, caches and GPUs report themselves: waits, transfers, evictions, speculation, power.

Scraped numbers only; each is in its family's unit already (`exporters.catalogue.model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from prometheus_client.core import Metric

from prefixwatch.exporters.fleet.derivation import (
    HasStore,
    merged_by_peers,
    merged_over,
    stores,
    summed,
    summed_by_peers,
)
from prefixwatch.exporters.metrics_page.families import IDENTITY
from prefixwatch.exporters.metrics_page.rows import histograms, rows
from prefixwatch.exporters.scraping.book import LabelSet
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

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

_LATENCIES = {
    "ttft_seconds": "engine_ttft_seconds",
    "inter_token_seconds": "engine_inter_token_seconds",
    "tpot_seconds": "engine_tpot_seconds",
    "prefill_seconds": "engine_prefill_seconds",
    "e2e_seconds": "engine_e2e_seconds",
    "queue_seconds": "engine_queue_seconds",
}
"""Signal → histogram family of all engines by identity."""

_LENGTHS = {
    "request_prompt_tokens": "engine_request_prompt_tokens",
    "request_computed_tokens": "engine_request_computed_tokens",
    "request_generation_tokens": "engine_request_generation_tokens",
}
"""Signal → histogram family of all engines by identity."""

_TRAFFIC = {
    "prompt_tokens": "engine_prompt_tokens",
    "generation_tokens": "engine_generation_tokens",
    "refused_requests": "engine_refused_requests",
}
"""Signal → counter family of all engines by identity."""

_BLOCK_TIMES = {
    "kv_block_lifetime": "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict": "kv_block_idle_before_evict_seconds",
}
"""Signal → histogram family by target."""

_Fresh = Sequence[tuple[str, SignalStore]]
"""Targets that are up, by name."""

_GPU_GAUGES = ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_power_watts")


def engine_families(targets: Sequence[Target]) -> list[Metric]:
    """What each target reports. A target that is down has no series: old numbers would pass for current ones."""
    fresh = [(target.name, target.store) for target in targets if target.up and target.store is not None]
    return [
        *_counters(fresh),
        *_stores(fresh),
        *_block_times(fresh, {target.name for target in targets if _has_lifetimes(target)}),
        _moe_alignment(fresh),
        *_gpus([(name, store) for name, store in fresh if store.system.role == "gpu"]),
    ]


def engine_starts(targets: Iterable[Target]) -> Metric:
    """When the last engine of each identity started, of those that are up and whose page has its process' start."""
    latest: dict[tuple[str, ...], float] = {}
    for target in targets:
        started = target.store.started_unix_seconds if target.up and target.store else None
        if started and target.system is not None and target.system.role == "engine":
            identity = target.identity
            labels = tuple(identity.get(name, "") for name in IDENTITY)
            latest[labels] = max(started, latest.get(labels, started))
    return rows("engine_started_seconds", latest.items())


def engine_sums(ever: Sequence[HasStore]) -> list[Metric]:
    """Sums over all targets: those that are down or gone keep what they counted."""
    return [*_waits(ever), *_transfers(ever), *_by_peers(ever)]


def _by_peers(ever: Sequence[HasStore]) -> Iterator[Metric]:
    """What engines measure themselves, summed over those of one model, role and place.

    Buckets add up exactly, which quantiles don't. Without a router's or gateway's records these are the figures of a
    fleet's latency and traffic.
    """
    engines = stores(ever, "engine")
    for signal, name in (_LATENCIES | _LENGTHS).items():
        yield histograms(name, merged_by_peers(engines, signal))
    for signal, name in _TRAFFIC.items():
        yield rows(name, summed_by_peers(engines, signal))
    yield rows("engine_finished_requests", summed_by_peers(engines, "finished_requests", "reason"))


def _counters(fresh: _Fresh) -> Iterator[Metric]:
    for signal, name in _BY_MODEL.items():
        yield rows(
            name,
            (
                ([target, model], count)
                for target, store in fresh
                for (model,), count in store.totals_by(signal, "model").items()
            ),
        )
    for signal, name in _BY_TARGET.items():
        yield rows(name, (([target], store.total(signal)) for target, store in fresh))


def _stores(fresh: _Fresh) -> list[Metric]:
    """Lookups in KV stores. They have families of their own: engines count the same hits by tier, and a store is only
    asked for what the engines' own caches missed (LMCache/LMCache#4962)."""
    caches = [(target, store) for target, store in fresh if store.system.role == "cache"]
    return [
        rows(
            "kv_store_query_tokens",
            (
                ([target, model], tokens)
                for target, store in caches
                for (model,), tokens in store.totals_by("prefix_query_tokens", "model").items()
            ),
        ),
        rows(
            "kv_store_hit_tokens",
            (
                ([target, model, tier], tokens)
                for target, store in caches
                for (model, tier), tokens in store.totals_by("prefix_hit_tokens", "model", "tier").items()
            ),
        ),
    ]


def _has_lifetimes(target: Target) -> bool:
    counts = target.kv_events.counts() if target.kv_events else None
    return counts is not None and bool(counts.lifetimes)


def _block_times(fresh: _Fresh, by_events: AbstractSet[str]) -> Iterator[Metric]:
    """KV events give the lifetimes of all blocks of the targets in `by_events`; an engine's page those of a sample."""
    for signal, name in _BLOCK_TIMES.items():
        yield histograms(
            name,
            (
                ([target], merged)
                for target, store in fresh
                if not (signal == "kv_block_lifetime" and target in by_events)
                for merged in merged_over([store], signal).values()
            ),
        )


def _waits(targets: Sequence[HasStore]) -> Iterator[Metric]:
    for name, role, signal in (
        ("prefill_wait_seconds", "engine", "queue_seconds"),
        ("async_prefill_wait_seconds", "router", "async_prefill_wait_seconds"),
    ):
        waits = merged_over(stores(targets, role), signal)
        yield histograms(name, (([], merged) for merged in waits.values()))


def _transfers(targets: Sequence[HasStore]) -> list[Metric]:
    known = [target.store for target in targets if target.store]
    ends = ("source", "destination")
    return [
        histograms(
            "kv_transfer_seconds",
            (
                ([label or _UNKNOWN for label in labels], merged)
                for labels, merged in merged_over(known, "kv_transfer", *ends).items()
            ),
        ),
        *(
            rows(
                name,
                (
                    ([label or _UNKNOWN for label in labels], count)
                    for labels, count in summed(known, name, *ends).items()
                ),
            )
            for name in ("kv_transfer_bytes", "kv_transfer_failures")
        ),
    ]


def _moe_alignment(fresh: _Fresh) -> Metric:
    """Mean over the window's passes of the experts' mean load over the busiest one's."""
    return rows(
        "moe_expert_alignment_ratio",
        (
            ([target], balance / passes)
            for target, store in fresh
            if (balance := store.grown("moe_balance_sum")) is not None and (passes := store.grown("moe_balance_count"))
        ),
    )


def _gpus(fresh: _Fresh) -> Iterator[Metric]:
    """By GPU of a node. A GPU that is cut into instances repeats the whole GPU's value for each: the largest counts."""
    for name in _GPU_GAUGES:
        yield rows(name, _largest((target, store.gauges_of(name)) for target, store in fresh))
    joules: Iterator[tuple[str, dict[LabelSet, float]]] = (
        (target, {(("gpu", gpu), ("instance", instance)): total for (gpu, instance), total in counted.items()})
        for target, store in fresh
        if (counted := store.totals_by("gpu_energy_joules", "gpu", "instance"))
    )
    yield rows("gpu_energy_joules", _largest(joules))


def _largest(given: Iterable[tuple[str, Mapping[LabelSet, float]]]) -> Iterator[tuple[tuple[str, str], float]]:
    for target, values in given:
        largest: dict[str, float] = {}
        for labels, value in values.items():
            gpu = dict(labels).get("gpu", "")
            largest[gpu] = max(value, largest.get(gpu, value))
        for gpu, value in largest.items():
            yield (target, gpu), value
