"""What one target's signals say: ratios, loads, quantiles; and, for what can't be said, why not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.scraping.quality import (
    contradictions,
    flags,
    hits_by_transfer,
    impossible_ratio,
    missing_signals,
    raw_hit_ratio,
    repeated_lookups,
    reuse,
)
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.window import mean

QUANTILES = (0.5, 0.95, 0.99)

LATENCIES: Mapping[str, str] = {
    "ttft_seconds": "ttft",
    "prefill_seconds": "prefill",
    "queue_seconds": "queue",
    "inter_token_seconds": "inter_token",
    "e2e_seconds": "e2e",
}
"""An engine's latency histograms and what they are called in the output."""

_NOT_ON_THE_PAGE = {
    "kv_capacity_blocks": "its page doesn't say how many KV blocks it has",
    "block_size_tokens": "its page doesn't say how many tokens a KV block has",
    "load_requests": "its page doesn't count the requests of an engine or, if it is a router, of a worker",
}

NO_WINDOW = "needs two successful scrapes of the same process, this target has had fewer"


@dataclass(frozen=True, slots=True)
class TargetNumbers:
    """Derived numbers of one target. None, or a missing key, is unknown: `absent` says why."""

    window_seconds: float | None
    hit_ratio: float | None
    hit_ratio_source: str
    """`computed` (from tokens really computed in prefill) or `cache` (hits over queries)."""
    raw_hit_ratio: float | None
    running: float | None
    waiting: float | None
    hit_ratio_by: Mapping[str, float]
    """Hits over lookups, by engine, of a page that counts them by engine."""
    running_by: Mapping[str, float]
    """Requests running, by engine inside the target; the key is empty where the page doesn't tell them apart."""
    waiting_by: Mapping[str, float]
    kv_usage_by: Mapping[str, float]
    kv_usage_max_ratio: float | None
    kv_usage_mean_ratio: float | None
    kv_capacity_blocks: float | None
    block_size_tokens: float | None
    loads: Mapping[str, float]
    """Running and waiting requests, by engine inside the target or by the router's worker."""
    latency_seconds: Mapping[tuple[str, float], float]
    """Window quantiles by latency and quantile."""
    flags: Mapping[str, bool]
    contradictions: Mapping[str, str]
    """Both values of each flag that holds two sources against each other, while it is raised."""
    absent: Mapping[str, str]


def derive_target(store: SignalStore) -> TargetNumbers:
    """Everything about one target that needs no other."""
    raw, reused = raw_hit_ratio(store), reuse(store)
    usage_by = _usage_ratios(store)
    usage = list(store.gauges_of("kv_usage_ratio").values()) or list(usage_by.values())
    latencies, why_not = _latencies(store)
    raised, own_loads = flags(store), loads(store)
    capacity, block_size = _capacity_blocks(store), _block_size_tokens(store)
    known = {"kv_capacity_blocks": capacity, "block_size_tokens": block_size, "load_requests": own_loads or None}
    why_not |= {name: _NOT_ON_THE_PAGE[name] for name, value in known.items() if value is None}
    return TargetNumbers(
        window_seconds=store.increase.seconds if store.increase else None,
        hit_ratio=reused[0] / reused[1] if reused else None,
        hit_ratio_source=reused[2] if reused else "cache",
        raw_hit_ratio=raw,
        running=_sum(store, "running_requests"),
        waiting=_sum(store, "waiting_requests"),
        hit_ratio_by=_hit_ratios(store),
        running_by=_by_label(store, "running_requests", "engine"),
        waiting_by=_by_label(store, "waiting_requests", "engine"),
        kv_usage_by=usage_by,
        kv_usage_max_ratio=max(usage) if usage else None,
        kv_usage_mean_ratio=mean(usage) if usage else None,
        kv_capacity_blocks=capacity,
        block_size_tokens=block_size,
        loads=own_loads,
        latency_seconds=latencies,
        flags=raised,
        contradictions=contradictions(store, raised),
        absent=why_not | _absent(store, raw),
    )


def loads(store: SignalStore) -> dict[str, float]:
    """Requests running and waiting, by engine; for a router its requests in flight, by worker if it gives them."""
    if store.system.role == "router":
        by_worker = _by_label(store, "in_flight_requests", "worker")
        return {worker: load for worker, load in by_worker.items() if worker}
    running, waiting = _by_label(store, "running_requests", "engine"), _by_label(store, "waiting_requests", "engine")
    return {engine: load + waiting.get(engine, 0.0) for engine, load in running.items()}


