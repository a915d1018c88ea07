"""How many requests each worker got of late."""

from __future__ import annotations

from collections import Counter, deque


class RecentRequests:
    """Requests placed within a sliding window, by worker. Memory is bounded by what arrives within the window."""

    def __init__(self, window_seconds: float) -> None:
        self.window_seconds = window_seconds
        self._arrivals: deque[tuple[float, str]] = deque()
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._arrivals)

    def count(self, worker: str) -> int:
        return self._count[worker]

    def add(self, worker: str, now_seconds: float) -> None:
        self._arrivals.append((now_seconds, worker))
        self._count[worker] += 1

    def expire(self, now_seconds: float) -> None:
        """Drop what is older than the window."""
        arrivals, oldest = self._arrivals, now_seconds - self.window_seconds
        while arrivals and arrivals[0][0] < oldest:
            self._count[arrivals.popleft()[1]] -= 1

    def forget(self, worker: str) -> None:
        self._arrivals = deque(arrival for arrival in self._arrivals if arrival[1] != worker)
        self._count.pop(worker, None)
