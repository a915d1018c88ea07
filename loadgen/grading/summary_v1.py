"""Reads summary.json of schema 1, in which each figure was two fields, `x` and `x_ci95`, at a place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_QUANTILES = ("p50", "p95", "p99")
_LATENCIES = {
    "ttft": "ttft_ms", "ttft_hit": "ttft_hit_ms", "ttft_partial": "ttft_partial_ms", "ttft_miss": "ttft_miss_ms",
    "ttft_from_send": "ttft_from_send_ms", "tpot": "tpot_ms", "itl": "itl_ms", "chunk_gap": "chunk_gap_ms",
    "e2e": "e2e_ms", "client_lag": "client_lag_ms", "router_decision": "router_decision_us",
}  # fmt: skip
"""Figure name without its quantile → field of the policy."""
_UNITS = {"ratio": "ratio", "share": "ratio", "rps": "req/s", "second": "tokens/s", "mean": "x"}
"""Last word of a name → unit, where it isn't tokens."""
_OTHERS = ("goodput_rps", "goodput_ratio", "not_completed_ratio", "output_tokens_per_second")
_REUSE = (
    "prompt_tokens", "hit_tokens", "expected_hit_tokens", "hit_ratio", "block_hit_ratio", "hit_tokens_mean",
    "hit_tokens_p50", "hit_tokens_p95",
)  # fmt: skip
_RENAMED = {
    "ttft_p95_ms": "ttft_p95", "ttft_p50_ms": "ttft_p50", "tpot_p95_ms": "tpot_p95", "itl_p95_ms": "itl_p95",
    "e2e_p50_ms": "e2e_p50", "e2e_p95_ms": "e2e_p95",
}  # fmt: skip
"""Compared figures."""


def from_schema_1(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same summary in schema 2. Anything unexpected is left for validation to refuse."""
    policies = {name: _policy(own) for name, own in content["policies"].items()}
    rows = [row for row in content["comparison"] if row["metric"] != "completed_ratio"]
    comparison = [{**row, "metric": _RENAMED.get(row["metric"], row["metric"])} for row in rows]
    return {**content, "schema": 2, "policies": policies, "comparison": comparison}


def _policy(old: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("cache_class_basis", "reasons", "prediction", "isolation_violations", "objectives")
    return {
        **{name: old[name] for name in kept if name in old},
        "requests": _counts(old["requests"]),
        "figures": list(_figures(old)),
        "classes": {name: _class(own) for name, own in old.get("classes", {}).items()},
    }


def _class(old: Mapping[str, Any]) -> dict[str, Any]:
    figures = [*_quantiles(old, "ttft", None), _figure("goodput_ratio", old["goodput_ratio"], old["goodput_ci95"])]
    return {"requests": _counts(old["requests"]), "figures": figures, "objectives": old["objectives"]}


def _counts(old: Mapping[str, Any]) -> dict[str, Any]:
    """Schema 1 counted cancelled and never sent requests together, as cut off, and broken answers as failed."""
    never_sent = min(old["scheduled"] - old["sent"], old["cut_off"])
    return {**old, "cut_off": 0, "cancelled": old["cut_off"] - never_sent, "never_sent": never_sent}


def _figures(old: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in _LATENCIES:
        yield from _quantiles(old, name, old["samples"].get(name))
    for name in _REUSE:
        yield _figure(name, old["prefix"].get(name), old["prefix"].get(f"{name}_ci95"))
    for name in _OTHERS:
        interval = "goodput_ci95" if name == "goodput_ratio" else f"{name}_ci95"
        yield _figure(name, old.get(name), old.get(interval))
    for name, value in old["hotspot"].items():
        yield _figure(f"hotspot_{name}", value, None)


def _quantiles(old: Mapping[str, Any], name: str, n: int | None) -> Iterator[dict[str, Any]]:
    field = _LATENCIES[name]
    values, limits = old.get(field) or {}, old.get(f"{field}_ci95") or {}
    for point in _QUANTILES:
        figure = _figure(f"{name}_{point}", values.get(point), limits.get(point))
        yield {**figure, "unit": field.rpartition("_")[2], "n": n}


def _figure(name: str, value: Any, ci95: Any) -> dict[str, Any]:
    return {"name": name, "unit": _UNITS.get(_last_word(name), "tokens"), "value": value, "ci95": ci95, "n": None}


def _last_word(name: str) -> str:
    return "tokens" if name == "hit_tokens_mean" else name.rpartition("_")[2]
