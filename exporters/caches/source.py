"""What caches are worth and how near reuse is: derived from several inputs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.caches.believed_blocks import router_believed_blocks
from prefixwatch.exporters.caches.cache_size import Capacity
from prefixwatch.exporters.caches.in_flight import in_flight_leaks, router_in_flight
from prefixwatch.exporters.caches.isolation import (
    NO_EVENTS,
    NO_SALTS,
    IsolationCost,
    isolation_cost,
    isolation_families,
)
from prefixwatch.exporters.caches.value import break_even_tokens, effective_cache_value_tokens
from prefixwatch.exporters.caches.worker_targets import WorkerTargets
from prefixwatch.exporters.fleet.derivation import merged_over
from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.probes.prefill_baseline import PrefillBaselines
from prefixwatch.exporters.scraping.target import Target

_UNKNOWN = "unknown"

Ratios = Callable[[float], Mapping[str, float]]
Curves = Callable[[float, Capacity], Mapping[tuple[str, str], float]]


class CacheSource:
    """The exporter's derived cache families.

    `targets` is the exporter's list; `ratios` gives the locality that request records tell, by dimension; `curves` the
    hit ratios at other cache sizes, by model and size;
    `kv_bytes_per_token` is the model's, of all layers and heads, None where nobody said.
    """

    name = "cache"

    def __init__(
        self,
        targets: Callable[[], Sequence[Target]],
        ratios: Ratios,
        curves: Curves,
        baseline: PrefillBaselines,
        *,
        interval_seconds: float,
        kv_bytes_per_token: float | None = None,
    ) -> None:
        self._targets = targets
        self._ratios = ratios
        self._curves = curves
        self._baseline = baseline
        self.interval_seconds = interval_seconds
        """Between two scrapes; a reload changes it."""
        self._kv_bytes_per_token = kv_bytes_per_token

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        targets = self._targets()
        for name, values in (
            ("effective_cache_value_tokens", self._values(targets)),
            ("router_in_flight_requests", router_in_flight(targets)),
            ("router_believed_blocks", router_believed_blocks(targets)),
            ("in_flight_leak_requests", in_flight_leaks(targets, self.interval_seconds)),
            ("locality_ratio", self._ratios(now_seconds)),
        ):
            family = rows(name)
            for label, value in values.items():
                family.add_metric([label], value)
            yield family
        even = rows("kv_transfer_break_even_tokens")
        for (source, destination), tokens in self._break_even(targets).items():
            even.add_metric([source or _UNKNOWN, destination or _UNKNOWN], tokens)
        yield even
        sizes = rows("cache_size_hit_ratio")
        for labels, ratio in self._sizes(targets, now_seconds).items():
            sizes.add_metric(labels, ratio)
        yield sizes
        costs = self._isolation(targets)
        yield from isolation_families((name, cost) for name, cost in costs.items() if cost is not None)

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        targets = self._targets()
        locality = self._ratios(now_seconds)
        found: dict[str, Any] = {
            "effective_cache_value_tokens": self._values(targets),
            "in_flight_leak_requests": in_flight_leaks(targets, self.interval_seconds),
            "locality_ratio": locality,
            "warm_pool_utilization_ratio": self._warm_pools(targets),
            "cache_size_hit_ratio": [
                {"model": model, "size": float(size), "ratio": ratio}
                for (model, size), ratio in self._sizes(targets, now_seconds).items()
            ],
            "kv_transfer_break_even_tokens": [
                {"source": source or _UNKNOWN, "destination": destination or _UNKNOWN, "tokens": tokens}
                for (source, destination), tokens in self._break_even(targets).items()
            ],
        }
        costs = self._isolation(targets)
        found["isolation"] = {name: asdict(cost) for name, cost in costs.items() if cost is not None}
        known = {name: value for name, value in found.items() if value not in (None, {}, [])}
        absent = {name: why for name, why in self._why_absent().items() if name not in known}
        absent |= {f"isolation.{name}": NO_SALTS for name, cost in costs.items() if cost is None}
        absent |= {} if costs else {"isolation": NO_EVENTS}
        absent |= {
            f"locality_ratio.{dimension}": why
            for dimension, why in _WHY_NO_LOCALITY.items()
            if dimension not in locality
        }
        return known | {"absent": absent}

    def _values(self, targets: Sequence[Target]) -> dict[str, float]:
        found = {}
        for target in targets:
            counts = target.kv_events.counts() if target.kv_events else None
            if counts is not None and target.numbers is not None:
                ratio = target.numbers.hit_ratio
                value = effective_cache_value_tokens(counts.resident_blocks, counts.block_size_tokens, ratio)
                if value is not None:
                    found[target.name] = value
        return found

    def _isolation(self, targets: Sequence[Target]) -> dict[str, IsolationCost | None]:
        """Of each target whose KV events are heard."""
        heard = ((target.name, target.kv_events.counts()) for target in targets if target.kv_events)
        return {name: isolation_cost(counts) for name, counts in heard if counts is not None}

    def _warm_pools(self, targets: Sequence[Target]) -> dict[str, float]:
        return {
            target.name: value
            for target in targets
            if target.store is not None
            for value in target.store.gauges_of("warm_pool_utilization_ratio").values()
        }

    def _sizes(self, targets: Sequence[Target], now_seconds: float) -> Mapping[tuple[str, str], float]:
        workers = WorkerTargets(targets)

        def capacity(worker: str) -> float | None:
            target = workers.find(worker)
            blocks = target.numbers.kv_capacity_blocks if target and target.numbers else None
            size = target.numbers.block_size_tokens if target and target.numbers else None
            return blocks * size if blocks and size else None

        return self._curves(now_seconds, capacity)

    def _break_even(self, targets: Sequence[Target]) -> dict[tuple[str, ...], float]:
        line = self._baseline.line()
        if line is None or self._kv_bytes_per_token is None:
            return {}
        known = [target.store for target in targets if target.store is not None]
        found = {}
        for labels, merged in merged_over(known, "kv_transfer", "source", "destination").items():
            moved = sum(
                store.totals_by("kv_transfer_bytes", "source", "destination").get(labels, 0.0) for store in known
            )
            tokens = break_even_tokens(merged, moved, self._kv_bytes_per_token, line)
            if tokens is not None:
                found[labels] = tokens
        return found

    def _why_absent(self) -> Mapping[str, str]:
        no_line = "no baseline of cold prefills: set up probes of at least two prompt lengths"
        no_size = "set kv_bytes_per_token; engines do not report it"
        return {
            "effective_cache_value_tokens": "needs KV events, and a hit ratio in the window, of the same target",
            "in_flight_leak_requests": "needs a router that counts its requests in flight by worker, and its engines",
            "warm_pool_utilization_ratio": "no router reserves workers for misses: router.degradation is off, or its "
            "chain isn't at the warm pool",
            "cache_size_hit_ratio": "needs request records of our router, engines that report their cache's size, and "
            "as many prompt tokens as it holds",
            "kv_transfer_break_even_tokens": no_size
            if self._kv_bytes_per_token is None
            else no_line
            if self._baseline.line() is None
            else "nothing was moved, or computing is always quicker",
        }


_WHY_NO_LOCALITY = {
    "temporal": "no request in the window reused what its session, or its prefix, had before, by request records",
    "spatial": "no request record says how its prompt opens and what it reused: the router remembers no prompts",
    "identity": "no first request of a session names its user (the router's tenants.user_header) and reused something",
    "topological": "no request record says which worker held its prefix",
}
