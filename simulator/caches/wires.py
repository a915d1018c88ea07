"""Links that KV moves over: each carries one transfer at a time, in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Wire:
    """One direction of a link. Without a `gbit_per_second` nothing queues for it."""

    gbit_per_second: float | None
    free_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """To carry this."""
        return 0.0 if self.gbit_per_second is None else size_bytes * 8 / (self.gbit_per_second * 1e9)


def arrival_s(wires: Sequence[Wire], size_bytes: float, now_s: float, latency_s: float, *, book: bool = False) -> float:
    """When the last byte has come over all of these wires at once, at the rate of the slowest; `book`: they are taken
    until it has left."""
    limits = [wire for wire in wires if wire.gbit_per_second is not None]
    starts_s = max([now_s, *(wire.free_s for wire in limits)])
    ends_s = starts_s + max((wire.seconds(size_bytes) for wire in limits), default=0.0)
    if book:
        for wire in limits:
            wire.free_s = ends_s
    return ends_s + latency_s
