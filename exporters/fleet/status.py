"""The fleet in one block of figures, by model: what `prefixwatch status`, the live page's first row and the API show.

Pure. Every figure has its window; one that isn't known has a reason instead of a value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from prefixwatch.exporters.fleet.derivation import FleetNumbers, merged_over
from prefixwatch.exporters.fleet.goodput_bounds import goodput_bounds
from prefixwatch.exporters.isolation.verdicts import LEAST_AUDITED_RATIO
from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.requests.account import ModelWindow
from prefixwatch.exporters.requests.counts import miss_minus_hit
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.cache_class import HIT, MISS, PARTIAL
from prefixwatch.slo.objective import Objective

SINCE_START = "since the exporter's start"

TITLES: Mapping[str, tuple[str, str]] = {
    "hit_tokens_per_second": ("Hit tokens per second", "tokens/s"),
    "hit_ratio": ("Prompt tokens from cache", "ratio"),
    "ttft_hit_p50": ("TTFT of hits, p50", "s"),
    "ttft_hit_p95": ("TTFT of hits, p95", "s"),
    "ttft_miss_p50": ("TTFT of misses, p50", "s"),
    "ttft_miss_p95": ("TTFT of misses, p95", "s"),
    "ttft_miss_minus_hit_p50": ("Misses minus hits, p50", "s"),
    "goodput_ratio": ("Goodput", "ratio"),
    "hotspot_max_over_mean": ("Busiest worker over mean", "×"),
    "evicted_blocks": ("KV blocks evicted", "blocks"),
    "regret_ratio": ("Evicted blocks needed again", "ratio"),
    "kv_transfer_bytes_per_second": ("KV transfers", "bytes/s"),
    "router_decision_p99": ("Router decision, p99", "s"),
    "isolation_violations": ("Isolation violations", "requests"),
    "isolation_audited_ratio": ("Requests audited", "ratio"),
}
"""By name, in the order of the block: title and unit."""

_NO_RECORDS = "no request records: scrape prefixwatch's router, or send GenAI spans"
_NO_EVENTS = "no KV events: set kv_events of the targets"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one model."""

    name: str
    title: str
    unit: str
    value: float | None
    window: str
    why: str = ""
    """Why the value isn't known."""
    bounds: tuple[float, float] | None = None
    """Between which values it is, where that much is known of one that isn't."""


def status(
    targets: Sequence[Target],
    fleet: FleetNumbers,
    requests: Mapping[str, ModelWindow],
    window_seconds: float,
    objectives: Sequence[Objective] = (),
) -> dict[str, Any]:
    """`{"schema": 1, "models": {MODEL: [figure, …]}, "targets": {"up": …, "all": …}}`; the model is empty where nothing
    names it. Without request records goodput by `objectives` is an interval."""
    by_model: dict[str, list[Target]] = defaultdict(list)
    for target in targets:
        if target.system is not None and target.system.role == "engine":
            by_model[target.identity.get("model", "")].append(target)
    decision = _decision_p99(targets)
    hotspots: dict[str, float] = {}
    for peers, one in fleet.hotspots.items():
        model = dict(peers).get("model", "")
        hotspots[model] = max(hotspots.get(model, 0.0), one.max_over_mean)
    models = sorted({*by_model, *requests}, key=lambda model: (not model, model))
    window = f"last {window_seconds:g} s"
    return {
        "schema": 1,
        "targets": {"up": sum(target.up for target in targets), "all": len(targets)},
        "models": {
            model: [
                asdict(each)
                for each in _with_bounds(
                    _figures(by_model[model], hotspots.get(model), requests.get(model), decision, window),
                    by_model[model],
                    objectives,
                )
            ]
            for model in models
        },
    }


