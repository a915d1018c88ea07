"""A histogram with fixed bounds, as a metrics page shows it."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        seen, found = 0, []
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            seen += count
            found.append((name, float(seen)))
        return found

    @property
    def total(self) -> float:
        return self._total
