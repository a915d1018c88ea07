"""The exporter's own metrics page: every exported name is named here, and nowhere else.

Families without a sample are left out: unknown is absent, never 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from exporters.fleet import CACHE_CLASSES, UNCLASSIFIED, FleetNumbers, counted_by, derive_fleet, merged_by
from exporters.histogram import Histogram
from exporters.quality import MIN_OBSERVATIONS
from exporters.target import Target

_UNKNOWN = "unknown"


class FleetCollector(Collector):
    """Metric families of the current state of all targets."""

    def __init__(self, targets: Sequence[Target], clock: Callable[[], float] = time.monotonic) -> None:
        self._targets = targets
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        targets = self._targets
        fleet = derive_fleet(targets)
        families = [
            *_prefix_tokens(targets, fleet),
            *_router_families(targets),
            *_hotspots(fleet),
            *_ttft_deltas(fleet),
            *_kv_events(targets),
            *_engine_gauges(targets),
            *_quality(targets, self._clock()),
            *_target_health(targets, self._clock()),
        ]
        yield from (family for family in families if family.samples)


def render(targets: Sequence[Target], accept: str = "") -> tuple[bytes, str]:
    """The page and its content type: OpenMetrics for who accepts it, else Prometheus text."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(targets))
    ProcessCollector(registry=registry)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def _prefix_tokens(targets: Sequence[Target], fleet: FleetNumbers) -> list[Metric]:
    hits = _counter(
        "prefix_hit_tokens", "Prompt tokens taken from a prefix cache, by the tier that held them.",
        "target", "model", "tier",
    )  # fmt: skip
    queries = _counter("prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", "target", "model")
    ratio = _gauge(
        "prefix_hit_ratio",
        "Share of the window's prompt tokens that were reused: from tokens really computed where an engine tells "
        "(source=computed), else hits over queries (source=cache).", "target", "source",
    )  # fmt: skip
    raw = _gauge("prefix_cache_hit_ratio", "Hits over queries in the window, as the engine's counters say.", "target")
    engines = [target for target in targets if target.system and target.system.role == "engine"]
    for target in engines:
        store, numbers = target.store, target.numbers
        if store is None or numbers is None:
            continue
        for (model, tier), tokens in store.totals_by("prefix_hit_tokens", "model", "tier").items():
            hits.add_metric([target.name, model, tier], tokens)
        for (model,), tokens in store.totals_by("prefix_query_tokens", "model").items():
            queries.add_metric([target.name, model], tokens)
        if numbers.hit_ratio is not None:
            ratio.add_metric([target.name, numbers.hit_ratio_source], numbers.hit_ratio)
        if numbers.raw_hit_ratio is not None:
            raw.add_metric([target.name], numbers.raw_hit_ratio)
    if not engines:  # the same tokens as the engines' own counters, so never both
        for (worker,), tokens in counted_by(targets, "router_delivered_hit_tokens", "worker").items():
            hits.add_metric([worker or _UNKNOWN, "", _UNKNOWN], tokens)
        for (worker,), tokens in counted_by(targets, "router_prompt_tokens", "worker").items():
            queries.add_metric([worker or _UNKNOWN, ""], tokens)
    whole = _gauge("fleet_prefix_hit_ratio", "Hit tokens over queried tokens of all engines, in the window.")
    _add_known(whole, [], fleet.hit_ratio)
    return [hits, queries, ratio, raw, whole]


