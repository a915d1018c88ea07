"""Which block chains were seen before, by owner: exact for the most recent ones, approximate for those before.

A chain hash covers all blocks before it, so whoever has a block has its predecessors, too. Chains are kept as a radix
tree of *segments*: blocks that follow each other without another prompt branching off. A dictionary finds a segment by
its first block, and two comparisons tell whether a prompt has all of it. A prompt that continues a segment at its end
makes it longer, one that leaves it earlier splits it. So a conversation is one segment, whatever its number of turns,
and remembering a prompt takes one entry, whatever its length.

The number of blocks is bounded. The owner that has more than its share gives up its least recently used segments, the
end of a chain before its beginning, a 64th of all blocks at once. What is given up leaves every `GROUP_BLOCKS`th
chain hash, the name of the group that it ends, in a Bloom filter: a prompt may then reach as far as the last group
that the filter, or the tree, knows. A filter never forgets what it took and claims a strange group in 1.4 % of the
cases when it is full, so a bound taken from it is never too small.

Memory: 8 bytes per block, 8 more where a prompt's array holds others' blocks, too; an entry of a few hundred bytes per
segment; and the filter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from prefixwatch.kvcache.blocks import Hashes

GROUP_BLOCKS = 32
SEGMENT_COST_BLOCKS = 32
"""What a segment's own entry counts for, so that many short prompts stay within the bound, too."""
_ROOM_AHEAD = 64
"""What part of the capacity is given up at once."""
_SLOTS_PER_GROUP = 16
"""Two of them are set: a full filter takes one strange group in 70 for its own."""

_HALVES = np.dtype("<u4")


class GroupFilter:
    """A Bloom filter of chain hashes, which are uniform, so their two halves do as hash functions.

    A byte per slot: setting bits would take three times as long.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        slots = 1 << max(capacity * _SLOTS_PER_GROUP - 1, 63).bit_length()
        self._mask = slots - 1
        self._slot_of = np.uint32(self._mask)
        self._slots = np.zeros(slots, dtype=np.uint8)
        self._view = self._slots.data

    def __contains__(self, name: int) -> bool:
        return self._view[name & self._mask] == 1 == self._view[(name >> 32) & self._mask]

    def add(self, names: Hashes) -> None:
        self._slots[(names.astype("<u8", copy=False).view(_HALVES) & self._slot_of).astype(np.intp)] = 1
        self.count += len(names)

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes


@dataclass(slots=True, eq=False)
class _Segment:
    """Blocks that follow each other; `first` is the prompt's block number of their first."""

    first: int
    blocks: Hashes
    branches: bool = False
    """Other segments continue it."""


@dataclass(slots=True, eq=False)
class Owner:
    """One owner's chains."""

    number: int
    blocks: int = 0
    """Remembered, with what their segments cost."""
    forgot: bool = False
    """Some were given up; the filter has their groups."""
    lost: bool = False
    """Some are gone from the filter, too: what it doesn't know may have been there."""
    segments: OrderedDict[_Segment, None] = field(default_factory=OrderedDict)
    """The least recently used first, and so the end of each chain before its beginning."""
    heads: dict[int, _Segment] = field(default_factory=dict)
    """Each segment by its first block."""


