"""What all targets together say: hotspots, the fleet's hit ratio, and what only routers can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from exporters.caches.worker_targets import WorkerTargets
from exporters.families import MIN_OBSERVATIONS
from exporters.scraping.histogram import Histogram, Merged, merge
from exporters.scraping.quality import impossible_ratio
from exporters.scraping.signals import SignalStore
from exporters.scraping.target import Target

OVERLOAD_FACTOR = 1.5
"""A worker is overloaded when its load exceeds this many times the fleet's mean."""

MIN_FLEET_LOAD = 1.0
"""Requests running or waiting, on average over the window and summed over the fleet, below which no worker is hot."""

CACHE_CLASSES = ("hit", "partial", "miss")
DELTA_QUANTILES = (0.5, 0.95)
UNCLASSIFIED = "unclassified"


class HasStore(Protocol):
    """A target, or what stands for those that are gone: lifetime sums over the fleet need no more of either."""

    @property
    def store(self) -> SignalStore | None: ...


@dataclass(frozen=True, slots=True)
class Hotspot:
    """How unevenly the load is spread."""

    workers: int
    overloaded_ratio: float
    max_over_mean: float
    busiest_over_least: float
    """Infinite when the least busy worker had nothing to do."""


@dataclass(frozen=True, slots=True)
class TtftDelta:
    """What a miss costs: TTFT of misses minus TTFT of hits, seconds, by quantile."""

    seconds: Mapping[float, float]
    hits: float
    misses: float


@dataclass(frozen=True, slots=True)
class FleetNumbers:
    """Derived from all targets. None or empty is unknown: `absent` says why."""

    loads: Mapping[str, float]
    hotspot: Hotspot | None
    top_share: float | None
    hit_ratio: float | None
    ttft_delta: TtftDelta | None
    absent: Mapping[str, str]
    notes: Mapping[str, str]
    """What to know of a number that is there."""


def derive_fleet(targets: Sequence[Target]) -> FleetNumbers:
    absent: dict[str, str] = {}
    loads = worker_loads(targets)
    return FleetNumbers(
        loads=loads,
        hotspot=_hotspot(loads, absent),
        top_share=_top_share(targets, absent),
        hit_ratio=_hit_ratio(targets, absent),
        ttft_delta=_ttft_delta(targets, absent),
        absent=absent | _router_absences(targets),
        notes={family: note for family, (note, _) in coarsened(targets).items()},
    )


def stores(targets: Iterable[HasStore], role: str) -> list[SignalStore]:
    """Signals of all targets with this role, those that are down now included."""
    return [target.store for target in targets if target.store and target.store.system.role == role]


def worker_loads(targets: Sequence[Target]) -> dict[str, float]:
    """Mean requests running and waiting in the window, by worker.

    A worker is one engine of a target: an endpoint may serve several (data-parallel ranks). Without any engine
    among the targets the routers' own counts of requests in flight stand in.
    """
    engines = _with_role(targets, "engine")
    loads: dict[str, float] = defaultdict(float)
    for target in engines or _with_role(targets, "router"):
        means = target.loads.means()
        for part, load in means.items():
            alone = engines and len(means) == 1
            loads[target.name if alone else f"{target.name}/{part}" if engines else part] += load
    return dict(loads)


def merged_by(targets: Iterable[HasStore], signal: str, label: str = "") -> dict[str, Merged]:
    """The routers' lifetime histograms of this signal, added up, by the value of `label`."""
    return {value: merged for (value,), merged in merged_over(stores(targets, "router"), signal, label).items()}


def merged_over(given: Iterable[SignalStore], signal: str, *labels: str) -> dict[tuple[str, ...], Merged]:
    """These stores' lifetime histograms of this signal, added up, by the values of `labels`."""
    groups: dict[tuple[str, ...], list[Histogram]] = defaultdict(list)
    for store in given:
        for values, histograms in store.labelled_histograms(signal, *labels).items():
            groups[values].extend(histograms)
    return {values: merged for values, histograms in groups.items() if (merged := merge(histograms))}


