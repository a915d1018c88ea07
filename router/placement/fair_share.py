"""How much of the caches each tenant fills, so that one of them can't push out what all the others reuse.

A tenant's *level* is the number of prompt tokens that it had computed, and so stored, lately: each counts less the
longer ago it was, by a factor e per window. While others ask, too, a tenant whose level has reached its share of the
caches has to wait. Then in any window it writes at most about that share, so under LRU what others use again within a
window stays in the rest. A tenant that is alone may fill everything.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from prefixwatch.router.tenant_config import FairnessConfig

_OWNERS = 10_000


@dataclass(slots=True)
class _Level:
    tokens: float = 0.0
    at: float = -math.inf
    """Of the last request; the level is as of then."""


class FairShare:
    """Levels by owner: a tenant, or a trust group. At most 10,000; the one idle longest is forgotten first."""

    def __init__(self, config: FairnessConfig) -> None:
        assert config.cache_tokens is not None
        self._most = config.share * config.cache_tokens
        self._window = config.window_seconds
        self._levels: OrderedDict[str, _Level] = OrderedDict()

    def wait_seconds(self, owner: str, now: float) -> float:
        """How long this owner has to wait before its next request; 0 where it need not."""
        level = self._moved(owner, now)
        if level.tokens < self._most or not self._others_ask(now):
            return 0.0
        return self._window * math.log(level.tokens / self._most) + 1.0

    def wrote(self, owner: str, tokens: int, now: float) -> None:
        """The owner is having this many prompt tokens computed."""
        self._moved(owner, now).tokens += tokens

    def used_ratio(self, now: float) -> float:
        """The highest level of its limit; above 1 only for a tenant that was alone, or by its last prompt."""
        levels = (level.tokens * math.exp((level.at - now) / self._window) for level in self._levels.values())
        return max(levels, default=0.0) / self._most

    def _moved(self, owner: str, now: float) -> _Level:
        """The owner's level as of now; it is the last one in the order from here on."""
        level = self._levels.setdefault(owner, _Level())
        self._levels.move_to_end(owner)
        if len(self._levels) > _OWNERS:
            self._levels.popitem(last=False)
        level.tokens *= math.exp((level.at - now) / self._window)
        level.at = now
        return level

    def _others_ask(self, now: float) -> bool:
        """Whether anyone but the last in the order asked within the window."""
        order = reversed(self._levels.values())
        next(order)
        other = next(order, None)
        return other is not None and now - other.at <= self._window
