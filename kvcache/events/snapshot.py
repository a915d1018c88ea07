"""The third writer of a block index: an engine that reports all keys it holds, from time to time.

Each report is compared with the one before it and only the difference reaches the index, so between reports the index
is as old as the last one. How often to ask follows how much changes: FlexLB aims at 30 changed keys a poll.

Source: FlexLB (rtp-llm), cache status poll: start 100 ms, 50 … 3000 ms, mean change of the last 30 polls, interval
× 0.7 or × 1.3 when that mean is more than 10 % above or below 30. Whether its ±30 % multiplies or adds isn't stated
where this was read; here a step down is × 0.7 and a step up × 1.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass

from prefixwatch.kvcache.index.block_index import BlockIndex

FIRST_INTERVAL_SECONDS = 0.1
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 3.0
_AIM_KEYS = 30.0
_TOLERANCE_RATIO = 0.1
_STEP_RATIO = 0.3
_REMEMBERED_POLLS = 30


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """What changed from one report to the next, in chain hashes."""

    stored: Set[int]
    removed: Set[int]

    @property
    def changed_keys(self) -> int:
        return len(self.stored) + len(self.removed)


class SnapshotWriter:
    """Keeps one worker's blocks in the index equal to its last report."""

    def __init__(self, worker: str, index: BlockIndex) -> None:
        self.worker = worker
        self._index = index
        self._held: set[int] = set()

    def report(self, keys: Iterable[int]) -> SnapshotDiff:
        """All keys the worker holds now."""
        held = set(keys)
        diff = SnapshotDiff(held - self._held, self._held - held)
        self._held = held
        self._write(diff)
        return diff

    def report_changed(self, now_held: Iterable[int], now_gone: Iterable[int]) -> SnapshotDiff:
        """`report`, for a caller that knows which keys may have changed since the last one."""
        diff = SnapshotDiff(set(now_held) - self._held, self._held & set(now_gone))
        self._held |= diff.stored
        self._held -= diff.removed
        self._write(diff)
        return diff

    def forget(self) -> None:
        """The worker has left; its next report is a first one."""
        self._held = set()
        self._index.forget(self.worker)

    def _write(self, diff: SnapshotDiff) -> None:
        self._index.remove(self.worker, diff.removed)
        self._index.store(self.worker, diff.stored)


class PollInterval:
    """How long to wait until the next report: shorter the more changes, within 50 ms and 3 s."""

    def __init__(self) -> None:
        self.seconds = FIRST_INTERVAL_SECONDS
        self._changes: deque[int] = deque(maxlen=_REMEMBERED_POLLS)

    def polled(self, changed_keys: int) -> float:
        """Seconds until the next poll, after one that found this number of changes."""
        self._changes.append(changed_keys)
        self.seconds = next_interval_seconds(self.seconds, sum(self._changes) / len(self._changes))
        return self.seconds


def next_interval_seconds(interval_seconds: float, mean_changed_keys: float) -> float:
    """The interval after this one, given the mean change of the last polls."""
    if mean_changed_keys > _AIM_KEYS * (1 + _TOLERANCE_RATIO):
        interval_seconds *= 1 - _STEP_RATIO
    elif mean_changed_keys < _AIM_KEYS * (1 - _TOLERANCE_RATIO):
        interval_seconds *= 1 + _STEP_RATIO
    return min(max(interval_seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS)
