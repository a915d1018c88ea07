"""Links that carry KV blocks: how long a transfer takes, alone and behind others. Pure.

    seconds = latency + tokens · bytes per token / (compression · rate)

The model is CacheGen's and Mooncake's: a fixed start, then the link's rate. Compressed bytes cost the link less and the
receiver nothing. A link carries one transfer at a time, in the order in which they were asked for; while the latency of
one passes, it carries others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def carrying_seconds(size_bytes: float, gbit_per_second: float | None) -> float:
    """Time that a link of this rate is busy with this; a rate of None is as fast as nobody notices."""
    return 0.0 if gbit_per_second is None else size_bytes * 8 / (gbit_per_second * 1e9)


@dataclass(frozen=True, slots=True)
class KvLink:
    """What moving a token's KV takes. Raises ValueError for a rate, size or compression that isn't above 0."""

    gbit_per_second: float | None
    """None: a transfer takes the latency alone."""
    kv_bytes_per_token: float
    """Of all layers and heads: 131,072 for Llama-3.1-8B in 16 bits."""
    latency_seconds: float = 0.002
    """Of each transfer, beside its bytes."""
    compression: float = 1.0
    """Bytes before over bytes after."""

    def __post_init__(self) -> None:
        for name in ("gbit_per_second", "kv_bytes_per_token", "compression"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value:g}")
        if not self.latency_seconds >= 0:
            raise ValueError(f"latency_seconds must be at least 0, got {self.latency_seconds:g}")

    def sent_bytes(self, tokens: int) -> float:
        """Bytes on the link for the KV of these tokens."""
        return tokens * self.kv_bytes_per_token / self.compression

    def seconds(self, tokens: int) -> float:
        """One transfer on an idle link; 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        return self.latency_seconds + carrying_seconds(self.sent_bytes(tokens), self.gbit_per_second)


@dataclass(slots=True)
class Wire:
    """One direction of a link, or one end of it. Without a `gbit_per_second` nothing queues for it."""

    gbit_per_second: float | None
    free_at: float = 0.0
    """When the last byte of all that was asked for has left it."""

    def wait_seconds(self, now: float) -> float:
        """Until a transfer that is asked for now begins."""
        return max(0.0, self.free_at - now)


def arrival(
    wires: Sequence[Wire], size_bytes: float, now: float, latency_seconds: float, *, book: bool = False
) -> float:
    """When the last byte has come over all of these wires at once, at the rate of the slowest, if asked for now.

    `book`: ask. The wires are taken until it has left.
    """
    limits = [wire for wire in wires if wire.gbit_per_second is not None]
    starts_at = max([now, *(wire.free_at for wire in limits)])
    ends_at = starts_at + max((carrying_seconds(size_bytes, wire.gbit_per_second) for wire in limits), default=0.0)
    if book:
        for wire in limits:
            wire.free_at = ends_at
    return ends_at + latency_seconds
