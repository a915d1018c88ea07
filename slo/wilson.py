"""The interval of a share, and of the difference of two."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson(good: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Wilson score interval of a share (Wilson, JASA 22, 1927); None of nothing."""
    if total == 0:
        return None
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = good / total
    centre = share + z * z / (2 * total)
    spread = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return (0.0 if good == 0 else low, 1.0 if good == total else high)


def share_difference(good: tuple[int, int], total: tuple[int, int]) -> tuple[float, float] | None:
    """Interval of the first share minus the second, from both Wilson intervals (Newcombe, Stat. Med. 17, 1998, method
    10); None where one is of nothing."""
    first, second = (wilson(good[k], total[k]) for k in (0, 1))
    if first is None or second is None:
        return None
    one, other = good[0] / total[0], good[1] / total[1]
    below = sqrt((one - first[0]) ** 2 + (second[1] - other) ** 2)
    above = sqrt((first[1] - one) ** 2 + (other - second[0]) ** 2)
    return one - other - below, one - other + above
