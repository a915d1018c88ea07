"""A policy's own memory of where it sent which hash, for policies whose published form brings one along.

Hashes are chain hashes (blocks, chunks of text): equal ones mean equal openings. For each worker the hashes are kept
in order of use; for each hash its workers, in the order in which they first got it. The published forms of some
policies never drop anything; here the number of notes is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView

from prefixwatch.router.policy import Memory

MOST_NOTES = 4_000_000
_NOTE_BYTES = 250
"""A note in two dictionaries and the hash itself, measured."""


class RoutedHashes:
    """Which worker was sent what, and when, in order. At most `most` notes are kept: beyond it, the worker with the
    most of them forgets its least recent ones."""

    def __init__(self, most: int = MOST_NOTES) -> None:
        self._most = most
        self._notes = 0
        self._used: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        """Distinct hashes remembered."""
        return len(self._holders)

    def __contains__(self, value: int) -> bool:
        return value in self._holders

    def count(self, worker: str) -> int:
        return len(self._used.get(worker, ()))

    def holders(self, value: int) -> KeysView[str]:
        """Workers that were sent this hash, the first to get it first."""
        return self._holders.get(value, {}).keys()

    def store(self, worker: str, values: Iterable[int]) -> None:
        """Note these for the worker; the last of them is the last that `trim` takes."""
        used, holders = self._used.setdefault(worker, OrderedDict()), self._holders
        before = len(used)
        for value in values:
            used[value] = None
            used.move_to_end(value)
            holders.setdefault(value, {})[worker] = None
        self._notes += len(used) - before
        if self._notes > self._most:
            self._shrink()

    def trim(self, worker: str, capacity: int) -> None:
        """Forget the worker's least recently stored hashes beyond `capacity`."""
        used = self._used.get(worker, OrderedDict())
        while len(used) > capacity:
            self._notes -= 1
            self._drop(used.popitem(last=False)[0], worker)

    def trim_all(self, capacity: int) -> None:
        for worker in self._used:
            self.trim(worker, capacity)

    def forget(self, worker: str) -> None:
        for value in self._used.pop(worker, ()):
            self._notes -= 1
            self._drop(value, worker)

    def memory(self) -> Memory:
        return Memory(self._notes, self._notes * _NOTE_BYTES)

    def _shrink(self) -> None:
        """To nine tenths of the bound, so that it isn't done for each prompt."""
        while (over := self._notes - self._most * 9 // 10) > 0:
            fullest = max(self._used, key=self.count)
            self.trim(fullest, max(0, self.count(fullest) - max(1, over // len(self._used))))

    def _drop(self, value: int, worker: str) -> None:
        held_by = self._holders[value]
        del held_by[worker]
        if not held_by:
            del self._holders[value]
