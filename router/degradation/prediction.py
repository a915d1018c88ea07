"""What first tokens will take, learned from those that came: a line over the prompt tokens to compute before one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

_MIN_SAMPLES = 8
_MIN_QUANTILE_SAMPLES = 5


class TtftLine:
    """TTFT = a + b · tokens, by least squares in which each sample counts `forget` times as much as the next one.

    Tokens are those to be computed before the first token: the worker's backlog and the request's own uncached ones.
    """

    def __init__(self, forget: float = 0.98) -> None:
        self._forget = forget
        self._count = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # weights, x, y, x², xy

    def add(self, tokens: int, seconds: float) -> None:
        """Learn from a first token."""
        weight, x, y, xx, xy = (total * self._forget for total in self._sums)
        self._sums = (weight + 1.0, x + tokens, y + seconds, xx + tokens * tokens, xy + tokens * seconds)
        self._count += 1

    def seconds(self, tokens: int) -> float | None:
        """The first token's time; None before enough was seen. Neither part of the line is ever negative; where all
        samples had about as many tokens, it goes through the origin."""
        if self._count < _MIN_SAMPLES:
            return None
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        varied = spread > 1e-9 * weight * xx
        slope = max(0.0, (weight * xy - x * y) / spread) if varied else 0.0
        start = (y - slope * x) / weight
        if xx and (start < 0.0 or not varied):  # through the origin, then
            start, slope = 0.0, xy / xx
        return start + slope * tokens


class Recent:
    """The values of the last `horizon_seconds`, at most `most` of them."""

    def __init__(self, horizon_seconds: float, most: int = 1024) -> None:
        self._horizon_seconds = horizon_seconds
        self._values: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, now: float, value: float) -> None:
        """Note a value."""
        self._values.append((now, value))

    def values(self, now: float) -> Iterator[float]:
        """Those that are young enough at `now`."""
        oldest = now - self._horizon_seconds
        while self._values and self._values[0][0] < oldest:
            self._values.popleft()
        return (value for _, value in self._values)

    def quantile(self, now: float, share: float) -> float | None:
        """The nearest-rank quantile; None of fewer than 5 values."""
        ordered = sorted(self.values(now))
        if len(ordered) < _MIN_QUANTILE_SAMPLES:
            return None
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def mean(self, now: float) -> float | None:
        """The mean; None of fewer than 5 values."""
        found = list(self.values(now))
        return sum(found) / len(found) if len(found) >= _MIN_QUANTILE_SAMPLES else None