def _router_families(targets: Sequence[Target]) -> list[Metric]:
    hit_tokens = _histogram("request_hit_tokens", "Cached prompt tokens of a request, as its engine reports them.")
    ttft = _histogram("ttft_seconds", "Time to first token by how much of the prompt was cached.", "cache")
    decision = _histogram("router_decision_seconds", "Time a router takes to place a request, by step.", "step")
    requests = _counter("requests", "Requests by class and outcome.", "class", "outcome")
    goodput = _counter("goodput_requests", "Requests that met every objective of their class.", "class")
    violations = _counter("isolation_violations", "Requests that certainly reused another tenant's cache.", "kind")
    for merged in merged_by(targets, "request_hit_tokens").values():
        _add_histogram(hit_tokens, [], merged.histogram)
    for cache, merged in merged_by(targets, "ttft_by_cache", "cache").items():
        if cache in CACHE_CLASSES:
            _add_histogram(ttft, [cache], merged.histogram)
    for step, merged in merged_by(targets, "router_decision", "step").items():
        _add_histogram(decision, [step], merged.histogram)
    for (request_class, outcome), count in counted_by(targets, "routed_requests", "class", "outcome").items():
        if outcome:  # a router that only counts placements doesn't know how they ended
            requests.add_metric([request_class or UNCLASSIFIED, outcome], count)
    for (request_class,), count in counted_by(targets, "goodput_requests", "class").items():
        goodput.add_metric([request_class or UNCLASSIFIED], count)
    for (kind,), count in counted_by(targets, "isolation_violations", "kind").items():
        violations.add_metric([kind], count)
    return [hit_tokens, ttft, decision, requests, goodput, violations]


def _hotspots(fleet: FleetNumbers) -> list[Metric]:
    overloaded = _gauge("hotspot_overloaded_ratio", "Share of workers with more than 1.5 times the fleet's mean load.")
    uneven = _gauge("hotspot_max_over_mean", "The busiest worker's load over the fleet's mean load.")
    least = _gauge("hotspot_busiest_over_least", "The busiest worker's load over the least busy one's.")
    share = _gauge("hotspot_top_share_ratio", "The busiest worker's share of the window's requests.")
    loads = _gauge("worker_load_requests", "Requests running and waiting, mean of the window's samples.", "worker")
    if fleet.hotspot:
        overloaded.add_metric([], fleet.hotspot.overloaded_ratio)
        uneven.add_metric([], fleet.hotspot.max_over_mean)
        least.add_metric([], fleet.hotspot.busiest_over_least)
    _add_known(share, [], fleet.top_share)
    for worker, load in fleet.loads.items():
        loads.add_metric([worker], load)
    return [overloaded, uneven, least, share, loads]


def _ttft_deltas(fleet: FleetNumbers) -> list[Metric]:
    delta = _gauge(
        "ttft_miss_minus_hit_seconds",
        f"TTFT quantile of misses minus that of hits, in the window; at least {MIN_OBSERVATIONS} of each.", "quantile",
    )  # fmt: skip
    samples = _gauge("ttft_window_requests", "First tokens in the window that the delta is taken from.", "cache")
    if fleet.ttft_delta:
        for quantile, seconds in fleet.ttft_delta.seconds.items():
            delta.add_metric([repr(quantile)], seconds)
        samples.add_metric(["hit"], fleet.ttft_delta.hits)
        samples.add_metric(["miss"], fleet.ttft_delta.misses)
    return [delta, samples]


def _kv_events(targets: Sequence[Target]) -> list[Metric]:
    evicted = _counter("kv_blocks_evicted", "KV blocks evicted, counted from KV events.", "target")
    regretted = _counter(
        "kv_blocks_regretted", "KV blocks that were stored again within 5 minutes of their eviction.", "target"
    )
    resident = _gauge("kv_blocks_resident", "KV blocks in the prefix cache, by KV events.", "target")
    lag = _gauge("kv_events_lag_seconds", "From the engine's clock at the last event batch to its arrival.", "target")
    for target in targets:
        counts = target.kv_events.counts() if target.kv_events else None
        if counts is None:
            continue
        evicted.add_metric([target.name], counts.evicted_blocks)
        regretted.add_metric([target.name], counts.regretted_blocks)
        resident.add_metric([target.name], counts.resident_blocks)
        _add_known(lag, [target.name], counts.lag_seconds)
    return [evicted, regretted, resident, lag]