class BlockMemory:
    """The chains of all owners, at most `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = 0
        self._owners: OrderedDict[Owner, None] = OrderedDict()
        groups = max(capacity // 8, 1024)
        self._filters = GroupFilter(groups), GroupFilter(groups)
        self._number = 0

    @property
    def filter_nbytes(self) -> int:
        return sum(each.nbytes for each in self._filters)

    def new_owner(self) -> Owner:
        self._number += 1
        owner = Owner(self._number * 0x9E3779B97F4A7C15 % 2**64)
        self._owners[owner] = None
        return owner

    def depth(self, owner: Owner, blocks: Hashes) -> int:
        """Leading blocks that are remembered exactly."""
        return _find(owner, blocks)[0]

    def bound(self, owner: Owner, blocks: Hashes) -> int:
        """Leading blocks that may have been there, remembered or given up: never less than the truth, unless the owner
        has `lost` some."""
        return self._bound(owner, blocks, self.depth(owner, blocks))

    def add(self, owner: Owner, blocks: Hashes) -> tuple[int, int]:
        """Remember a prompt's chain. Return how many of its leading blocks were there already, and may have been."""
        self._owners.move_to_end(owner)
        depth, path = _find(owner, blocks)
        bound = self._bound(owner, blocks, depth) if owner.forgot and depth < len(blocks) else depth
        if depth < len(blocks):
            self._insert(owner, blocks, depth, path)
        for segment in reversed(path):  # the beginning last, so that it is given up last
            owner.segments.move_to_end(segment)
        if self.blocks > self.capacity:
            self._make_room(owner)
        return depth, bound

    def _bound(self, owner: Owner, blocks: Hashes, depth: int) -> int:
        """Most prompts are known wholly or not at all behind `depth`, so its next group and the last one come first."""
        older, newer = self._filters

        def unknown(groups: int) -> bool:
            name = blocks.item(groups * GROUP_BLOCKS - 1) ^ owner.number
            return name not in newer and name not in older

        low, most = depth // GROUP_BLOCKS, len(blocks) // GROUP_BLOCKS
        if low == most or unknown(low + 1):
            groups = low
        elif not unknown(most):
            groups = most
        else:
            groups = low + bisect_left(range(low + 1, most), True, key=unknown)
        return min((groups + 1) * GROUP_BLOCKS - 1, len(blocks))

    def _insert(self, owner: Owner, blocks: Hashes, depth: int, path: list[_Segment]) -> None:
        """Remember the blocks from `depth` on, behind the last segment of `path`, and put a new segment there."""
        cost = len(blocks) - depth
        last = path[-1] if path else None
        if last is not None and depth < last.first + len(last.blocks):
            path[-1] = self._split(owner, last, depth)
        elif last is not None and not last.branches:
            last.blocks = _kept(blocks[last.first :])
            self._count(owner, cost)
            return
        new = _Segment(depth, _kept(blocks[depth:]))
        owner.heads[blocks.item(depth)] = new
        owner.segments[new] = None
        path.append(new)
        self._count(owner, cost + SEGMENT_COST_BLOCKS)

    def _split(self, owner: Owner, segment: _Segment, end: int) -> _Segment:
        """A segment of its own for the blocks before `end`. The others keep theirs, and with it when it was used."""
        at = end - segment.first
        head = _Segment(segment.first, _kept(segment.blocks[:at]), branches=True)
        segment.blocks = _kept(segment.blocks[at:])
        segment.first = end
        owner.heads[head.blocks.item(0)] = head
        owner.heads[segment.blocks.item(0)] = segment
        owner.segments[head] = None
        self._count(owner, SEGMENT_COST_BLOCKS)
        return head

    def _count(self, owner: Owner, cost: int) -> None:
        owner.blocks += cost
        self.blocks += cost

    def _make_room(self, current: Owner) -> None:
        """Whoever has more than an equal share gives way: the owner at hand, or else the one that was idle longest.

        Some room is made ahead, which costs most requests nothing.
        """
        wanted = self.capacity - self.capacity // _ROOM_AHEAD
        share = wanted // len(self._owners)
        groups = list[Hashes]()
        while self.blocks > wanted:
            above = current if current.blocks > share else next(each for each in self._owners if each.blocks > share)
            groups.append(self._give_up(above, max(wanted - self.blocks + above.blocks, share)))
        self._remember_groups(np.concatenate(groups))

    def _give_up(self, owner: Owner, left: int) -> Hashes:
        """The owner's least recently used segments, until it has `left` blocks at most. Return their groups' names."""
        groups, before = list[Hashes](), owner.blocks
        while owner.blocks > left:
            segment, _ = owner.segments.popitem(last=False)
            blocks = segment.blocks
            head = blocks.item(0)
            if owner.heads.get(head) is segment:  # else a hash of another block was the same
                del owner.heads[head]
            owner.blocks -= len(blocks) + SEGMENT_COST_BLOCKS
            groups.append(blocks[(-1 - segment.first) % GROUP_BLOCKS :: GROUP_BLOCKS])
        self.blocks -= before - owner.blocks
        owner.forgot = True
        return np.concatenate(groups) ^ np.uint64(owner.number)

    def _remember_groups(self, names: Hashes) -> None:
        newest = self._filters[-1]
        if newest.count + len(names) > newest.capacity:
            self._filters = newest, GroupFilter(newest.capacity)
            for each in self._owners:
                each.lost = each.lost or each.forgot
        self._filters[-1].add(names)


def _find(owner: Owner, blocks: Hashes) -> tuple[int, list[_Segment]]:
    """How many leading blocks are there, and the segments that have them."""
    depth, path = 0, list[_Segment]()
    while depth < len(blocks):
        segment = owner.heads.get(blocks.item(depth))
        if segment is None or segment.first != depth:  # a block elsewhere whose hash is the same
            break
        path.append(segment)
        own = segment.blocks
        most = min(len(own), len(blocks) - depth)
        if own.item(most - 1) == blocks.item(depth + most - 1):
            depth += most
            continue
        depth += int((own[:most] != blocks[depth : depth + most]).argmax())
        break
    return depth, path


def _kept(blocks: Hashes) -> Hashes:
    """The same blocks, not as a view of an array of which most isn't wanted."""
    whole = blocks.base
    return blocks.copy() if isinstance(whole, np.ndarray) and 2 * blocks.size < whole.size else blocks
