"""How many blocks an engine says it stored and dropped: its KV events counted, and nothing kept of them."""

from __future__ import annotations

from kvcache.event_sequence import Applied, EventSequence
from kvcache.events import AllBlocksCleared, BlockStored, EventDecodeError, Tier, decode_batch


class KvEventTally(EventSequence):
    """Counts of one engine's events on the GPU tier, in blocks of the engine's size."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.clears = 0

    @property
    def parked(self) -> int:
        """Nothing waits here."""
        return 0

    @property
    def missed_batches(self) -> int:
        """Batches that never came or couldn't be read: above 0, the counts are lower bounds."""
        return self.counters.lost_batches + self.counters.malformed_batches

    def expire(self, now_seconds: float) -> None:
        """Nothing waits here."""

    def _apply_payload(self, payload: bytes, now_seconds: float, done: Applied) -> None:
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            self.counters.malformed_batches += 1
            return
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clears += 1
            elif event.tier is not Tier.GPU:
                continue
            elif isinstance(event, BlockStored):
                self.stored_blocks += len(event.block_ids)
            else:
                self.removed_blocks += len(event.block_ids)

    def _forget_blocks(self) -> None:
        """There are none."""

    def _leave(self) -> None:
        """There is nothing to take along."""