def _engine_gauges(targets: Sequence[Target]) -> list[Metric]:
    running = _gauge("requests_running", "Requests in the engine's batch.", "target")
    waiting = _gauge("requests_waiting", "Requests queued in the target.", "target")
    usage = _gauge("kv_usage_ratio", "KV cache in use, 0 to 1, the fullest engine; sampled at the scrape.", "target")
    mean = _gauge("kv_usage_mean_ratio", "KV cache in use, 0 to 1, mean of the target's engines.", "target")
    capacity = _gauge("kv_capacity_blocks", "KV blocks that the target can hold.", "target")
    latency = _gauge(
        "engine_latency_quantile_seconds", "Quantiles of the latencies that the target itself times, in the window.",
        "target", "latency", "quantile",
    )  # fmt: skip
    for target in targets:
        numbers = target.numbers
        if numbers is None:
            continue
        _add_known(running, [target.name], numbers.running)
        _add_known(waiting, [target.name], numbers.waiting)
        _add_known(usage, [target.name], numbers.kv_usage_max_ratio)
        _add_known(mean, [target.name], numbers.kv_usage_mean_ratio)
        _add_known(capacity, [target.name], numbers.kv_capacity_blocks)
        for (name, quantile), seconds in numbers.latency_seconds.items():
            latency.add_metric([target.name, name, repr(quantile)], seconds)
    return [running, waiting, usage, mean, capacity, latency]


def _quality(targets: Sequence[Target], now_seconds: float) -> list[Metric]:
    quality = _gauge(
        "data_quality", "1 when this flag warns that the target's numbers may mislead, 0 when it was checked.",
        "target", "flag",
    )  # fmt: skip
    for target in targets:
        for flag, raised in target.flags(now_seconds).items():
            quality.add_metric([target.name, flag], float(raised))
    return [quality]


def _target_health(targets: Sequence[Target], now_seconds: float) -> list[Metric]:
    up = _gauge("target_up", "1 when the last scrape brought metrics of a known system.", "target", "system", "version")
    ready = _gauge("window_ready", "1 when rates and ratios over the window are known.", "target")
    window = _gauge("window_seconds", "How long the target's window is now.", "target")
    scrapes = _counter("scrapes", "Scrapes that ended, well or not.", "target")
    failures = _counter("scrape_failures", "Scrapes that failed, by reason.", "target", "reason")
    duration = _gauge("scrape_duration_seconds", "How long the last scrape took.", "target")
    size = _gauge("scrape_body_bytes", "Size of the last metrics page.", "target")
    samples = _gauge("scrape_samples", "Samples taken from the last metrics page.", "target")
    age = _gauge("scrape_age_seconds", "Time since the last good scrape.", "target")
    for target in targets:
        health, numbers = target.health, target.numbers
        up.add_metric([target.name, target.system.system if target.system else "", target.version], float(target.up))
        window_seconds = numbers.window_seconds if numbers else None
        ready.add_metric([target.name], float(window_seconds is not None))
        _add_known(window, [target.name], window_seconds)
        scrapes.add_metric([target.name], health.scrapes)
        for reason, count in health.failures.items():
            failures.add_metric([target.name, reason], count)
        _add_known(duration, [target.name], health.last_seconds)
        _add_known(size, [target.name], health.body_bytes)
        _add_known(samples, [target.name], health.samples)
        if health.succeeded_at_seconds is not None:
            age.add_metric([target.name], now_seconds - health.succeeded_at_seconds)
    return [up, ready, window, scrapes, failures, duration, size, samples, age]


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"prefixwatch_{name}", text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prefixwatch_{name}", text, labels=labels)


def _histogram(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"prefixwatch_{name}", text, labels=labels)


def _add_known(family: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)


def _add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    buckets = [
        ("+Inf" if math.isinf(bound) else repr(bound), count)
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
    ]
    family.add_metric(labels, buckets, histogram.total)
