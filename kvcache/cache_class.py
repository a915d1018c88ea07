"""How much of a prompt an engine found cached, as a class: hit, partial or miss."""

from __future__ import annotations

HIT, PARTIAL, MISS, UNKNOWN = "hit", "partial", "miss", "unknown"


def cache_class(prompt_tokens: int | None, cached_tokens: int | None, block_size: int) -> str:
    """hit: every reusable full block was cached; partial: some; miss: none; unknown: the engine didn't say.

    The last prompt token is always computed, so a prompt of exactly k blocks can reuse k-1 of them.
    """
    if cached_tokens is None or prompt_tokens is None:
        return UNKNOWN
    if cached_tokens <= 0:
        return MISS
    reusable = max(prompt_tokens - 1, 0) // block_size * block_size
    return HIT if cached_tokens >= reusable else PARTIAL
