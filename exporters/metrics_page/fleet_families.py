"""The exporter's own metrics page. Names, labels and help texts are in `exporters.metrics_page.families`.

Families without a sample are left out: unknown is absent, never 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from prefixwatch.exporters.caches.families import kv_event_families
from prefixwatch.exporters.fleet.derivation import (
    CACHE_CLASSES,
    UNCLASSIFIED,
    FleetNumbers,
    HasStore,
    Peers,
    counted_by,
    derive_fleet,
    merged_over,
    predicted_and_delivered,
    router_tokens,
    stores,
)
from prefixwatch.exporters.fleet.retired_targets import Retired
from prefixwatch.exporters.metrics_page.engine_families import engine_families, engine_starts, engine_sums
from prefixwatch.exporters.metrics_page.families import IDENTITY, SERVED
from prefixwatch.exporters.metrics_page.rows import has_samples, histograms, rows
from prefixwatch.exporters.metrics_page.text import PageText
from prefixwatch.exporters.scraping.derive import TargetNumbers
from prefixwatch.exporters.scraping.quality import INFLATED_RATIO, hits_by_transfer, missing_signals
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.exporters.source import Source

_UNKNOWN = "unknown"
_TARGETS_AT_A_TIME = 50

_OWN_TIERS = frozenset({"gpu", "unknown"})
"""Tiers that every engine has; another one has a series from its first hit on."""

_DEGRADATION_COUNTERS = {
    "degradation_state_seconds": ("class", "state"),
    "degradation_transitions": ("class", "step", "rule"),
    "async_prefills": ("outcome",),
}
"""Signal and counter family of a router, and its labels."""

_LATENCIES = frozenset({("inter_token", 0.5), ("ttft", 0.95)})
"""Of a single target's quantiles those on the page, by which workers are compared; the fleet API has all. The fleet's
are in the engines' histograms, which add up."""


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


def identities(targets: Iterable[Target]) -> dict[str, Mapping[str, str]]:
    """By target, what the page says of it in families about targets."""
    return {target.name: target.identity for target in targets}


def render(
    targets: Sequence[Target], accept: str = "", sources: Sequence[Source] = (), gone: Sequence[HasStore] = ()
) -> tuple[bytes, str]:
    """The page and its content type: OpenMetrics if the client accepts it, otherwise Prometheus text."""
    text = PageText(accept, identities(targets))
    for part in FleetPage(targets, sources, gone=gone).parts():
        text.add(part)
    return b"".join(text.pieces()), text.content_type


def _fresh(families: Iterable[Metric], written: Set[str]) -> list[Metric]:
    return [family for family in families if family.name not in written and has_samples(family)]


def _scraped(targets: Sequence[Target], gone: Sequence[HasStore], now_seconds: float) -> Iterator[list[Metric]]:
    counted = (one.store for one in (*targets, *gone) if one.store is not None)
    ever: list[HasStore] = [Retired(store) for store in SignalStore.added_up(counted)]
    fleet = derive_fleet(targets)
    yield _prefix_tokens(targets, fleet)
    yield _router_families(ever)
    yield [*_router_state(targets), *_hotspots(fleet), *_ttft_deltas(fleet)]
    yield list(
        kv_event_families(
            (target.name, counts) for target in targets if target.kv_events and (counts := target.kv_events.counts())
        )
    )
    yield [*engine_sums(ever), engine_starts(targets)]
    checks = 0
    for first in range(0, len(targets), _TARGETS_AT_A_TIME):
        few = targets[first : first + _TARGETS_AT_A_TIME]
        yield [*_engine_gauges(few), *engine_families(few)]
        flags = {target.name: _flags(target, fleet, now_seconds) for target in few}
        checks += sum(map(len, flags.values()))
        yield [*_quality(few, flags), *_target_health(few, now_seconds)]
    unread: dict[str, set[str]] = {}
    for target in targets:
        if target.up and target.system:
            unread.setdefault(target.system.system, set()).update(target.review.unread)
    yield [rows("unread_families", (([system], len(names)) for system, names in unread.items()))]
    samples = [target.health.samples for target in targets if target.health.samples is not None]
    yield [rows("data_quality_checks", [([], checks or None)]), rows("scrape_samples", [([], sum(samples) or None)])]


