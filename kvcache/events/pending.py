"""What an event stream says before it can be used, or of cache groups that are of no use, whichever index it is for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

PARK_SECONDS = 0.05
"""How long a stored run waits for its parent."""

_PARKED_AT_MOST = 1024
_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

Run = TypeVar("Run")


class ParkedRuns(Generic[Run]):
    """Stored runs that wait for the block before them, oldest first; the oldest gives way to one too many."""

    def __init__(self) -> None:
        self._runs: deque[tuple[Run, float]] = deque()

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return (run for run, _ in self._runs)

    def park(self, run: Run, now_seconds: float) -> int:
        """How many had to go for it."""
        full = len(self._runs) >= _PARKED_AT_MOST
        if full:
            self._runs.popleft()
        self._runs.append((run, now_seconds + PARK_SECONDS))
        return int(full)

    def expire(self, now_seconds: float) -> int:
        """How many have waited too long, and are gone."""
        before = len(self._runs)
        while self._runs and self._runs[0][1] <= now_seconds:
            self._runs.popleft()
        return before - len(self._runs)

    def take(self, which: Sequence[bool]) -> list[Run]:
        """Those for which it is true, of all in their order; they wait no longer."""
        taken = [run for (run, _), ready in zip(self._runs, which, strict=True) if ready]
        if taken:
            self._runs = deque(parked for parked, ready in zip(self._runs, which, strict=True) if not ready)
        return taken

    def clear(self) -> None:
        self._runs.clear()


class AttentionGroups:
    """Which of an engine's cache groups are of full attention: only these say what prefix can be reused."""

    def __init__(self) -> None:
        self._full: dict[int, bool] = {}
        self.others = False
        """Whether a group of another kind was seen: sliding windows, recurrent states."""

    def full(self, group: int | None, attention: str | None = None) -> bool:
        """Of an event's group, which it may describe; undescribed, full attention is the first group's."""
        if attention is None:
            return group is None or self._full.get(group, group == 0)
        full = attention in _FULL_ATTENTION
        self.others = self.others or not full
        if group is not None:
            self._full[group] = full
        return full
