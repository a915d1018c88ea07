"""Why a family of requests isn't there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from exporters.families import MIN_OBSERVATIONS
from exporters.requests.settings import Pricing

_NO_RECORDS = (
    "no request records: let the exporter scrape prefixwatch's router, or send it GenAI spans (the otlp section)"
)
_NONE_YET = "no request has told it yet"
_NO_CACHED = "no request yet whose engine reported cached tokens; vLLM needs --enable-prompt-tokens-details"
_NO_HOLDER = "no request yet for which the router looked who held its prompt; it needs model_dir and a cache_view"
_NO_SESSION = "no session has come back yet; sessions are known by the router's session_header"
_NO_PRICE = "no price: set pricing.gpu_usd_per_hour"
_NO_BASELINE = f"no cold-prefill baseline yet: it takes probes, or {MIN_OBSERVATIONS} misses of a prompt length"
_ROUTER_ONLY = "only the router's own records tell it"

_REASONS: Mapping[str, str] = {
    "request_hit_tokens": _NO_CACHED,
    "ttft_seconds": f"{_NO_CACHED}; answers that aren't streamed have no first token",
    "ttft_by_length_seconds": _NO_CACHED,
    "tenant_ttft_seconds": _NO_CACHED,
    "tenant_prompt_tokens": _NO_CACHED,
    "tenant_hit_tokens": _NO_CACHED,
    "tpot_seconds": "no streamed answer of two tokens yet",
    "e2e_seconds": "no completed request yet",
    "ttft_miss_minus_hit_seconds": f"needs {MIN_OBSERVATIONS} hits and misses of one prompt length in the window",
    "isolation_violations": "no request yet that could be judged",
    "isolation_audited_requests": "the router remembers too little: its caches_at_start, or tenants' memory, leave it "
    "unknown what a tenant had sent",
    "session_prompt_tokens": _NO_SESSION,
    "sessions": _NO_SESSION,
    "sticky_requests": _NO_SESSION,
    "session_migrations": _NO_SESSION,
    "cold_prefill_seconds": "no miss yet",
    "warm_prefill_seconds": "no full hit yet",
    "prefix_miss_cost_ratio": _NO_BASELINE,
    "prefill_saved_gpu_seconds": _NO_BASELINE,
    "router_decisions": _ROUTER_ONLY,
    "topology_placements": f"{_NO_HOLDER}, or the workers have no zones: give fleet.targets zone",
    "predicted_hit_tokens": _NO_HOLDER,
    "prefix_funnel_tokens": _NO_HOLDER,
    "affinity_admissions": _NO_HOLDER,
}


def absences(written: Collection[str], pricing: Pricing, sources: Collection[str]) -> dict[str, str]:
    """By family, for those that aren't among `written`; one reason for all where there are no records."""
    if not sources:
        return {"everything": _NO_RECORDS}
    missing = {name: reason for name, reason in _REASONS.items() if name not in written}
    for cost, time in (
        ("cold_prefill_cost_usd", "cold_prefill_seconds"),
        ("prefill_saved_usd", "prefill_saved_gpu_seconds"),
    ):
        if cost not in written:
            missing[cost] = _NO_PRICE if pricing.gpu_usd_per_hour is None else missing.get(time, _NONE_YET)
    return missing
