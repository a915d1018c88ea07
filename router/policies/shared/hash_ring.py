"""The consistent-hash ring of the SGLang gateway.

Each worker has 150 places on a ring of 64-bit positions: the first 8 bytes, little-endian, of BLAKE3 over
`<name>#<place>`. A key lies where BLAKE3 of its text puts it and belongs to the first place at or after
that, clockwise, whose worker is acceptable. Of n workers, one joining or leaving moves about 1/n of the keys.

Source: sgl-project/sglang and smg, `hash_ring.rs`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable

from blake3 import blake3

PLACES_PER_WORKER = 150


def ring_position(text: str) -> int:
    """Where a key or a place lies on the ring."""
    return int.from_bytes(blake3(text.encode()).digest(8), "little")


class HashRing:
    """Keys to workers, stable under change of membership."""

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self._positions: list[int] = []
        self._owners: list[str] = []
        self._members: set[str] = set()
        self.add(workers)

    def __len__(self) -> int:
        """Places on the ring."""
        return len(self._positions)

    def __contains__(self, worker: str) -> bool:
        return worker in self._members

    def add(self, workers: Iterable[str]) -> None:
        """Give these workers their places; those that have them keep them."""
        joining = set(workers) - self._members
        if not joining:
            return
        self._members |= joining
        places = list(zip(self._positions, self._owners, strict=True))
        places += [(ring_position(f"{name}#{k}"), name) for name in joining for k in range(PLACES_PER_WORKER)]
        self._rebuild(places)

    def remove(self, worker: str) -> None:
        """Take a worker's places away; an unknown worker is ignored."""
        if worker in self._members:
            self._members.discard(worker)
            places = zip(self._positions, self._owners, strict=True)
            self._rebuild([place for place in places if place[1] != worker])

    def home(self, key: str, acceptable: Collection[str]) -> str | None:
        """The worker that this key belongs to among the acceptable ones; None when none of those is on the ring."""
        count = len(self._positions)
        start = bisect_left(self._positions, ring_position(key))
        for step in range(count):
            owner = self._owners[(start + step) % count]
            if owner in acceptable:
                return owner
        return None

    def _rebuild(self, places: list[tuple[int, str]]) -> None:
        places.sort()
        self._positions = [position for position, _ in places]
        self._owners = [owner for _, owner in places]
