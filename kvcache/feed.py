"""One worker's KV events applied to the block index that a router looks prompts up in.

Engines name blocks by hashes of their own making, which differ by algorithm, seed and release. Those names are
never matched: blocks are hashed anew from the token ids that the events carry, and the engine's name only finds
a block's parent and says which block was removed.

The index must never claim more than a worker holds: whatever may have been missed is fetched again or the worker is
cleared (`kvcache.event_sequence`), and so it is for a payload that can't be read, which may have held removals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from kvcache.event_sequence import Applied, EventSequence, FeedCounters, Replay
from kvcache.events import (
    BlockId,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    KvEvent,
    Tier,
    decode_batch,
)
from kvcache.index import BlockIndex
from kvcache.parked import PARK_SECONDS, AttentionGroups, ParkedRuns
from kvcache.placement import Credit, Placement, Unplaceable, check_block_size, first_placement, place

__all__ = ["PARK_SECONDS", "Applied", "FeedCounters", "Replay", "WorkerFeed"]


class WorkerFeed(EventSequence):
    """State between one engine's event stream and the index.

    `index` takes what lies on the GPU; `tiers` gives further tiers an index of their own, and events of a tier
    without one are ignored.
    """

    def __init__(
        self,
        worker: str,
        index: BlockIndex,
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        tiers: Mapping[Tier, BlockIndex] | None = None,
    ) -> None:
        super().__init__(worker)
        self.block_size = block_size
        self._indexes: dict[Tier, BlockIndex] = {**(tiers or {}), Tier.GPU: index}
        if len({id(each) for each in self._indexes.values()}) < len(self._indexes):
            raise ValueError("each tier needs an index of its own: removals on one would erase another's blocks")
        self._placements: dict[Tier, dict[BlockId, Placement]] = {tier: {} for tier in self._indexes}
        self._engine_block_size: int | None = None
        self._groups = AttentionGroups()
        self._parked: ParkedRuns[BlockStored] = ParkedRuns()

    @property
    def parked(self) -> int:
        """Stored runs that wait for their parent."""
        return len(self._parked)

    def expire(self, now_seconds: float) -> None:
        """Drop the blocks that have waited too long for their parent."""
        self.counters.unknown_parents += self._parked.expire(now_seconds)

    def _apply_payload(self, payload: bytes, now_seconds: float, done: Applied) -> None:
        self.expire(now_seconds)
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            self.counters.malformed_batches += 1
            self._drop_all()
            done.cleared = True
            return
        done.timestamp = batch.timestamp
        self.counters.ignored_events += batch.unknown_events
        for event in batch.events:
            self._apply_event(event, now_seconds, done)
        self.counters.stored_blocks += len(done.stored)
        self.counters.removed_blocks += len(done.removed)

    def _apply_event(self, event: KvEvent, now_seconds: float, done: Applied) -> None:
        if not isinstance(event, BlockStored | BlockRemoved):
            self._drop_all()
            done.cleared = True
        elif event.tier not in self._indexes or not self._of_full_attention(event):
            self.counters.ignored_events += 1
        elif isinstance(event, BlockRemoved):
            self._remove(event, done)
        else:
            self._store_all(event, now_seconds, done)

    def _of_full_attention(self, event: BlockStored | BlockRemoved) -> bool:
        return self._groups.full(event.group_index, event.attention if isinstance(event, BlockStored) else None)

    def _store_all(self, event: BlockStored, now_seconds: float, done: Applied) -> None:
        """Store a run, then whatever waited for it, then what waited for that."""
        waiting = [event]
        while waiting:
            run = waiting.pop()
            check_block_size(self.worker, run.block_size, self.block_size)
            if not run.token_ids:
                self._copy(run, done)
                continue
            parent = first_placement(run) if run.parent_id is None else self._find(run.parent_id, run.tier)
            if parent is None:
                self.counters.unknown_parents += self._parked.park(run, now_seconds)
                continue
            try:
                placements, credits = place(run, parent, self.block_size)
            except Unplaceable:
                self.counters.ignored_events += 1
                continue
            if run.tier is Tier.GPU:
                self._engine_block_size = run.block_size
            self._store(run, placements, credits, done)
            arrived = frozenset(run.block_ids)
            waiting.extend(self._parked.take([parked.parent_id in arrived for parked in self._parked]))

    def _store(
        self, event: BlockStored, placements: Iterable[Placement], credits: Iterable[Credit], done: Applied
    ) -> None:
        held = self._placements[event.tier]
        stored: list[int] = []
        new = set()
        for block_id, placement in zip(event.block_ids, placements, strict=True):
            if block_id in held:
                held[block_id].copies += 1
            else:
                held[block_id] = placement
                stored.extend(placement.blocks)
                new.add(block_id)
        for credit in credits:
            members = [held.get(block_id) for block_id in credit.block_ids]
            if credit.block_ids[-1] in new and None not in members:
                stored.append(credit.block)
                for member in members:
                    if member is not None and credit.block not in member.blocks:
                        member.blocks += (credit.block,)
        self._credit(event, stored, done)

    def _copy(self, event: BlockStored, done: Applied) -> None:
        """A lower tier took blocks that it names without tokens: they are those the GPU knows by these names.

        Chunks of another size than the GPU's, and blocks smaller than ours, can't be told apart that way.
        """
        if event.block_size != self._engine_block_size or event.block_size < self.block_size:
            self.counters.ignored_events += 1
            return
        held = self._placements[event.tier]
        stored: list[int] = []
        for block_id in event.block_ids:
            known = self._find(block_id, Tier.GPU)
            if known is None:
                self.counters.unknown_parents += 1
            elif block_id not in held:
                held[block_id] = Placement(known.chain, known.part, known.blocks)
                stored.extend(known.blocks)
        self._credit(event, stored, done)

    def _credit(self, event: BlockStored, blocks: list[int], done: Applied) -> None:
        index = self._indexes[event.tier]
        done.stored.extend(block for block in blocks if not index.holds(self.worker, block))
        index.store(self.worker, blocks)
        index.set_retrieval_unit(self.worker, max(event.block_size // self.block_size, 1))

    def _remove(self, event: BlockRemoved, done: Applied) -> None:
        held, index = self._placements[event.tier], self._indexes[event.tier]
        gone = [block_id for block_id in event.block_ids if not _another_copy(held.get(block_id))]
        names = frozenset(gone)
        self._parked.take([run.tier is event.tier and not names.isdisjoint(run.block_ids) for run in self._parked])
        blocks = [block for block_id in gone if block_id in held for block in held.pop(block_id).blocks]
        leaving = list(dict.fromkeys(block for block in blocks if index.holds(self.worker, block)))
        index.remove(self.worker, leaving)
        done.removed.extend(leaving)

    def _find(self, block_id: BlockId, tier: Tier) -> Placement | None:
        """The block's placement: as this tier knows it, or else as any other does."""
        found = self._placements[tier].get(block_id)
        if found is not None:
            return found
        return next((held[block_id] for held in self._placements.values() if block_id in held), None)

    def _forget_blocks(self) -> None:
        for index in self._indexes.values():
            index.clear(self.worker)
        for held in self._placements.values():
            held.clear()
        self._parked.clear()

    def _leave(self) -> None:
        for index in self._indexes.values():
            index.forget(self.worker)


def _another_copy(placement: Placement | None) -> bool:
    """Takes one copy away and says whether the engine still has another."""
    if placement is None or placement.copies == 1:
        return False
    placement.copies -= 1
    return True
