"""What all targets together say: hotspots, the fleet's hit ratio, and what only routers can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixwatch.exporters.caches.worker_targets import WorkerTargets
from prefixwatch.exporters.fleet.bucket_bounds import coarsened
from prefixwatch.exporters.metrics_page.families import IDENTITY, MIN_OBSERVATIONS
from prefixwatch.exporters.scraping.histogram import Histogram, merge
from prefixwatch.exporters.scraping.labels import OTHER
from prefixwatch.exporters.scraping.quality import reuse
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.exporters.scraping.window import mean

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


Peers = tuple[tuple[str, str], ...]
"""What workers have in common that can be compared: the labels of `IDENTITY` that are known, in that order."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Mean requests running and waiting in the window at one engine."""

    target: str
    engine: str
    """Which engine of the target; empty when it has only one."""
    peers: Peers
    load: float

    @property
    def name(self) -> str:
        return f"{self.target}/{self.engine}" if self.engine else self.target


@dataclass(frozen=True, slots=True)
class Hotspot:
    """How unevenly the load is spread among workers of one model, role and pool."""

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

    workers: Sequence[WorkerLoad]
    hotspots: Mapping[Peers, Hotspot]
    top_shares: Mapping[Peers, float]
    """The busiest worker's share of the window's requests."""
    hit_ratio: float | None
    ttft_delta: TtftDelta | None
    absent: Mapping[str, str]
    notes: Mapping[str, str]
    """What to know of a number that is there."""
    mixed_buckets: frozenset[str]
    """Targets whose bucket bounds differ from others'."""

    @property
    def loads(self) -> dict[str, float]:
        """By worker."""
        return {worker.name: worker.load for worker in self.workers}

    @property
    def hotspot(self) -> Hotspot | None:
        """The worst of all groups of peers."""
        return max(self.hotspots.values(), key=lambda hotspot: hotspot.max_over_mean, default=None)

    @property
    def top_share(self) -> float | None:
        """The largest of all groups of peers."""
        return max(self.top_shares.values(), default=None)


def derive_fleet(targets: Sequence[Target]) -> FleetNumbers:
    absent: dict[str, str] = {}
    workers, mixed = worker_loads(targets), coarsened(targets)
    return FleetNumbers(
        workers=workers,
        hotspots=_hotspots(workers, absent),
        top_shares=_top_shares(targets, absent),
        hit_ratio=_hit_ratio(targets, absent),
        ttft_delta=_ttft_delta(targets, absent),
        absent=absent | _router_absences(targets),
        notes={family: note for family, (note, _) in mixed.items()},
        mixed_buckets=frozenset().union(*(names for _, names in mixed.values())),
    )


def stores(targets: Iterable[HasStore], role: str) -> list[SignalStore]:
    """Signals of all targets with this role, those that are down now included."""
    return [target.store for target in targets if target.store and target.store.system.role == role]


def peers_of(target: Target, engine: str | None = None) -> Peers:
    """Whose numbers a target's, or one of its engines', can be compared with: those of the same model, role, pool,
    namespace and cluster."""
    known = target.identity_of(engine)
    return tuple((name, known[name]) for name in IDENTITY if name in known)


def worker_loads(targets: Sequence[Target]) -> list[WorkerLoad]:
    """Mean requests running and waiting in the window, by worker.

    A worker is one engine of a target: an endpoint may serve several (data-parallel ranks, or workers of a gateway).
    Without any engine among the targets the routers' own counts of requests in flight are used.
    """
    engines = _with_role(targets, "engine")
    if engines:
        return [
            WorkerLoad(target.name, engine if len(means) > 1 else "", peers_of(target, engine), load)
            for target in engines
            if (means := target.loads.means())
            for engine, load in means.items()
        ]
    loads: dict[str, float] = defaultdict(float)
    for router in _with_role(targets, "router"):
        for worker, load in router.loads.means().items():
            loads[worker] += load
    return [WorkerLoad(worker, "", (), load) for worker, load in loads.items() if worker != OTHER]


def merged_over(given: Iterable[SignalStore], signal: str, *labels: str) -> dict[tuple[str, ...], Histogram]:
    """These stores' lifetime histograms of this signal, added up, by the values of `labels`."""
    groups: dict[tuple[str, ...], list[Histogram]] = defaultdict(list)
    for store in given:
        for values, histograms in store.histograms(signal, *labels).items():
            groups[values].extend(histograms)
    return {values: merged for values, histograms in groups.items() if (merged := merge(histograms))}


def summed(given: Iterable[SignalStore], signal: str, *labels: str) -> dict[tuple[str, ...], float]:
    """These stores' lifetime counts of this signal, added up, by the values of `labels`."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for store in given:
        for values, count in store.totals_by(signal, *labels).items():
            sums[values] += count
    return dict(sums)


def merged_by_peers(given: Iterable[SignalStore], signal: str) -> list[tuple[tuple[str, ...], Histogram]]:
    """These stores' lifetime histograms of this signal, added up, by the labels of `IDENTITY`."""
    groups: dict[tuple[str, ...], list[Histogram]] = defaultdict(list)
    for store in given:
        for (model, role), histograms in store.histograms(signal, "model", "role").items():
            groups[_identity_labels(store, model, role)].extend(histograms)
    return [(labels, merged) for labels, histograms in groups.items() if (merged := merge(histograms))]


