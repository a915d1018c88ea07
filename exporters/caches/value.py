"""What cached blocks are worth: to keep, to move, to serve from. Pure functions; None is unknown."""

from __future__ import annotations

from prefixwatch.exporters.probes.prefill_baseline import Line
from prefixwatch.exporters.scraping.histogram import Histogram

_QUICKEST_QUANTILE = 0.05


def effective_cache_value_tokens(
    resident_blocks: int | None, block_size_tokens: int | None, hit_ratio: float | None
) -> float | None:
    """Cached tokens times the share of recent prompt tokens that were hits.

    An autoscaler's signal: a worker with little of it is safe to drain, one with much is worth keeping.
    """
    if resident_blocks is None or block_size_tokens is None or hit_ratio is None:
        return None
    return resident_blocks * block_size_tokens * hit_ratio


def break_even_tokens(times: Histogram, moved_bytes: float, kv_bytes_per_token: float, prefill: Line) -> float | None:
    """Prefix length from which moving the KV blocks is quicker than computing them.

    A transfer takes c + n · bytes per token / bandwidth: c, what even the smallest one takes, is the 5 % quantile of
    the transfers' times; what the times sum up to beyond it went into bytes. A cold prefill takes a + b · n by the
    probes' baseline. The lines cross at (c - a) / (b - bytes per token / bandwidth); 0 where moving is always quicker,
    None where it never is, or where nothing was moved.
    """
    overhead = times.quantile(_QUICKEST_QUANTILE)
    if overhead is None or times.total is None or not times.count or moved_bytes <= 0:
        return None
    moving_seconds = max(times.total - times.count * overhead, 0.0)
    per_token = moving_seconds / moved_bytes * kv_bytes_per_token
    gain = prefill.slope_seconds_per_token - per_token
    return max((overhead - prefill.intercept_seconds) / gain, 0.0) if gain > 0 else None