def _hit_ratios(store: SignalStore) -> dict[str, float]:
    hits, queries = store.grown_by("prefix_hit_tokens", "engine"), store.grown_by("prefix_query_tokens", "engine")
    if hits_by_transfer(store) or repeated_lookups(store):
        return {}
    return {
        engine: min(hits.get((engine,), 0.0) / looked_up, 1.0) for (engine,), looked_up in queries.items() if looked_up
    }


def _usage_ratios(store: SignalStore) -> dict[str, float]:
    """How full the KV cache is, by engine; of a target that gives bytes or blocks, used over all of them."""
    ratios: dict[str, float] = {}
    for labels, ratio in store.gauges_of("kv_usage_ratio").items():
        engine = dict(labels).get("engine", "")
        ratios[engine] = max(ratio, ratios.get(engine, ratio))
    for unit in ("bytes", "blocks"):
        used, capacity = _sum(store, f"kv_used_{unit}"), _sum(store, f"kv_capacity_{unit}")
        if not ratios and used is not None and capacity:
            return {"": used / capacity}
    return ratios


def _capacity_blocks(store: SignalStore) -> float | None:
    """Blocks of all engines: as their configuration says, else as a gauge does."""
    told = _total([info.get("num_gpu_blocks") for info in store.infos.get("cache_config", ())])
    return _sum(store, "kv_capacity_blocks") if told is None else told


def _block_size_tokens(store: SignalStore) -> float | None:
    """The first engine's, as its configuration says, else as a gauge does: engines of a target don't differ in it."""
    infos = store.infos.get("cache_config", ())
    told = _number(infos[0].get("block_size")) if infos else None
    return next(iter(store.gauges_of("block_size_tokens").values()), None) if told is None else told


def _latencies(store: SignalStore) -> tuple[dict[tuple[str, float], float], dict[str, str]]:
    found: dict[tuple[str, float], float] = {}
    why_not: dict[str, str] = {}
    for signal, name in LATENCIES.items():
        if not store.has(signal):
            if signal in store.system.signals:
                why_not[name] = _no_family(store, signal)
            continue
        merged = store.merged(signal, grown=True)
        if merged is None:
            why_not[name] = NO_WINDOW if store.increase is None else "its series have no bucket +Inf"
        elif merged.count < MIN_OBSERVATIONS:
            why_not[name] = f"{merged.count:.0f} observations in the window, {MIN_OBSERVATIONS} are needed"
        else:
            for q in QUANTILES:
                value = merged.quantile(q)
                if value is None:
                    why_not[name] = _beyond(q, merged.bounds)
                else:
                    found[name, q] = value
    return found, why_not


def _beyond(q: float, bounds: Sequence[float]) -> str:
    finite = bounds[:-1]
    if not finite:
        return "its series have no bucket bound in common but +Inf"
    return f"quantile {q} lies beyond the largest bucket, {finite[-1]:g} s"


def _absent(store: SignalStore, raw: float | None) -> dict[str, str]:
    reasons = {name: why for name, why in store.system.absent.items() if not store.has(_signal_of(name))}
    for name in missing_signals(store):
        reasons[name] = _no_family(store, name)
    if store.increase is None:
        reasons["window"] = NO_WINDOW
    elif impossible_ratio(store):
        reasons["hit_ratio"] = "more tokens were hits than were ever looked up: the counters contradict each other"
    elif hits_by_transfer(store):
        reasons["hit_ratio"] = (
            "its prompts arrive by KV transfer: what was reused is counted by the engines that prefill"
        )
    elif reuse(store) is None and repeated_lookups(store):
        reasons["hit_ratio"] = "lookups are counted more than once, and nothing else says what was cached"
    elif raw is None and store.has("prefix_query_tokens"):
        reasons["hit_ratio"] = "no prompt token was looked up in the window"
    return reasons


def _no_family(store: SignalStore, signal: str) -> str:
    names = ", ".join(family.name for source in store.system.signals[signal].sources for family in source.families)
    return f"none of its families is in the text: {names}"


def _signal_of(quantity: str) -> str:
    """The signal that would give a quantity that the catalogue calls absent."""
    return {"goodput": "goodput_requests", "moe_balance": "moe_balance_count"}.get(quantity, quantity)


def _sum(store: SignalStore, signal: str) -> float | None:
    values = store.gauges_of(signal)
    return sum(values.values()) if values else None


def _by_label(store: SignalStore, signal: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for labels, value in store.gauges_of(signal).items():
        sums[dict(labels).get(label, "")] += value
    return dict(sums)


def _total(texts: list[str | None]) -> float | None:
    numbers = [number for number in map(_number, texts) if number is not None]
    return sum(numbers) if numbers else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
