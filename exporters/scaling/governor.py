"""How many workers a group should have: the state machine. Pure; the clock is passed in.

    up     load > target · n for up_seconds                   n becomes ⌈load / target⌉
    down   load ≤ low · target · (n − 1) for down_seconds     n becomes n − 1, where the cache allows it

n is what was last asked for, not what is there: workers that are starting are not asked for twice. Turning round needs
the load to change: after an addition at load L, n − 1 < L / target, so a removal needs a load below low · L; after a
removal at L, an addition needs a load above L / low. So a load that stays within a factor of 1 / low never makes the
fleet turn, and no load makes it remove more than one worker per down_seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

_MOST_WORKERS = 1_000_000
"""The quotient of a load and a tiny target isn't a number of workers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The governor's numbers; `exporters.scaling.config` says what they mean."""

    target_load: float
    low_ratio: float = 0.8
    up_seconds: float = 30.0
    down_seconds: float = 300.0
    min_workers: int = 1
    max_workers: int | None = None
    settle_seconds: float = 900.0
    """The number that is there counts from here on, if it still isn't what was asked for."""

    def bounded(self, workers: int) -> int:
        return max(self.min_workers, workers if self.max_workers is None else min(workers, self.max_workers))


class Rule(StrEnum):
    """What the governor does now, and why."""

    HOLD = "hold"
    """The load is where it should be, or hasn't been elsewhere for long enough."""
    LOAD_HIGH = "load_high"
    """Workers are added."""
    LOAD_LOW = "load_low"
    """One worker is removed."""
    CACHE_WORTH_MORE = "cache_worth_more"
    """One could go, but the cheapest cache to lose costs more than its worker."""
    LOSS_UNKNOWN = "loss_unknown"
    """One could go, but nobody knows what its cache is worth."""
    LOAD_UNKNOWN = "load_unknown"
    """The load that is known is low, but some workers can't be scraped: theirs isn't."""


@dataclass(frozen=True, slots=True)
class State:
    """What was last asked for, and since when the load has been beyond a line."""

    desired: int
    over_since: float | None = None
    under_since: float | None = None
    differs_since: float | None = None
    """Since when the fleet hasn't had the desired number."""
    rule: Rule = Rule.HOLD


def advance(state: State, limits: Limits, now: float, workers: int, load: float, *, gate: Rule | None = None) -> State:
    """The next state, for a group that has `workers` workers and this load in all.

    `gate` forbids a removal, and is the rule that is shown for it; None: one may go.
    """
    state = _settled(state, limits, now, workers)
    desired = limits.bounded(state.desired)
    over, under = load > limits.target_load * desired, load <= limits.low_ratio * limits.target_load * (desired - 1)
    over_since = (now if state.over_since is None else state.over_since) if over else None
    under_since = (now if state.under_since is None else state.under_since) if under else None
    state = replace(state, desired=desired, over_since=over_since, under_since=under_since, rule=Rule.HOLD)
    if over_since is not None and now - over_since >= limits.up_seconds:
        more = limits.bounded(math.ceil(min(load / limits.target_load, _MOST_WORKERS)))
        if more > desired:
            return replace(state, desired=more, over_since=None, rule=Rule.LOAD_HIGH)
    if under_since is not None and now - under_since >= limits.down_seconds and desired > limits.min_workers:
        if gate is not None:
            return replace(state, rule=gate)
        return replace(state, desired=desired - 1, under_since=now, rule=Rule.LOAD_LOW)
    return state


def _settled(state: State, limits: Limits, now: float, workers: int) -> State:
    if workers == state.desired:
        return replace(state, differs_since=None)
    since = now if state.differs_since is None else state.differs_since
    if now - since >= limits.settle_seconds:
        return replace(state, desired=workers, differs_since=None)
    return replace(state, differs_since=since)
