"""How many blocks an engine says it stored and dropped: its KV events counted, and nothing kept of them."""

from __future__ import annotations

from collections.abc import Sequence

from prefixwatch.kvcache.events.sequence import Applied, EventSequence
from prefixwatch.kvcache.events.wire import Cleared, Removed, Stored


class KvEventTally(EventSequence):
    """Counts of one engine's events on the GPU tier, in blocks of the engine's size."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.clears = 0

    @property
    def missed_batches(self) -> int:
        """Batches and events that never came or couldn't be read: above 0, the counts are lower bounds."""
        return self.counters.lost_batches + self.counters.malformed_batches + self.counters.malformed_events

    def _apply_events(self, events: Sequence[Stored | Removed | Cleared], now_seconds: float, done: Applied) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.clears += 1
            elif isinstance(event, Removed):
                self.removed_blocks += len(event.block_hashes)
            else:
                self.stored_blocks += len(event.block_hashes)

    def _forget_blocks(self) -> None:
        """There are none."""

    def _leave(self) -> None:
        """There is nothing to take along."""
