"""The exporter's own metrics page. Names, labels and help texts are in `exporters.families`.

Families without a sample are left out: unknown is absent, never 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric

from exporters.caches.kv_text import kv_event_families
from exporters.engine_text import engine_families, engine_sums
from exporters.families import counter, gauge, histogram, quantiles
from exporters.fleet import (
    CACHE_CLASSES,
    UNCLASSIFIED,
    FleetNumbers,
    HasStore,
    coarsened,
    counted_by,
    derive_fleet,
    merged_by,
    predicted_and_delivered,
    router_tokens,
)
from exporters.histogram_text import add_histogram
from exporters.page_text import PageText
from exporters.scraping.quality import missing_signals
from exporters.scraping.target import Target
from exporters.source import Source

_UNKNOWN = "unknown"
_TARGETS_AT_A_TIME = 50


class FleetPage:
    """Metric families of the current state of all targets, and of the other sources, a part at a time.

    A family that several can give is taken from the first that has samples, sources in order of trust before the
    scraped pages: the same requests must not be counted twice.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        sources: Sequence[Source] = (),
        clock: Callable[[], float] = time.monotonic,
        gone: Sequence[HasStore] = (),
    ) -> None:
        """`gone` stands for targets that are no more: sums over the fleet keep what they counted."""
        self._targets = tuple(targets)
        self._sources = tuple(sources)
        self._gone = gone
        self._clock = clock

    def parts(self) -> Iterator[list[Metric]]:
        """Lists of families, made when they are asked for and of a few targets at a time, so that a page of many is
        never held whole as objects, ten times the size of its text; nothing is half done between two of them.

        A family may be in several lists, each time with other samples.
        """
        now = self._clock()
        written: set[str] = set()
        for source in self._sources:
            fresh = _fresh(source.metrics(now), written)
            written.update(family.name for family in fresh)
            yield fresh
        for families in _scraped(self._targets, self._gone, now):
            yield _fresh(families, written)
        yield list(ProcessCollector(registry=None).collect())


def _fresh(families: Iterable[Metric], written: Set[str]) -> list[Metric]:
    return [family for family in families if family.samples and family.name not in written]


def _scraped(targets: Sequence[Target], gone: Sequence[HasStore], now_seconds: float) -> Iterator[list[Metric]]:
    ever: list[HasStore] = [*targets, *gone]
    fleet = derive_fleet(targets)
    yield _prefix_tokens(targets, fleet)
    yield _router_families(ever)
    yield [*_router_state(targets), *_hotspots(fleet), *_ttft_deltas(fleet)]
    yield list(
        kv_event_families(
            (target.name, counts) for target in targets if target.kv_events and (counts := target.kv_events.counts())
        )
    )
    yield engine_sums(ever)
    mixed = frozenset().union(*(names for _, names in coarsened(targets).values()))
    for first in range(0, len(targets), _TARGETS_AT_A_TIME):
        few = targets[first : first + _TARGETS_AT_A_TIME]
        yield [*_engine_gauges(few), *engine_families(few)]
        yield [*_quality(few, mixed, now_seconds), *_target_health(few, now_seconds)]


def render(
    targets: Sequence[Target], accept: str = "", sources: Sequence[Source] = (), gone: Sequence[HasStore] = ()
) -> tuple[bytes, str]:
    """The page and its content type: OpenMetrics for who accepts it, else Prometheus text."""
    text = PageText(accept)
    for part in FleetPage(targets, sources, gone=gone).parts():
        text.add(part)
    return b"".join(text.pieces()), text.content_type


def _prefix_tokens(targets: Sequence[Target], fleet: FleetNumbers) -> list[Metric]:
    hits = counter("prefix_hit_tokens")
    queries = counter("prefix_query_tokens")
    ratio = gauge("prefix_hit_ratio")
    raw = gauge("prefix_cache_hit_ratio")
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
    for (worker, model), tokens in router_tokens(targets, "router_delivered_hit_tokens").items():
        hits.add_metric([worker, model, _UNKNOWN], tokens)
    for (worker, model), tokens in router_tokens(targets, "router_prompt_tokens").items():
        queries.add_metric([worker, model], tokens)
    whole = gauge("fleet_prefix_hit_ratio")
    _add_known(whole, [], fleet.hit_ratio)
    return [hits, queries, ratio, raw, whole]