def summed_by_peers(given: Iterable[SignalStore], signal: str, *labels: str) -> list[tuple[tuple[str, ...], float]]:
    """These stores' lifetime counts of this signal, added up, by the labels of `IDENTITY` and then by `labels`."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for store in given:
        for (model, role, *others), count in store.totals_by(signal, "model", "role", *labels).items():
            sums[(*_identity_labels(store, model, role), *others)] += count
    return list(sums.items())


def _identity_labels(store: SignalStore, model: str, role: str) -> tuple[str, ...]:
    place = store.place
    others = [place.get(name, "") for name in IDENTITY[2:]]
    return (model or place.get("model", ""), role or place.get("role", ""), *others)


def counted_by(targets: Iterable[HasStore], signal: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The routers' lifetime counts of this signal, added up, by the values of these labels."""
    return summed(stores(targets, "router"), signal, *labels)


def router_tokens(targets: Sequence[Target], signal: str, *, in_window: bool = False) -> dict[tuple[str, str], float]:
    """A router's count of tokens by worker and model, for workers whose engines don't count their own: the same tokens
    must not be counted twice. Under the router's name where it doesn't name the worker; none of a router that doesn't
    know what was delivered, whose prompts would pass for misses."""
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
                sums[engine.name if engine else worker or router.name, model] += tokens
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


def _hotspots(workers: Sequence[WorkerLoad], absent: dict[str, str]) -> dict[Peers, Hotspot]:
    groups: dict[Peers, list[float]] = defaultdict(list)
    for worker in workers:
        groups[worker.peers].append(worker.load)
    found = {peers: hotspot for peers, loads in groups.items() if (hotspot := _hotspot(loads))}
    most = max(map(len, groups.values()), default=0)
    if most < 2:
        absent["hotspot"] = f"needs the load of at least 2 workers, {most} known"
    elif not found:
        absent["hotspot"] = f"the fleet had fewer than {MIN_FLEET_LOAD:g} requests running or waiting on average"
    return found


def _hotspot(loads: Sequence[float]) -> Hotspot | None:
    if len(loads) < 2 or sum(loads) < MIN_FLEET_LOAD:
        return None
    average, most, least = mean(loads), max(loads), min(loads)
    return Hotspot(
        workers=len(loads),
        overloaded_ratio=sum(load > OVERLOAD_FACTOR * average for load in loads) / len(loads),
        max_over_mean=most / average,
        busiest_over_least=most / least if least else float("inf"),
    )


def _top_shares(targets: Sequence[Target], absent: dict[str, str]) -> dict[Peers, float]:
    """The busiest worker's share of the window's requests, as routers placed them, otherwise as engines finished
    them."""
    served: dict[Peers, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    engines = WorkerTargets(targets)
    for store in stores(_up(targets), "router"):
        for (worker, model), grown in store.grown_by("routed_requests", "worker", "model").items():
            if worker in ("none", "", OTHER):  # placed on no known worker
                continue
            engine = engines.find(worker)
            peers: Peers = peers_of(engine) if engine else (("model", model),) if model else ()
            served[peers][engines.name_of(worker)] += grown
    if not served:
        for target in _up(_with_role(targets, "engine")):
            assert target.store is not None
            for (name,), grown in target.store.grown_by("finished_requests", "engine").items():
                served[peers_of(target, name)][f"{target.name}/{name}"] += grown
    totals = {peers: sum(counts.values()) for peers, counts in served.items()}
    enough = {peers: total for peers, total in totals.items() if total >= MIN_OBSERVATIONS}
    if not enough:
        most = max(totals.values(), default=0.0)
        absent["top_share"] = f"{most:.0f} requests in the window, {MIN_OBSERVATIONS} are needed"
    return {peers: max(served[peers].values()) / total for peers, total in enough.items()}


def _hit_ratio(targets: Sequence[Target], absent: dict[str, str]) -> float | None:
    """Reused prompt tokens over prompt tokens of all engines in the window, as routers count them for engines that
    don't: sums first, then the ratio. Engines whose prompts arrive by KV transfer are left out: the ones that prefill
    have counted the same prompts."""
    hits = queries = 0.0
    for store in stores(_up(targets), "engine"):
        if (reused := reuse(store)) is not None:
            hits, queries = hits + reused[0], queries + reused[1]
    hits += sum(router_tokens(_up(targets), "router_delivered_hit_tokens", in_window=True).values())
    queries += sum(router_tokens(_up(targets), "router_prompt_tokens", in_window=True).values())
    if queries <= 0:
        absent["hit_ratio"] = "no engine looked up a prompt token between two scrapes"
        return None
    return min(hits / queries, 1.0)


def _ttft_delta(targets: Sequence[Target], absent: dict[str, str]) -> TtftDelta | None:
    classes: dict[str, list[Histogram]] = defaultdict(list)
    for store in stores(_up(targets), "router"):
        for (cache,), histograms in store.grown_histograms("ttft_by_cache", "cache").items():
            classes[cache].extend(histograms)
    hit, miss = merge(classes["hit"]), merge(classes["miss"])
    hits, misses = (merged.count if merged else 0.0 for merged in (hit, miss))
    if hit is None or miss is None or min(hits, misses) < MIN_OBSERVATIONS:
        absent["ttft_delta"] = (
            f"{hits:.0f} hits and {misses:.0f} misses with a first token in the window, "
            f"{MIN_OBSERVATIONS} of each are needed, from a router target"
        )
        return None
    seconds = {}
    for q in DELTA_QUANTILES:
        of_hit, of_miss = hit.quantile(q), miss.quantile(q)
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


FAMILY_OF: Mapping[str, str] = {
    "ttft_by_cache": "ttft_seconds",
    "ttft_delta": "ttft_miss_minus_hit_seconds",
    "router_decision": "router_decision_seconds",
    "goodput": "goodput_requests",
}
"""The family that gives a quantity, where it has another name: who has the family from elsewhere isn't without it."""


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