def _figures(
    engines: Sequence[Target],
    hotspot: float | None,
    requests: ModelWindow | None,
    decision: float | None,
    window: str,
) -> Iterable[Figure]:
    def figure(name: str, value: float | None, why: str, over: str = window) -> Figure:
        title, unit = TITLES[name]
        return Figure(name, title, unit, value, over, "" if value is not None else why)

    stores = [target.store for target in engines if target.up and target.store]
    both = [
        (store, hits, queries)
        for store in stores
        if (hits := store.grown("prefix_hit_tokens")) is not None
        and (queries := store.grown("prefix_query_tokens")) is not None
    ]
    seconds = max((increase.seconds for store, _, _ in both if (increase := store.increase)), default=0.0)
    hits, queries = sum(one[1] for one in both), sum(one[2] for one in both)
    no_hits = "no engine of the model counts hits and lookups" if not both else "nothing was looked up"
    yield figure("hit_tokens_per_second", hits / seconds if both and seconds else None, no_hits)
    yield figure("hit_ratio", hits / queries if queries else None, no_hits)
    yield from _first_tokens(requests, figure)
    goodput = requests.goodput if requests else None
    no_request = "no request ended" if requests else _NO_RECORDS
    yield figure("goodput_ratio", goodput.value if goodput else None, no_request)
    yield figure("hotspot_max_over_mean", hotspot, "it takes 2 workers of a kind and a request running at a time")
    counts = [found for target in engines if target.kv_events and (found := target.kv_events.counts())]
    evicted = sum(one.evicted_blocks for one in counts) if counts else None
    yield figure("evicted_blocks", evicted, _NO_EVENTS, SINCE_START)
    regret = sum(one.regretted_blocks for one in counts) / evicted if evicted else None
    yield figure("regret_ratio", regret, "nothing was evicted" if counts else _NO_EVENTS, SINCE_START)
    moved = [bytes_ for store in stores if (bytes_ := store.grown("kv_transfer_bytes")) is not None]
    span = max((increase.seconds for store in stores if (increase := store.increase)), default=0.0)
    no_transfer = "no engine of the model counts KV transfers"
    yield figure("kv_transfer_bytes_per_second", sum(moved) / span if moved and span else None, no_transfer)
    yield figure("router_decision_p99", decision, "no router times its decisions, or none decided")
    audited = requests.audited if requests else None
    blind = audited is None or audited.value < LEAST_AUDITED_RATIO
    violations = requests.violations if requests and (requests.violations or not blind) else None
    why = _NO_RECORDS if requests is None else "less than 90 % of the requests could be audited"
    yield figure("isolation_violations", violations, why, SINCE_START)
    yield figure("isolation_audited_ratio", audited.value if audited else None, no_request, "last 600 s")


def _with_bounds(
    figures: Iterable[Figure], engines: Sequence[Target], objectives: Sequence[Objective]
) -> Iterable[Figure]:
    """Goodput that no request record gives is the interval that the engines' shares allow."""
    for figure in figures:
        if figure.name != "goodput_ratio" or figure.value is not None or not objectives:
            yield figure
            continue
        found = goodput_bounds((target.store for target in engines if target.up and target.store), objectives)
        if found is None:
            yield figure
            continue
        lacking = f", not counting {' and '.join(found.unknown)}" if found.unknown else ""
        why = f"{found.low:.1%} to {found.high:.1%} by the engines' own counts{lacking}; exactly: {figure.why}"
        yield replace(figure, why=why, bounds=(found.low, found.high))


def _first_tokens(requests: ModelWindow | None, figure: Any) -> Iterable[Figure]:
    """Of hits: where no prompt is reused as a whole, of those that are reused in part."""
    recent = requests.first_tokens if requests else []
    times = {cache: [one.seconds for one in recent if one.cache == cache] for cache in (HIT, PARTIAL, MISS)}
    kinds = {"hit": times[HIT] or times[PARTIAL], "miss": times[MISS]}
    for kind, seconds in kinds.items():
        enough = len(seconds) >= MIN_OBSERVATIONS
        why = f"{len(seconds)} first tokens, {MIN_OBSERVATIONS} are needed" if requests else _NO_RECORDS
        for quantile in (50, 95):
            value = float(np.percentile(seconds, quantile)) if enough else None
            yield figure(f"ttft_{kind}_p{quantile}", value, why)
    delta = miss_minus_hit(recent).get(0.5)
    why = f"no prompt length has {MIN_OBSERVATIONS} hits and as many misses" if requests else _NO_RECORDS
    yield figure("ttft_miss_minus_hit_p50", delta, why)


def _decision_p99(targets: Sequence[Target]) -> float | None:
    """Of all routers, all steps of a decision together, since they began to count."""
    routers = [t.store for t in targets if t.up and t.store and t.store.system.role == "router"]
    merged = merged_over(routers, "router_decision", "step")
    whole = merged.get(("total",)) or merged.get(("",))
    return whole.quantile(0.99) if whole and whole.counts[-1] >= MIN_OBSERVATIONS else None