def counted_by(targets: Iterable[HasStore], signal: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The routers' lifetime counts of this signal, added up, by the values of these labels."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for store in stores(targets, "router"):
        for values, count in store.totals_by(signal, *labels).items():
            sums[values] += count
    return dict(sums)


def router_tokens(targets: Sequence[Target], signal: str, *, in_window: bool = False) -> dict[tuple[str, str], float]:
    """A router's count of tokens by worker and model, for workers whose engines don't count their own: the same tokens
    must not be told twice. Under the router's name where it doesn't tell the worker; none of a router that doesn't know
    what was delivered, whose prompts would pass for misses."""
    engines = WorkerTargets(targets)
    some_count = any(map(_counts_prefixes, targets))
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for router in _with_role(targets, "router"):
        store = router.store
        if store is None or not store.has("router_delivered_hit_tokens"):
            continue
        read = store.grown_by if in_window else store.totals_by
        for (worker, model), tokens in read(signal, "worker", "model").items():
            engine = engines.find(worker) if worker else None
            if not (some_count if engine is None else _counts_prefixes(engine)):
                sums[worker or router.name, model] += tokens
    return dict(sums)


def predicted_and_delivered(targets: Iterable[HasStore]) -> tuple[float, float] | None:
    """Cached tokens that routers expected and that engines delivered, of the routers that count both. Nothing expected
    of much delivered: the router is blind, say to salts."""
    both = [
        (predicted, delivered)
        for store in stores(targets, "router")
        if (predicted := store.total("router_predicted_hit_tokens")) is not None
        and (delivered := store.total("router_delivered_hit_tokens")) is not None
    ]
    return (sum(predicted for predicted, _ in both), sum(delivered for _, delivered in both)) if both else None


def _counts_prefixes(target: Target) -> bool:
    store = target.store
    return store is not None and store.system.role == "engine" and store.has("prefix_query_tokens")


def _with_role(targets: Iterable[Target], role: str) -> list[Target]:
    return [target for target in targets if target.system and target.system.role == role]


def _hotspot(loads: Mapping[str, float], absent: dict[str, str]) -> Hotspot | None:
    if len(loads) < 2:
        absent["hotspot"] = f"needs the load of at least 2 workers, {len(loads)} known"
        return None
    if sum(loads.values()) < MIN_FLEET_LOAD:
        absent["hotspot"] = f"the fleet had fewer than {MIN_FLEET_LOAD:g} requests running or waiting on average"
        return None
    mean, most, least = fmean(loads.values()), max(loads.values()), min(loads.values())
    return Hotspot(
        workers=len(loads),
        overloaded_ratio=sum(load > OVERLOAD_FACTOR * mean for load in loads.values()) / len(loads),
        max_over_mean=most / mean,
        busiest_over_least=most / least if least else float("inf"),
    )


def _top_share(targets: Sequence[Target], absent: dict[str, str]) -> float | None:
    """The busiest worker's share of the window's requests, as routers placed them, else as engines finished them."""
    served: dict[str, float] = defaultdict(float)
    for store in stores(_up(targets), "router"):
        for (worker,), grown in store.grown_by("routed_requests", "worker").items():
            served[worker] += grown
    for placed_on_no_known_worker in ("none", ""):
        served.pop(placed_on_no_known_worker, None)
    if not served:
        for target in _up(_with_role(targets, "engine")):
            assert target.store is not None
            for (engine,), grown in target.store.grown_by("finished_requests", "engine").items():
                served[f"{target.name}/{engine}"] += grown
    total = sum(served.values())
    if total < MIN_OBSERVATIONS:
        absent["top_share"] = f"{total:.0f} requests in the window, {MIN_OBSERVATIONS} are needed"
        return None
    return max(served.values()) / total


def _hit_ratio(targets: Sequence[Target], absent: dict[str, str]) -> float | None:
    """Hit tokens over queried tokens of all engines in the window, as routers count them for engines that don't: sums
    first, then the ratio."""
    hits = queries = 0.0
    for store in stores(_up(targets), "engine"):
        grown_hits, grown_queries = store.grown("prefix_hit_tokens"), store.grown("prefix_query_tokens")
        if grown_hits is not None and grown_queries is not None and not impossible_ratio(store):
            hits, queries = hits + grown_hits, queries + grown_queries
    hits += sum(router_tokens(_up(targets), "router_delivered_hit_tokens", in_window=True).values())
    queries += sum(router_tokens(_up(targets), "router_prompt_tokens", in_window=True).values())
    if queries <= 0:
        absent["hit_ratio"] = "no engine looked up a prompt token between two scrapes"
        return None
    return min(hits / queries, 1.0)


def _ttft_delta(targets: Sequence[Target], absent: dict[str, str]) -> TtftDelta | None:
    classes: dict[str, list[Histogram]] = defaultdict(list)
    for store in stores(_up(targets), "router"):
        for cache, histograms in store.grown_histograms("ttft_by_cache", "cache").items():
            classes[cache].extend(histograms)
    hit, miss = merge(classes["hit"]), merge(classes["miss"])
    hits, misses = (merged.histogram.count if merged else 0.0 for merged in (hit, miss))
    if hit is None or miss is None or min(hits, misses) < MIN_OBSERVATIONS:
        absent["ttft_delta"] = (
            f"{hits:.0f} hits and {misses:.0f} misses with a first token in the window, "
            f"{MIN_OBSERVATIONS} of each are needed, from a router target"
        )
        return None
    seconds = {}
    for q in DELTA_QUANTILES:
        of_hit, of_miss = hit.histogram.quantile(q), miss.histogram.quantile(q)
        if of_hit is not None and of_miss is not None:
            seconds[q] = of_miss - of_hit
    return TtftDelta(seconds, hits, misses)


_ADDED_UP: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("request_hit_tokens", "request_hit_tokens", ("router",), ()),
    ("ttft_seconds", "ttft_by_cache", ("router",), ("cache",)),
    ("router_decision_seconds", "router_decision", ("router",), ("step",)),
    ("prefill_wait_seconds", "queue_seconds", ("engine",), ()),
    ("kv_transfer_seconds", "kv_transfer", ("engine", "router", "cache", "transfer"), ("source", "destination")),
)
"""Histograms that are added up over targets: family, signal, the targets' roles, and the labels that stay."""


