"""What one target's signals say: ratios, loads, quantiles; and, for what can't be said, why not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from exporters.families import MIN_OBSERVATIONS
from exporters.scraping.histogram import merge
from exporters.scraping.quality import computed_hit_ratio, flags, impossible_ratio, missing_signals, raw_hit_ratio
from exporters.scraping.signals import SignalStore

QUANTILES = (0.5, 0.95, 0.99)

LATENCIES: Mapping[str, str] = {
    "ttft_seconds": "ttft",
    "prefill_seconds": "prefill",
    "queue_seconds": "queue",
    "inter_token_seconds": "inter_token",
    "e2e_seconds": "e2e",
}
"""An engine's latency histograms and what they are called in the output."""

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
    kv_usage_max_ratio: float | None
    kv_usage_mean_ratio: float | None
    kv_capacity_blocks: float | None
    block_size_tokens: float | None
    loads: Mapping[str, float]
    """Running and waiting requests, by engine inside the target or by the router's worker."""
    latency_seconds: Mapping[tuple[str, float], float]
    """Window quantiles by latency and quantile."""
    flags: Mapping[str, bool]
    absent: Mapping[str, str]


def derive_target(store: SignalStore) -> TargetNumbers:
    """Everything about one target that needs no other."""
    raw, computed = raw_hit_ratio(store), computed_hit_ratio(store)
    usage = _usage_ratios(store)
    latencies, why_not = _latencies(store)
    return TargetNumbers(
        window_seconds=store.increase.seconds if store.increase else None,
        hit_ratio=raw if computed is None else computed,
        hit_ratio_source="cache" if computed is None else "computed",
        raw_hit_ratio=raw,
        running=_sum(store, "running_requests"),
        waiting=_sum(store, "waiting_requests"),
        kv_usage_max_ratio=max(usage) if usage else None,
        kv_usage_mean_ratio=fmean(usage) if usage else None,
        kv_capacity_blocks=_capacity_blocks(store),
        block_size_tokens=_block_size_tokens(store),
        loads=loads(store),
        latency_seconds=latencies,
        flags=flags(store),
        absent=_absent(store, raw) | why_not,
    )


def loads(store: SignalStore) -> dict[str, float]:
    """Requests running and waiting, by engine; for a router its requests in flight, by worker if it tells."""
    if store.system.role == "router":
        by_worker = _by_label(store, "in_flight_requests", "worker")
        return {worker: load for worker, load in by_worker.items() if worker}
    running, waiting = _by_engine(store, "running_requests"), _by_engine(store, "waiting_requests")
    return {engine: load + waiting.get(engine, 0.0) for engine, load in running.items()}


def _usage_ratios(store: SignalStore) -> list[float]:
    """How full the KV cache is, by engine and model; of a target that gives bytes or blocks, used over all of them."""
    ratios = list(store.gauges_of("kv_usage_ratio").values())
    for unit in ("bytes", "blocks"):
        used, capacity = _sum(store, f"kv_used_{unit}"), _sum(store, f"kv_capacity_{unit}")
        if not ratios and used is not None and capacity:
            return [used / capacity]
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
            continue
        merged = merge(one for group in store.grown_histograms(signal).values() for one in group)
        if merged is None:
            why_not[name] = NO_WINDOW if store.increase is None else "its series have no bucket +Inf"
        elif merged.histogram.count < MIN_OBSERVATIONS:
            why_not[name] = f"{merged.histogram.count:.0f} observations in the window, {MIN_OBSERVATIONS} are needed"
        else:
            for q in QUANTILES:
                value = merged.histogram.quantile(q)
                if value is None:
                    why_not[name] = _beyond(q, merged.histogram.bounds)
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
        sources = store.system.signals[name].sources
        names = ", ".join(family.name for source in sources for family in source.families)
        reasons[name] = f"none of its families is in the text: {names}"
    if store.increase is None:
        reasons["window"] = NO_WINDOW
    elif impossible_ratio(store):
        reasons["hit_ratio"] = "more tokens were hits than were ever looked up: the counters contradict each other"
    elif raw is None and store.has("prefix_query_tokens"):
        reasons["hit_ratio"] = "no prompt token was looked up in the window"
    return reasons


def _signal_of(quantity: str) -> str:
    """The signal that would give a quantity that the catalogue calls absent."""
    return {"goodput": "goodput_requests", "moe_balance": "moe_balance_count"}.get(quantity, quantity)


def _sum(store: SignalStore, signal: str) -> float | None:
    values = store.gauges_of(signal)
    return sum(values.values()) if values else None


def _by_engine(store: SignalStore, signal: str) -> dict[str, float]:
    return _by_label(store, signal, "engine")


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
