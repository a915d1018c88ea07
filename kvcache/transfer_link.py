"""A link that moves KV blocks between engines: how long a transfer takes, alone and behind others.

    seconds = latency + tokens · bytes per token / (compression · bytes per second)

The model is CacheGen's and Mooncake's: a fixed start, then the link's rate. Compressed bytes cost the link less and the
receiver nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvLink:
    """What moving a token's KV takes. Raises ValueError for a rate, size or compression that isn't above 0."""

    bytes_per_second: float
    kv_bytes_per_token: float
    """Of all layers and heads: 131,072 for Llama-3.1-8B in 16 bits."""
    latency_seconds: float = 0.002
    """Before the first byte of a transfer."""
    compression: float = 1.0
    """Bytes before over bytes after."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "kv_bytes_per_token", "compression"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        if not self.latency_seconds >= 0:
            raise ValueError(f"latency_seconds must be at least 0, got {self.latency_seconds:g}")

    def sent_bytes(self, tokens: int) -> float:
        """Bytes on the link for the KV of these tokens."""
        return tokens * self.kv_bytes_per_token / self.compression

    def seconds(self, tokens: int) -> float:
        """One transfer on an idle link; 0 for no tokens."""
        return self.latency_seconds + self.sent_bytes(tokens) / self.bytes_per_second if tokens > 0 else 0.0


@dataclass(slots=True)
class LinkQueue:
    """One end of a link: transfers leave it one after another."""

    link: KvLink
    free_at: float = 0.0
    """When the last transfer ends; the link is idle from then on."""
    sent_bytes: float = 0.0
    transfers: int = 0

    def wait_seconds(self, now: float) -> float:
        """Until a transfer that is asked for now begins."""
        return max(0.0, self.free_at - now)

    def send(self, now: float, tokens: int) -> float:
        """When the transfer of these tokens, asked for now, has ended."""
        self.free_at = max(now, self.free_at) + self.link.seconds(tokens)
        self.sent_bytes += self.link.sent_bytes(tokens)
        self.transfers += 1
        return self.free_at
