"""The KV blocks that an engine's requests hold, and what was stored and evicted for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefixwatch.engines.model.accounts import BlockEvent, BlockEvicted, BlocksStored, CacheCleared
from prefixwatch.engines.model.block_pool import BlockPool
from prefixwatch.engines.model.sequence import SequenceState


class HeldBlocks:
    """Blocks of `block_size` tokens from a pool. Events are kept only with `keeps_events`."""

    def __init__(self, pool: BlockPool, block_size: int, *, keeps_events: bool) -> None:
        self.pool = pool
        self._size = block_size
        self._keeps_events = keeps_events
        self.events: list[BlockEvent] = []
        """Since the last `drain`, in order."""

    def drain(self) -> list[BlockEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def lacking(self, sequences: Iterable[SequenceState], tokens: int) -> int:
        """Blocks that they don't hold of those for what is computed and `tokens` tokens more of each."""
        size = self._size
        return sum(
            max(0, -(-(each.computed_tokens + tokens) // size) - each.held_blocks - each.blank_blocks)
            for each in sequences
        )

    def grow(self, sequence: SequenceState, tokens: int, hits: int = 0) -> bool:
        """Blocks for the first `tokens` tokens, of which the leading `hits` are cached; False where they don't fit."""
        held = hits or sequence.held_blocks
        missing = max(0, -(-tokens // self._size) - held - sequence.blank_blocks)
        evicted = self.pool.allocate(missing, sequence.blocks[:hits])
        if evicted is None:
            return False
        sequence.held_blocks = held
        sequence.blank_blocks += missing
        if evicted and self._keeps_events:
            self.events.extend(BlockEvicted(block) for block in evicted)
        return True

    def commit(self, sequence: SequenceState) -> None:
        """Blocks that are now full of prompt tokens become reusable."""
        full = min(sequence.computed_tokens // self._size, len(sequence.blocks))
        end = len(sequence.blocks) if sequence.computed_tokens >= sequence.prompt_tokens else full
        first = sequence.held_blocks
        if end <= first:
            return
        stored = self.pool.commit(sequence.blocks[first:end])
        sequence.held_blocks = end
        sequence.blank_blocks -= end - first
        if stored and self._keeps_events:  # blocks already cached come before those that were not
            self.events.append(BlocksStored(sequence.id, end - len(stored), len(stored)))

    def release(self, sequence: SequenceState) -> None:
        """It holds nothing any more, and nothing of it counts as computed."""
        self.pool.release(sequence.blocks[: sequence.held_blocks], sequence.blank_blocks)
        sequence.held_blocks = sequence.blank_blocks = sequence.computed_tokens = 0

    def receive(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Blocks that were sent from elsewhere, head first, are cached from now on; none where they don't fit.

        Return those that weren't cached before, and those evicted for them.
        """
        held = self.pool.match(blocks)
        evicted = self.pool.allocate(len(blocks) - held, blocks[:held])
        if evicted is None:
            return [], []
        stored = self.pool.commit(blocks[held:])
        self.pool.release(blocks)
        return stored, evicted

    def clear(self) -> bool:
        """Forget all cached content; False (and no change) while requests hold blocks."""
        done = self.pool.clear()
        if done and self._keeps_events:
            self.events.append(CacheCleared())
        return done

    def fit_to_their_ends(self, sequences: Iterable[SequenceState]) -> bool:
        """Whether all fit beside each other with their longest answers; shared blocks count twice."""
        capacity = self.pool.capacity_blocks
        return capacity is None or sum(-(-each.longest_tokens // self._size) for each in sequences) <= capacity

    def fit_their_next_tokens(self, sequences: Iterable[SequenceState]) -> bool:
        """Whether there are blocks for the next token of every one."""
        available = self.pool.available_blocks
        return available is None or available >= self.lacking(sequences, 1)
