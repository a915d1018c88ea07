"""The fleet as JSON: what each target is, what is known of it, and why the rest isn't."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from prefixwatch.exporters.fleet.derivation import FAMILY_OF, derive_fleet
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.metrics_page.families import NAMESPACE
from prefixwatch.exporters.metrics_page.rows import has_samples
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.exporters.source import Source


def fleet_document(targets: Sequence[Target], now_seconds: float, sources: Sequence[Source] = ()) -> dict[str, Any]:
    """`{"schema": 1, "targets": […], "fleet": {…}}`; a number that isn't known is left out, its reason is under
    `absent`. Each further source has a section of its own. `now_seconds` is the monotonic clock that the targets
    were fed with."""
    fleet = derive_fleet(targets)
    numbers: dict[str, Any] = {
        "worker_load_requests": dict(fleet.loads),
        "prefix_hit_ratio": fleet.hit_ratio,
        "hotspot_top_share_ratio": fleet.top_share,
    }
    if fleet.hotspot:
        numbers |= {
            "hotspot_overloaded_ratio": fleet.hotspot.overloaded_ratio,
            "hotspot_max_over_mean": fleet.hotspot.max_over_mean,
            "hotspot_busiest_over_least": fleet.hotspot.busiest_over_least,
        }
    if fleet.ttft_delta:
        numbers["ttft_miss_minus_hit_seconds"] = {str(q): s for q, s in fleet.ttft_delta.seconds.items()}
        numbers["ttft_window_requests"] = {"hit": fleet.ttft_delta.hits, "miss": fleet.ttft_delta.misses}
    told = {family.name for source in sources for family in source.metrics(now_seconds) if has_samples(family)}
    absent = {name: why for name, why in fleet.absent.items() if NAMESPACE + FAMILY_OF.get(name, name) not in told}
    return {
        "schema": 1,
        "targets": [_target(target, now_seconds) for target in targets],
        "fleet": {**_known(numbers), "absent": absent, "notes": dict(fleet.notes)},
        **{source.name: source.document(now_seconds) for source in sources},
    }


def _target(target: Target, now_seconds: float) -> dict[str, Any]:
    health = target.health
    succeeded = health.succeeded_at_seconds
    absent = dict(target.numbers.absent) if target.numbers else {"everything": f"{target.reason}: {target.detail}"}
    if target.kv_events and target.kv_events.counts() is None:
        absent["evicted_blocks"] = target.kv_events.why_unknown()
    elif target.kv_events:
        absent.pop("evicted_blocks", None)
    return {
        "name": target.name,
        "url": shown_url(target.config.url),
        **({"labels": target.config.labels} if target.config.labels else {}),
        "system": target.system.system if target.system else None,
        "title": target.system.title if target.system else None,
        "role": target.system.role if target.system else None,
        "version": target.version or None,
        "up": target.up,
        **({} if target.up else {"reason": target.reason, "detail": target.detail}),
        "scrape": _known(
            {
                "scrapes": health.scrapes,
                "failures": dict(health.failures),
                "duration_seconds": health.last_seconds,
                "body_bytes": health.body_bytes,
                "samples": health.samples,
                "malformed_lines": health.malformed_lines,
                "duplicate_lines": health.duplicate_lines,
                "age_seconds": now_seconds - succeeded if succeeded is not None else None,
            }
        ),
        "signals": _signals(target.store) if target.up and target.store else {},
        "derived": _derived(target),
        "flags": target.flags(now_seconds),
        **({"flag_reasons": found} if (found := target.contradictions()) else {}),
        **({"unread_families": list(target.review.unread)} if target.up and target.review.unread else {}),
        **({"renamed_families": dict(target.renames.families)} if target.up and target.renames.families else {}),
        **({"vanished_families": list(target.vanished)} if target.vanished else {}),
        "absent": absent,
    }


def _derived(target: Target) -> dict[str, Any]:
    numbers = target.numbers
    if numbers is None:
        return {}
    counts = target.kv_events.counts() if target.kv_events else None
    latencies: dict[str, dict[str, float]] = {}
    for (name, quantile), seconds in numbers.latency_seconds.items():
        latencies.setdefault(f"{name}_seconds", {})[str(quantile)] = seconds
    return _known(
        {
            "window_seconds": numbers.window_seconds,
            "prefix_hit_ratio": numbers.hit_ratio,
            "prefix_hit_ratio_source": numbers.hit_ratio_source if numbers.hit_ratio is not None else None,
            "prefix_cache_hit_ratio": numbers.raw_hit_ratio,
            "kv_usage_max_ratio": numbers.kv_usage_max_ratio,
            "kv_usage_mean_ratio": numbers.kv_usage_mean_ratio,
            "kv_capacity_blocks": numbers.kv_capacity_blocks,
            "block_size_tokens": numbers.block_size_tokens,
            "load_requests": dict(numbers.loads) or None,
            "latency": latencies or None,
            "kv_blocks_evicted": counts.evicted_blocks if counts else None,
            "kv_blocks_regretted": counts.regretted_blocks if counts else None,
            "kv_blocks_resident": counts.resident_blocks if counts else None,
        }
    )


def _signals(store: SignalStore) -> dict[str, Any]:
    """Every canonical signal that the target gives, with its unit."""
    found: dict[str, Any] = {}
    for name, signal in store.system.signals.items():
        if not store.has(name):
            continue
        entry: dict[str, Any] = {"kind": signal.kind, "unit": signal.unit}
        if signal.kind == "gauge":
            entry["series"] = [
                {"labels": dict(labels), "value": value} for labels, value in store.gauges_of(name).items()
            ]
        elif signal.kind == "counter":
            labels = sorted(
                {*signal.labels, *(label for s in signal.sources for f in s.families for label in f.labels)}
            )
            entry["series"] = [
                {"labels": dict(zip(labels, values, strict=True)), "value": value}
                for values, value in store.totals_by(name, *labels).items()
            ]
        elif signal.kind == "histogram":
            entry |= {"count": store.total(name, "count"), "sum": store.total(name, "sum")}
        if signal.notes:
            entry["notes"] = signal.notes
        found[name] = entry
    return found


def _known(numbers: dict[str, Any]) -> dict[str, Any]:
    """Without what isn't known; JSON has no infinity, so that is left out as well."""
    return {
        name: value
        for name, value in numbers.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }
