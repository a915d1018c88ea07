"""What all targets together say: hotspots, the fleet's hit ratio, and what only routers can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from exporters.families import MIN_OBSERVATIONS
from exporters.histogram import Histogram, Merged, merge
from exporters.signals import SignalStore
from exporters.target import Target

OVERLOAD_FACTOR = 1.5
"""A worker is overloaded when its load exceeds this many times the fleet's mean."""

MIN_FLEET_LOAD = 1.0
"""Requests running or waiting, on average over the window and summed over the fleet, below which no worker is hot."""

CACHE_CLASSES = ("hit", "partial", "miss")
DELTA_QUANTILES = (0.5, 0.95)
UNCLASSIFIED = "unclassified"


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
    )


def stores(targets: Iterable[Target], role: str) -> list[SignalStore]:
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


def merged_by(targets: Iterable[Target], signal: str, label: str = "") -> dict[str, Merged]:
    """The routers' lifetime histograms of this signal, added up, by the value of `label`."""
    groups: dict[str, list[Histogram]] = defaultdict(list)
    for store in stores(targets, "router"):
        for value, histograms in store.histograms(signal, label).items():
            groups[value].extend(histograms)
    return {value: merged for value, histograms in groups.items() if (merged := merge(histograms))}


def counted_by(targets: Iterable[Target], signal: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The routers' lifetime counts of this signal, added up, by the values of these labels."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for store in stores(targets, "router"):
        for values, count in store.totals_by(signal, *labels).items():
            sums[values] += count
    return dict(sums)


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
    """Hit tokens over queried tokens of all engines in the window: sums first, then the ratio."""
    hits = queries = 0.0
    for store in stores(_up(targets), "engine"):
        grown_hits, grown_queries = store.grown("prefix_hit_tokens"), store.grown("prefix_query_tokens")
        if grown_hits is not None and grown_queries is not None:
            hits, queries = hits + grown_hits, queries + grown_queries
    if queries <= 0:
        absent["hit_ratio"] = "no engine looked up a prompt token between two scrapes"
        return None
    return hits / queries


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


def _router_absences(targets: Sequence[Target]) -> dict[str, str]:
    routers = stores(targets, "router")
    timed = any(target.store and target.store.has("kv_transfer") for target in targets)
    absent = {
        "kv_transfer": "timed by single targets, among their signals, and not added up over the fleet"
        if timed
        else "no target times KV transfers; vLLM's KV connectors may, under names of their own"
    }
    for quantity, signal in _FROM_ROUTERS.items():
        if any(store.has(signal) for store in routers):
            continue
        told = [store.system.absent[quantity] for store in routers if quantity in store.system.absent]
        reason = told[0] if told else "the router has not counted any yet" if routers else "no router among the targets"
        absent[quantity] = reason
    return absent
