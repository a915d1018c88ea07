"""What an engine model counts, and what it says of its cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start; only ever grow. Tokens unless the name says blocks or requests."""

    query_tokens: int = 0
    """Prompt tokens looked up at first admission."""
    hit_tokens: int = 0
    """Of these, reused."""
    external_hit_tokens: int = 0
    """Of the reused, those whose KV was moved here for the request."""
    query_blocks: int = 0
    hit_blocks: int = 0
    """Leading blocks found here or received, before the last-token rule."""
    prompt_tokens: int = 0
    """Prompt tokens of requests whose prefill has ended."""
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preempted_requests: int = 0
    recomputed_tokens: int = 0
    """Tokens computed a second time after a preemption."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks `first` … `first + count − 1` of a request's prompt can be reused from now on."""

    request_id: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    block: int


@dataclass(frozen=True, slots=True)
class CacheCleared:
    pass


BlockEvent = BlocksStored | BlockEvicted | CacheCleared