def _prefix_tokens(targets: Sequence[Target], fleet: FleetNumbers) -> list[Metric]:
    engines = [
        (target.name, target.store, target.numbers)
        for target in targets
        if target.system and target.system.role == "engine" and target.store and target.numbers
    ]
    handed_over = [(name, store) for name, store, _ in engines if hits_by_transfer(store)]
    transferred = rows(
        "prompt_tokens_transferred",
        (
            ([name, model], tokens)
            for name, store in handed_over
            for (model,), tokens in store.totals_by("external_hit_tokens", "model").items()
        ),
    )
    apart = {name for name, _ in handed_over}
    engines = [engine for engine in engines if engine[0] not in apart]
    hits = rows(
        "prefix_hit_tokens",
        (
            ([name, model, tier], tokens)
            for name, store, _ in engines
            for (model, tier), tokens in store.totals_by("prefix_hit_tokens", "model", "tier").items()
            if tokens or tier in _OWN_TIERS
        ),
    )
    queries = rows(
        "prefix_query_tokens",
        (
            ([name, model], tokens)
            for name, store, _ in engines
            for (model,), tokens in store.totals_by("prefix_query_tokens", "model").items()
        ),
    )
    for (worker, model), tokens in router_tokens(targets, "router_delivered_hit_tokens").items():
        hits.add_metric([worker, model, _UNKNOWN], tokens)
    for (worker, model), tokens in router_tokens(targets, "router_prompt_tokens").items():
        queries.add_metric([worker, model], tokens)
    return [
        hits,
        queries,
        transferred,
        rows("prefix_hit_ratio", _hit_ratios((name, own) for name, _, own in engines)),
        rows(
            "prefix_cache_hit_ratio",
            (([name, ""], own.raw_hit_ratio) for name, _, own in engines if _differ(own.raw_hit_ratio, own.hit_ratio)),
        ),
        rows("fleet_prefix_hit_ratio", [([], fleet.hit_ratio)]),
    ]


def _hit_ratios(engines: Iterable[tuple[str, TargetNumbers]]) -> Iterator[tuple[tuple[str, str, str], float | None]]:
    """Of each target; of one that lists several engines, of each of them."""
    for name, own in engines:
        if len(own.hit_ratio_by) > 1:
            for engine, ratio in own.hit_ratio_by.items():
                yield (name, engine, "cache"), ratio
        else:
            yield (name, "", own.hit_ratio_source), own.hit_ratio


def _differ(raw: float | None, ratio: float | None) -> bool:
    """Whether the cache counters' ratio says something else than the one that is shown."""
    return raw is not None and (ratio is None or abs(raw - ratio) > INFLATED_RATIO)


def _router_families(targets: Sequence[HasStore]) -> list[Metric]:
    def merged(name: str, signal: str, *labels: str, only: Container[str] | None = None) -> Metric:
        found = merged_over(stores(targets, "router"), signal, "model", *labels)
        return histograms(
            name,
            (
                ([*_served(model), *values], one)
                for (model, *values), one in found.items()
                if only is None or values[0] in only
            ),
        )

    decision = merged_over(stores(targets, "router"), "router_decision", "step")
    requests = counted_by(targets, "routed_requests", "model", "class", "outcome")
    goodput = counted_by(targets, "goodput_requests", "model", "class")
    violations = counted_by(targets, "isolation_violations", "model", "kind")
    predicted, delivered = predicted_and_delivered(targets) or (None, None)
    return [
        merged("request_hit_tokens", "request_hit_tokens"),
        merged("ttft_seconds", "ttft_by_cache", "cache", only=CACHE_CLASSES),
        histograms("router_decision_seconds", decision.items()),
        rows(
            "requests",
            (
                ([*_served(model), request_class or UNCLASSIFIED, outcome], count)
                for (model, request_class, outcome), count in requests.items()
                if outcome  # a router that only counts placements doesn't know how they ended
            ),
        ),
        rows(
            "goodput_requests", (([*_served(m), name or UNCLASSIFIED], count) for (m, name), count in goodput.items())
        ),
        rows("isolation_violations", (([*_served(m), kind], count) for (m, kind), count in violations.items())),
        rows("predicted_hit_tokens", [(_served(), predicted)]),
        rows("delivered_hit_tokens", [(_served(), delivered)]),
    ]


def _served(model: str = "") -> tuple[str, ...]:
    """The first labels of a request family that routers' pages give: only the model can be known."""
    return (model, *("" for _ in SERVED[1:]))


def _router_state(targets: Sequence[Target]) -> list[Metric]:
    routers = [
        (target.name, target.store)
        for target in targets
        if target.store and target.numbers and target.store.system.role == "router"
    ]

    def largest(name: str, signal: str) -> Metric:
        return rows(
            name, (([target], max(store.gauges_of(signal).values(), default=None)) for target, store in routers)
        )

    def gauges(name: str, signal: str, *labels: str) -> Metric:
        return rows(
            name,
            (
                ([target, *(dict(found).get(label, "") for label in labels)], value)
                for target, store in routers
                for found, value in store.gauges_of(signal).items()
            ),
        )

    return [
        largest("router_oldest_in_flight_seconds", "oldest_in_flight_seconds"),
        gauges("router_identity_files_usable", "identity_files_usable", "file"),
        rows("router_untokenized_requests", (([name], store.total("untokenized_requests")) for name, store in routers)),
        largest("warm_pool_utilization_ratio", "warm_pool_utilization_ratio"),
        gauges("degradation_state", "degradation_state", "class", "state"),
        *(
            rows(
                signal,
                (
                    ([name, *values], count)
                    for name, store in routers
                    for values, count in store.totals_by(signal, *labels).items()
                ),
            )
            for signal, labels in _DEGRADATION_COUNTERS.items()
        ),
    ]


