"""Hit ratio against cache size, from a bounded sample of what was looked up: a live miss-ratio curve.

Spatially hashed sampling (SHARDS, Waldspurger et al., FAST 2015): a piece of a prefix is followed if the hash of its
name is below a threshold, so that either all lookups of a piece are seen or none. Between two lookups of a piece an
LRU cache takes in the pieces looked up in between: their size, divided by the sampled share, is the cache size from
which the second lookup hits. When more than `most` pieces are followed the threshold falls. What the sample counts
too much or too little of (one hot piece can be a tenth of all lookups) is booked at the smallest distance (SHARDS-
adj). Pure.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Sequence

_HASHES = 1 << 32
_MIX = 2_654_435_761
"""Knuth's multiplicative hash: names that others sample by must not be sampled alike here."""
_STEPS_PER_DOUBLING = 16
"""Distances are kept to 2^(1/16), 4.4 %."""
_DOUBLINGS = 32


class ReuseDistances:
    """How far back, in tokens of other pieces, each lookup's last one lies.

    A piece is named by 32 bits and has a size; one prompt is the pieces of its prefix, the first one first. An engine
    evicts the end of a prefix before its beginning: so the end is the older one here, too.
    """

    def __init__(self, most: int = 4_096) -> None:
        """`most` is the number of pieces that are followed at a time; it bounds the memory, some 200 bytes each."""
        if most < 1:
            raise ValueError("most: follow at least one piece")
        self._most = most
        self._threshold = _HASHES
        self._slots = _Slots(4 * most)
        self._last: dict[int, int] = {}
        self._by_hash: list[tuple[int, int]] = []
        self._counts = [0.0] * (_STEPS_PER_DOUBLING * _DOUBLINGS)
        self._sampled = 0.0
        self._in_pieces = 0.0
        self._looked_up = 0.0

    @property
    def followed(self) -> int:
        """Pieces that are followed now."""
        return len(self._last)

    @property
    def sampled_ratio(self) -> float:
        """The share of the pieces that is followed."""
        return self._threshold / _HASHES

    @property
    def looked_up_tokens(self) -> float:
        """Recent tokens, older ones counted by what is left of them."""
        return self._looked_up

    def prompt(self, pieces: Sequence[tuple[int, float]], rest: float = 0.0, seen: float = 0.0) -> None:
        """Names and sizes of a prompt's pieces, the first one first, and the tokens behind them that are never reused.

        `seen`: tokens of the opening that were looked up before, where that is known. A piece of which they are the
        beginning is new, and its beginning is not: it lies as far back as the piece before it.
        """
        whole = sum(size for _, size in pieces)
        self._in_pieces += whole
        self._looked_up += rest + whole
        followed = []
        before, start = 0, 0.0
        for name, size in pieces:  # all are looked up before any is used again
            mixed = name * _MIX % _HASHES
            if mixed < self._threshold:
                followed.append((name, mixed, size))
                self._count(name, size)
            if start < seen < start + size and name not in self._last and (slot := self._last.get(before)) is not None:
                self._book(self._slots.above(slot) + seen - start, seen - start)
            before, start = name, start + size
        for name, mixed, size in reversed(followed):
            self._use(name, mixed, size)

    def fade(self, ratio: float) -> None:
        """Let what was counted so far weigh `ratio` of what it does; what is cached stays."""
        self._counts = [count * ratio for count in self._counts]
        self._sampled *= ratio
        self._in_pieces *= ratio
        self._looked_up *= ratio

    def hit_ratios(self, sizes: Iterable[float]) -> list[float] | None:
        """Share of the looked-up tokens that an LRU cache of each size, in tokens, reuses; None before any lookup."""
        if self._looked_up <= 0:
            return None
        missed_by_sampling = self._in_pieces - self._sampled
        return [min(max((self._up_to(size) + missed_by_sampling) / self._looked_up, 0.0), 1.0) for size in sizes]

    def _count(self, name: int, size: float) -> None:
        self._sampled += size / self.sampled_ratio
        slot = self._last.get(name)
        if slot is not None:
            self._book(self._slots.above(slot) + size, size)

    def _book(self, distance: float, size: float) -> None:
        share = self.sampled_ratio
        self._counts[_step(distance / share)] += size / share

    def _use(self, name: int, mixed: int, size: float) -> None:
        if mixed >= self._threshold:  # it fell while this prompt's other pieces were used
            return
        slot = self._last.pop(name, None)
        if slot is None:
            heapq.heappush(self._by_hash, (-mixed, name))
        else:
            self._slots.clear(slot)
        self._last[name] = self._place(size)
        if len(self._last) > self._most:
            self._follow_fewer()

    def _place(self, size: float) -> int:
        slot = self._slots.append(size)
        if slot is None:
            order = sorted(self._last, key=self._last.__getitem__)
            self._last = dict(zip(order, self._slots.compact([self._last[each] for each in order]), strict=True))
            slot = self._slots.append(size)
            assert slot is not None
        return slot

    def _follow_fewer(self) -> None:
        """Let go of the piece with the highest hash, and of all lookups from it on."""
        highest, name = heapq.heappop(self._by_hash)
        self._threshold = -highest
        self._slots.clear(self._last.pop(name))
        while self._by_hash and -self._by_hash[0][0] >= self._threshold:
            _, name = heapq.heappop(self._by_hash)
            self._slots.clear(self._last.pop(name))

    def _up_to(self, size: float) -> float:
        """Tokens whose distance is at most `size`; the step that holds it counts by its share."""
        if size < 1:
            return 0.0
        place = math.log2(size) * _STEPS_PER_DOUBLING
        whole = min(int(place), len(self._counts))
        part = self._counts[whole] * (place - whole) if whole < len(self._counts) else 0.0
        return sum(self._counts[:whole]) + part


def _step(distance: float) -> int:
    """Of a distance in tokens: 1 is the first step."""
    return min(int(math.log2(max(distance, 1.0)) * _STEPS_PER_DOUBLING), _STEPS_PER_DOUBLING * _DOUBLINGS - 1)


class _Slots:
    """Sizes in the order of their last lookup, and the sum above any of them in logarithmic time (Fenwick's tree)."""

    def __init__(self, slots: int) -> None:
        self._sizes = array("d", bytes(8 * slots))
        self._tree = array("d", bytes(8 * (slots + 1)))
        self._used = 0
        self._total = 0.0

    def append(self, size: float) -> int | None:
        """The slot of the newest; None when all are used."""
        if self._used == len(self._sizes):
            return None
        slot = self._used
        self._used += 1
        self._add(slot, size)
        return slot

    def clear(self, slot: int) -> None:
        self._add(slot, -self._sizes[slot])

    def above(self, slot: int) -> float:
        """The sizes in newer slots."""
        below, place = 0.0, slot + 1
        while place > 0:
            below += self._tree[place]
            place &= place - 1
        return max(self._total - below, 0.0)

    def compact(self, kept: Sequence[int]) -> range:
        """The slots that `kept`, oldest first, have once all others are given up."""
        sizes = [self._sizes[slot] for slot in kept]
        self._sizes = array("d", bytes(8 * len(self._sizes)))
        self._tree = array("d", bytes(8 * len(self._tree)))
        self._used, self._total = 0, 0.0
        for size in sizes:
            self.append(size)
        return range(len(sizes))

    def _add(self, slot: int, size: float) -> None:
        self._sizes[slot] += size
        self._total += size
        place = slot + 1
        while place < len(self._tree):
            self._tree[place] += size
            place += place & -place
