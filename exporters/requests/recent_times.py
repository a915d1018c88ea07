"""Quantiles of the latest times of one kind, cheap enough to ask for at every request."""

from __future__ import annotations

from collections import deque

_KEPT = 512
_STALE_AFTER = 16


class RecentTimes:
    """The last 512 observations; their order is taken anew after every 16."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._sorted: list[float] = []
        self._since_sorted = 0

    def __len__(self) -> int:
        return len(self._times)

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        self._since_sorted += 1

    def quantile(self, q: float) -> float:
        """The order statistic at or below this quantile. Raises IndexError without any observation."""
        if not self._sorted or self._since_sorted >= _STALE_AFTER:
            self._sorted, self._since_sorted = sorted(self._times), 0
        return self._sorted[int(q * (len(self._sorted) - 1))]