def coarsened(targets: Sequence[Target]) -> dict[str, tuple[str, frozenset[str]]]:
    """Families whose targets have different bucket bounds: what became of the buckets, and which targets they are.

    Counts can only be added at bounds that all have; the others are dropped (ray-project/ray#65892).
    """
    found = {}
    for family, signal, roles, labels in _ADDED_UP:
        bounds: dict[tuple[str, ...], set[tuple[float, ...]]] = defaultdict(set)
        names: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for target in targets:
            if target.store and target.store.system.role in roles:
                for values, own in target.store.bounds_of(signal, *labels).items():
                    bounds[values] |= own
                    names[values].add(target.name)
        mixed = [values for values, different in bounds.items() if len(different) > 1]
        if mixed:
            kept = min(len(set.intersection(*map(set, bounds[values]))) for values in mixed)
            note = f"targets' bucket bounds differ: only the {kept} that all have are kept, +Inf included"
            found[family] = (note, frozenset().union(*(names[values] for values in mixed)))
    return found


def _up(targets: Iterable[Target]) -> list[Target]:
    return [target for target in targets if target.up]


_FROM_ROUTERS: Mapping[str, str] = {
    "request_hit_tokens": "request_hit_tokens",
    "ttft_by_cache": "ttft_by_cache",
    "router_decision": "router_decision",
    "requests": "routed_requests",
    "goodput": "goodput_requests",
    "isolation_violations": "isolation_violations",
}


FAMILY_OF: Mapping[str, str] = {
    "ttft_by_cache": "ttft_seconds",
    "ttft_delta": "ttft_miss_minus_hit_seconds",
    "router_decision": "router_decision_seconds",
    "goodput": "goodput_requests",
}
"""The family that tells a quantity, where it has another name: who has the family from elsewhere isn't without it."""


def _router_absences(targets: Sequence[Target]) -> dict[str, str]:
    routers = stores(targets, "router")
    absent = {}
    if not any(target.store and target.store.has("kv_transfer") for target in targets):
        absent["kv_transfer"] = "no target times KV transfers; engines with prefill and decode apart, and caches, do"
    for quantity, signal in _FROM_ROUTERS.items():
        if any(store.has(signal) for store in routers):
            continue
        told = [store.system.absent[quantity] for store in routers if quantity in store.system.absent]
        reason = told[0] if told else "the router has not counted any yet" if routers else "no router among the targets"
        absent[quantity] = reason
    return absent
