"""Processes that answer at one address in turn and have one start time, or none: known by their counters alone.

Workers of one server are forked within a moment, and pages that several processes write together show no start time
at all. Each answer of another process then makes counters fall, as a restart does. What a restart doesn't do is to
begin with much of what was counted before, nor to come back to it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from prefixwatch.exporters.scraping.window import Indices, Vector

_MOST_PROCESSES = 16
_RESTARTED_RATIO = 0.02
"""A process that was restarted since the last scrape has counted less than this of what it had."""
_CORRECTED_RATIO = 0.5
"""Counters that fell by less were corrected, as when one of several processes is gone whose counts were in them: what
is left was counted before."""


class Turns:
    """Processes that were left in the last `horizon_seconds`: what their counters showed then."""

    def __init__(self, horizon_seconds: float) -> None:
        self._horizon_seconds = horizon_seconds
        self._left: deque[tuple[float, Vector]] = deque(maxlen=_MOST_PROCESSES)

    def __bool__(self) -> bool:
        return bool(self._left)

    def leave(self, shown: Vector, at_seconds: float) -> None:
        """A process that showed these counters may answer again."""
        self._left.append((at_seconds, shown))

    def back(self, shown: Vector, places: Indices, values: Vector, at_seconds: float) -> Vector | None:
        """What the process had shown of which this page is, where it fits another one than the present better.

        A page is of a process if none of its counters is below what that showed, and of two such of the one from which
        it has grown less. `shown` and `values` are of the counters at `places`.
        """
        while self._left and self._left[0][0] < at_seconds - self._horizon_seconds:
            self._left.popleft()
        best, least = None, _growth(shown, values)
        for place, (_, other) in enumerate(self._left):
            before = np.zeros(max(len(other), int(places.max(initial=-1)) + 1))
            before[: len(other)] = other
            growth = _growth(before[places], values)
            if growth < least:
                best, least = place, growth
        if best is None:
            return None
        found = self._left[best][1]
        del self._left[best]
        return found


def _growth(shown: Vector, values: Vector) -> float:
    """How much a process has counted; infinite where a counter is below what it showed."""
    valid = np.isfinite(values) & (values >= 0)
    grown = values[valid] - shown[valid]
    return float(grown.sum()) if (grown >= 0).all() else np.inf


def is_restart(shown: float, left: float) -> bool:
    """Whether a process whose counters fell from a sum to another began again."""
    return left < _RESTARTED_RATIO * shown


def is_correction(shown: float, left: float) -> bool:
    """Whether what is left after such a fall was counted before."""
    return left > _CORRECTED_RATIO * shown