def _router_families(targets: Sequence[HasStore]) -> list[Metric]:
    hit_tokens = histogram("request_hit_tokens")
    ttft = histogram("ttft_seconds")
    decision = histogram("router_decision_seconds")
    requests = counter("requests")
    goodput = counter("goodput_requests")
    violations = counter("isolation_violations")
    for merged in merged_by(targets, "request_hit_tokens").values():
        add_histogram(hit_tokens, [], merged.histogram)
    for cache, merged in merged_by(targets, "ttft_by_cache", "cache").items():
        if cache in CACHE_CLASSES:
            add_histogram(ttft, [cache], merged.histogram)
    for step, merged in merged_by(targets, "router_decision", "step").items():
        add_histogram(decision, [step], merged.histogram)
    for (request_class, outcome), count in counted_by(targets, "routed_requests", "class", "outcome").items():
        if outcome:  # a router that only counts placements doesn't know how they ended
            requests.add_metric([request_class or UNCLASSIFIED, outcome], count)
    for (request_class,), count in counted_by(targets, "goodput_requests", "class").items():
        goodput.add_metric([request_class or UNCLASSIFIED], count)
    for (kind,), count in counted_by(targets, "isolation_violations", "kind").items():
        violations.add_metric([kind], count)
    predicted, delivered = counter("predicted_hit_tokens"), counter("delivered_hit_tokens")
    if tokens := predicted_and_delivered(targets):
        predicted.add_metric([], tokens[0])
        delivered.add_metric([], tokens[1])
    return [hit_tokens, ttft, decision, requests, goodput, violations, predicted, delivered]


def _router_state(targets: Sequence[Target]) -> list[Metric]:
    oldest, untokenized = gauge("router_oldest_in_flight_seconds"), counter("router_untokenized_requests")
    for target in targets:
        if target.store is None or target.numbers is None or target.store.system.role != "router":
            continue
        _add_known(
            oldest, [target.name], max(target.store.gauges_of("oldest_in_flight_seconds").values(), default=None)
        )
        requests = target.store.total("untokenized_requests")
        if requests is not None:
            untokenized.add_metric([target.name], requests)
    return [oldest, untokenized]


def _hotspots(fleet: FleetNumbers) -> list[Metric]:
    overloaded = gauge("hotspot_overloaded_ratio")
    uneven = gauge("hotspot_max_over_mean")
    least = gauge("hotspot_busiest_over_least")
    share = gauge("hotspot_top_share_ratio")
    loads = gauge("worker_load_requests")
    if fleet.hotspot:
        overloaded.add_metric([], fleet.hotspot.overloaded_ratio)
        uneven.add_metric([], fleet.hotspot.max_over_mean)
        least.add_metric([], fleet.hotspot.busiest_over_least)
    _add_known(share, [], fleet.top_share)
    for worker, load in fleet.loads.items():
        loads.add_metric([worker], load)
    return [overloaded, uneven, least, share, loads]


def _ttft_deltas(fleet: FleetNumbers) -> list[Metric]:
    delta = quantiles("ttft_miss_minus_hit_seconds")
    samples = gauge("ttft_window_requests")
    if fleet.ttft_delta:
        for quantile, seconds in fleet.ttft_delta.seconds.items():
            delta.add_metric([repr(quantile)], seconds)
        samples.add_metric(["hit"], fleet.ttft_delta.hits)
        samples.add_metric(["miss"], fleet.ttft_delta.misses)
    return [delta, samples]


def _engine_gauges(targets: Sequence[Target]) -> list[Metric]:
    running = gauge("requests_running")
    waiting = gauge("requests_waiting")
    usage = gauge("kv_usage_ratio")
    mean = gauge("kv_usage_mean_ratio")
    capacity = gauge("kv_capacity_blocks")
    latency = quantiles("engine_latency_quantile_seconds")
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


def _quality(targets: Sequence[Target], mixed: Set[str], now_seconds: float) -> list[Metric]:
    """`mixed` are the targets whose bucket bounds differ from others'."""
    quality, missing = gauge("data_quality"), gauge("missing_signal")
    for target in targets:
        for flag, raised in target.flags(now_seconds).items():
            quality.add_metric([target.name, flag], float(raised))
        quality.add_metric([target.name, "mixed_buckets"], float(target.name in mixed))
        for signal in missing_signals(target.store) if target.store else ():
            missing.add_metric([target.name, signal], 1.0)
    return [quality, missing]


def _target_health(targets: Sequence[Target], now_seconds: float) -> list[Metric]:
    up = gauge("target_up")
    ready = gauge("window_ready")
    window = gauge("window_seconds")
    scrapes = counter("scrapes")
    failures = counter("scrape_failures")
    duration = gauge("scrape_duration_seconds")
    size = gauge("scrape_body_bytes")
    samples = gauge("scrape_samples")
    age = gauge("scrape_age_seconds")
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
            age.add_metric([target.name], max(0.0, now_seconds - health.succeeded_at_seconds))
    return [up, ready, window, scrapes, failures, duration, size, samples, age]


def _add_known(family: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)
