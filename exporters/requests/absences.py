"""Why a family of requests is absent."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.requests.config import Pricing

_NO_RECORDS = (
    "no request records: let the exporter scrape prefixwatch's router, or send it GenAI spans (the otlp section)"
)
_NONE_YET = "no request has reported it yet"
_NOT_STREAMED = "no streamed answer yet: an answer that is not streamed has no first token"
_NOT_BOTH = "no streamed answer yet whose engine reported cached tokens"
_NO_CACHED = "no request yet whose engine reported cached tokens; vLLM needs --enable-prompt-tokens-details"
_NO_HOLDER = "no request yet for which the router looked who held its prompt; it needs model_dir and a cache_view"
_NO_SESSION = "no session has come back yet; sessions are known by the router's session_header"
_NO_PRICE = "no price: set pricing.gpu_usd_per_hour"
_NO_BASELINE = f"no cold-prefill baseline yet: it takes probes, or {MIN_OBSERVATIONS} misses of a prompt length"
_ROUTER_ONLY = "reported only by the router's own records"

_REASONS: Mapping[str, str] = {
    "request_hit_tokens": _NO_CACHED,
    "cache_class_requests": _NO_CACHED,
    "tenant_prompt_tokens": _NO_CACHED,
    "tenant_hit_tokens": _NO_CACHED,
    "tpot_seconds": "no streamed answer of two tokens yet",
    "e2e_seconds": "no completed request yet",
    "ttft_miss_minus_hit_seconds": f"needs {MIN_OBSERVATIONS} hits and misses of one prompt length in the window",
    "isolation_violations": "no request yet that could be judged",
    "isolation_findings": "no request yet that could be judged",
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
    "miss_cost_seconds": "fewer than 5 misses of one prompt length in the last 5 minutes whose router knew what their "
    "prefill takes",
    "session_moves": "no session was moved on purpose and came back; set router.moves",
    "router_decisions": _ROUTER_ONLY,
    "topology_placements": f"{_NO_HOLDER}, or the workers have no zones: give fleet.targets zone",
    "predicted_hit_tokens": _NO_HOLDER,
    "prefix_funnel_tokens": _NO_HOLDER,
    "affinity_admissions": _NO_HOLDER,
    "prompt_token_checks": "no completed request yet whose prompt both router and engine counted",
}


_FIRST_TOKENS = ("ttft_seconds", "ttft_by_length_seconds", "tenant_ttft_seconds")


def absences(
    written: Collection[str], pricing: Pricing, sources: Collection[str], unmeasured: Mapping[str, float]
) -> dict[str, str]:
    """By family, for those that aren't among `written`; one reason for all where there are no records.

    `unmeasured` is the share of completed requests that lack a figure, by figure.
    """
    if not sources:
        return {"everything": _NO_RECORDS}
    missing = {name: reason for name, reason in _REASONS.items() if name not in written}
    missing |= {name: _no_first_token(unmeasured) for name in _FIRST_TOKENS if name not in written}
    for cost, time in (
        ("cold_prefill_cost_usd", "cold_prefill_seconds"),
        ("prefill_saved_usd", "prefill_saved_gpu_seconds"),
    ):
        if cost not in written:
            missing[cost] = _NO_PRICE if pricing.gpu_usd_per_hour is None else missing.get(time, _NONE_YET)
    return missing


def _no_first_token(unmeasured: Mapping[str, float]) -> str:
    """What all requests lack of the two that a first token by cache class needs."""
    if unmeasured.get("ttft", 1.0) == 1.0:
        return _NOT_STREAMED if unmeasured else _NONE_YET
    return _NO_CACHED if unmeasured["cached_tokens"] == 1.0 else _NOT_BOTH
