"""One worker's KV events applied to the block index that a router looks prompts up in.

Engines name blocks by hashes of their own making, which differ by algorithm, seed and release. Those names are
never matched: blocks are hashed again from the token ids that the events carry, and the engine's name only finds
a block's parent and says which block was removed. The index must never claim more than a worker holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.events.block_mapping import Credit, Placement, Unplaceable, check_block_size, place
from prefixwatch.kvcache.events.pending import PARK_SECONDS
from prefixwatch.kvcache.events.sequence import Applied, EventSequence, FeedCounters, Replay
from prefixwatch.kvcache.events.wire import BlockId, Cleared, EventDecodeError, Namespace, Removed, Stored, Tier
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.index.keyed_blocks import BlockKey

__all__ = ["PARK_SECONDS", "Applied", "FeedCounters", "Replay", "WorkerFeed"]


class WorkerFeed(EventSequence):
    """State between one engine's event stream and the index.

    `index` takes what lies on the GPU; `tiers` gives further tiers an index of their own, and events of a tier
    without one are ignored. With a `key`, the index knows blocks by their hashes under it.
    """

    def __init__(
        self,
        worker: str,
        index: BlockIndex,
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        tiers: Mapping[Tier, BlockIndex] | None = None,
        key: BlockKey | None = None,
    ) -> None:
        super().__init__(worker, {Tier.GPU, *(tiers or ())})
        self.block_size = block_size
        self._indexes: dict[Tier, BlockIndex] = {**(tiers or {}), Tier.GPU: index}
        if len({id(each) for each in self._indexes.values()}) < len(self._indexes):
            raise ValueError("each tier needs an index of its own: removals on one would erase another's blocks")
        self._placements: dict[Tier, dict[BlockId, Placement]] = {tier: {} for tier in self._indexes}
        self._key = key
        self._engine_block_size: int | None = None

    def _apply_events(self, events: Sequence[Stored | Removed | Cleared], now_seconds: float, done: Applied) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self._drop_all()
                done.cleared = True
            elif isinstance(event, Removed):
                self._remove(event, done)
            else:
                self._store_all(event, now_seconds, done)
        self.counters.stored_blocks += len(done.stored)
        self.counters.removed_blocks += len(done.removed)

    def _store_all(self, event: Stored, now_seconds: float, done: Applied) -> None:
        """Store a run, then whatever waited for it, then what waited for that."""
        waiting = [event]
        while waiting:
            run = waiting.pop()
            try:
                tokens = run.tokens()
            except EventDecodeError as error:
                self._leave_out(str(error))
                continue
            check_block_size(self.worker, run.block_size, self.block_size)
            if not tokens:
                self._copy(run, done)
                continue
            first = run.parent_block_hash is None
            parent = Placement(self._root(run.namespace())) if first else self._find(run.parent_block_hash, run.tier)
            if parent is None:
                self.counters.unknown_parents += self._parked.park(run, now_seconds)
                continue
            try:
                placements, credits = place(run, tokens, parent, self.block_size, self._key)
            except Unplaceable:
                self.counters.ignored_events += 1
                continue
            if run.tier is Tier.GPU:
                self._engine_block_size = run.block_size
            self._store(run, placements, credits, done)
            arrived = frozenset(run.block_hashes)
            waiting.extend(self._parked.take([parked.parent_block_hash in arrived for parked in self._parked]))

    def _root(self, namespace: Namespace) -> int | None:
        return namespace.root() if self._key is None else self._key.root(*namespace)

    def _store(self, event: Stored, placements: Iterable[Placement], credits: Iterable[Credit], done: Applied) -> None:
        held = self._placements[event.tier]
        stored: list[int] = []
        new = set()
        for block_id, placement in zip(event.block_hashes, placements, strict=True):
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

    def _copy(self, event: Stored, done: Applied) -> None:
        """A lower tier took blocks that it names without tokens: they are those the GPU knows by these names.

        Chunks of another size than the GPU's, and blocks smaller than ours, can't be told apart that way.
        """
        if event.block_size != self._engine_block_size or event.block_size < self.block_size:
            self.counters.ignored_events += 1
            return
        held = self._placements[event.tier]
        stored: list[int] = []
        for block_id in event.block_hashes:
            known = self._find(block_id, Tier.GPU)
            if known is None:
                self.counters.unknown_parents += 1
            elif block_id not in held:
                held[block_id] = Placement(known.chain, known.part, known.blocks)
                stored.extend(known.blocks)
        self._credit(event, stored, done)

    def _credit(self, event: Stored, blocks: list[int], done: Applied) -> None:
        index = self._indexes[event.tier]
        done.stored.extend(block for block in blocks if not index.holds(self.worker, block))
        index.store(self.worker, blocks)
        index.set_retrieval_unit(self.worker, max(event.block_size // self.block_size, 1))

    def _remove(self, event: Removed, done: Applied) -> None:
        held, index = self._placements[event.tier], self._indexes[event.tier]
        gone = [block_id for block_id in event.block_hashes if not _another_copy(held.get(block_id))]
        names = frozenset(gone)
        self._parked.take([run.tier is event.tier and not names.isdisjoint(run.block_hashes) for run in self._parked])
        blocks = [block for block_id in gone if block_id in held for block in held.pop(block_id).blocks]
        leaving = list(dict.fromkeys(block for block in blocks if index.holds(self.worker, block)))
        index.remove(self.worker, leaving)
        done.removed.extend(leaving)

    def _find(self, block_id: BlockId | None, tier: Tier) -> Placement | None:
        """The block's placement: as this tier knows it, or else as any other does."""
        if block_id is None:
            return None
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