def _hotspots(fleet: FleetNumbers) -> list[Metric]:
    def by_peers(name: str, values: Mapping[Peers, float]) -> Metric:
        return rows(name, (([dict(peers).get(label, "") for label in IDENTITY], v) for peers, v in values.items()))

    hotspots = fleet.hotspots
    return [
        by_peers("hotspot_overloaded_ratio", {peers: one.overloaded_ratio for peers, one in hotspots.items()}),
        by_peers("hotspot_max_over_mean", {peers: one.max_over_mean for peers, one in hotspots.items()}),
        by_peers("hotspot_busiest_over_least", {peers: one.busiest_over_least for peers, one in hotspots.items()}),
        by_peers("hotspot_top_share_ratio", fleet.top_shares),
        rows("worker_load_requests", (([one.target, one.engine], one.load) for one in fleet.workers)),
    ]


def _ttft_deltas(fleet: FleetNumbers) -> list[Metric]:
    delta = fleet.ttft_delta
    seconds = delta.seconds if delta else {}
    counts = {"hit": delta.hits, "miss": delta.misses} if delta else {}
    return [
        rows(
            "ttft_miss_minus_hit_seconds",
            (([*_served(), repr(quantile)], value) for quantile, value in seconds.items()),
        ),
        rows("ttft_window_requests", (([*_served(), cache], count) for cache, count in counts.items())),
    ]


def _engine_gauges(targets: Sequence[Target]) -> list[Metric]:
    known = [(target.name, target.numbers) for target in targets if target.numbers]

    def by_engine(name: str, values: Callable[[TargetNumbers], Mapping[str, float]]) -> Metric:
        return rows(
            name,
            (
                ([target, engine if len(found) > 1 else ""], value)
                for target, numbers in known
                if (found := values(numbers))
                for engine, value in found.items()
            ),
        )

    return [
        by_engine("requests_running", lambda numbers: numbers.running_by),
        by_engine("requests_waiting", lambda numbers: numbers.waiting_by),
        by_engine("kv_usage_ratio", lambda numbers: numbers.kv_usage_by),
        rows("kv_capacity_blocks", (([target], numbers.kv_capacity_blocks) for target, numbers in known)),
        rows("block_size_tokens", (([target], numbers.block_size_tokens) for target, numbers in known)),
        rows(
            "engine_latency_quantile_seconds",
            (
                ([target, latency, repr(quantile)], seconds)
                for target, numbers in known
                for (latency, quantile), seconds in numbers.latency_seconds.items()
                if (latency, quantile) in _LATENCIES
            ),
        ),
    ]


def _flags(target: Target, fleet: FleetNumbers, now_seconds: float) -> dict[str, bool]:
    return {**target.flags(now_seconds), "mixed_buckets": target.name in fleet.mixed_buckets}


def _quality(targets: Sequence[Target], flags: Mapping[str, Mapping[str, bool]]) -> list[Metric]:
    """Flags that are not raised have no series: a fleet of 200 targets has 3,000 of them."""
    stored = [(target.name, target.store) for target in targets if target.store]
    return [
        rows("data_quality", (([name, flag], 1.0) for name, own in flags.items() for flag, up in own.items() if up)),
        rows(
            "missing_signal",
            (([name, signal], 1.0) for name, store in stored for signal in missing_signals(store)),
        ),
        rows(
            "labels_overflowed",
            (([name, label], count) for name, store in stored for label, count in store.overflowed.items()),
        ),
    ]


def _target_health(targets: Sequence[Target], now_seconds: float) -> list[Metric]:
    healths = [(target.name, target.health) for target in targets]
    return [
        rows(
            "target_up",
            (([one.name, one.system.system if one.system else "", one.version], float(one.up)) for one in targets),
        ),
        rows("window_seconds", (([one.name], one.numbers.window_seconds) for one in targets if one.numbers)),
        rows("scrapes", (([name], health.scrapes) for name, health in healths)),
        rows(
            "scrape_failures",
            (([name, reason], count) for name, health in healths for reason, count in health.failures.items()),
        ),
        rows("scrape_duration_seconds", (([name], health.last_seconds) for name, health in healths)),
        rows(
            "scrape_age_seconds",
            (
                ([name], max(0.0, now_seconds - health.succeeded_at_seconds))
                for name, health in healths
                if health.succeeded_at_seconds is not None
            ),
        ),
    ]
