"""Bucket bounds of the exporter's histograms: a threshold between two bounds is refused, not interpolated.

In seconds, tokens or as a ratio, by family name, without +Inf. The exporter builds its histograms with these bounds.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

DECISION_SECONDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 8e-3),
    *(12e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
LATENCY_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TENANT_LATENCY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0, 30.0)
"""Fewer bounds for the family with by far the most series: one histogram a tenant, model and cache class."""
LENGTH_LATENCY_SECONDS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)
MISS_COST_RATIO = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
HIT_TOKENS = (0.0, 16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0, 32_768.0, 65_536.0, 131_072.0)

BOUNDS: Mapping[str, Sequence[float]] = {
    "prefixwatch_router_decision_seconds": DECISION_SECONDS,
    "prefixwatch_ttft_seconds": LATENCY_SECONDS,
    "prefixwatch_ttft_by_length_seconds": LENGTH_LATENCY_SECONDS,
    "prefixwatch_tenant_ttft_seconds": TENANT_LATENCY_SECONDS,
    "prefixwatch_e2e_seconds": LATENCY_SECONDS,
    "prefixwatch_tpot_seconds": LATENCY_SECONDS,
    "prefixwatch_cold_prefill_seconds": LATENCY_SECONDS,
    "prefixwatch_warm_prefill_seconds": LATENCY_SECONDS,
    "prefixwatch_prefill_wait_seconds": LATENCY_SECONDS,
    "prefixwatch_prefix_miss_cost_ratio": MISS_COST_RATIO,
    "prefixwatch_request_hit_tokens": HIT_TOKENS,
}


def nearest(bounds: Sequence[float], value: float) -> tuple[float, ...]:
    """The bounds just below and just above a value that isn't one of them; a single one at either end."""
    ordered = sorted(bounds)
    place = bisect.bisect_left(ordered, value)
    return tuple(ordered[max(place - 1, 0) : place + 1])


def le_matcher(value: float) -> str:
    """`le_condition` as a matcher: `le="0.5"`."""
    operator, text = le_condition(value)
    return f'le{operator}"{text}"'


def le_condition(value: float) -> tuple[str, str]:
    """Operator and value that match a bound in Prometheus 2 (`1`), Prometheus 3 and prometheus_client (`1.0`).

    `le="1"` matches nothing where `1.0` is stored (prometheus/prometheus#14485, SL06).
    """
    if value == int(value) and abs(value) < 1e15:
        return "=~", f"{int(value)}([.]0)?"
    shortest = repr(value)
    spellings = sorted({shortest, f"{value:g}", f"{value:f}".rstrip("0")})
    exact = [text for text in spellings if float(text) == value]
    if len(exact) == 1:
        return "=", exact[0]
    return "=~", "|".join(text.replace(".", "[.]").replace("+", "[+]") for text in exact)
