"""A canary's trial: when it takes over, when it is rolled back, when it may try again. Pure: results and times in.

    trial        each arm counts good and all requests. When both have `look_at` of them, the 95 % interval of the
                 canary's good share less the control's decides: above -margin: promoted; below 0: rolled back; neither:
                 look again at twice as many. After `most_seconds`: rolled back, undecided
    promoted     the canary has all traffic. Of every `min_requests` the 99.9 % interval of the good share is held
                 against what the control had in the trial: wholly below that less the margin: rolled back
    rolled_back  the control has all traffic, for `cool_down_seconds` the first time and twice as long each further
                 time; then a new trial

So every state has an exit, and in D seconds at most 1 + log2(1 + D / cool_down_seconds) trials begin, whatever comes.
Looks double, so that a trial of n requests has at most 1 + log2(n / min_requests) of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from prefixwatch.slo.wilson import share_difference, wilson

Arm = Literal["canary", "control"]
State = Literal["trial", "promoted", "rolled_back"]
Why = Literal["started", "as good", "worse", "undecided", "regressed", "cooled down"]

_GUARD_CONFIDENCE = 0.999


@dataclass(frozen=True, slots=True)
class Limits:
    min_requests: int = 200
    margin_ratio: float = 0.02
    most_seconds: float = 3600.0
    cool_down_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Transition:
    at_seconds: float
    state: State
    why: Why


@dataclass(slots=True)
class Counts:
    good: int = 0
    total: int = 0


@dataclass(slots=True)
class Trial:
    """Where the canary is, and what its arms have done since."""

    limits: Limits
    state: State = "trial"
    since_seconds: float | None = None
    """Of the state; None before the first request."""
    look_at: int = 0
    rollbacks: int = 0
    baseline: float = 0.0
    """Good share of the control in the trial that ended in a promotion."""
    arms: dict[Arm, Counts] = field(default_factory=lambda: {"canary": Counts(), "control": Counts()})
    transitions: list[Transition] = field(default_factory=list)

    def advance(self, now_seconds: float) -> State:
        """The state now; time alone may have changed it."""
        if self.since_seconds is None:
            self._enter("trial", "started", now_seconds)
        assert self.since_seconds is not None
        passed = now_seconds - self.since_seconds
        if self.state == "trial" and passed >= self.limits.most_seconds:
            self._enter("rolled_back", "undecided", now_seconds)
        elif self.state == "rolled_back" and passed >= self.limits.cool_down_seconds * 2 ** (self.rollbacks - 1):
            self._enter("trial", "cooled down", now_seconds)
        return self.state

    def ended(self, arm: Arm, good: bool, began_seconds: float, now_seconds: float) -> None:
        """A request of this arm is judged; one that began before the state did says nothing of it."""
        self.advance(now_seconds)
        assert self.since_seconds is not None
        if began_seconds < self.since_seconds:
            return
        counts = self.arms[arm]
        counts.total += 1
        counts.good += good
        if self.state == "trial":
            self._look(now_seconds)
        elif self.state == "promoted" and arm == "canary" and counts.total >= self.limits.min_requests:
            self._guard(counts, now_seconds)

    def _look(self, now_seconds: float) -> None:
        canary, control = self.arms["canary"], self.arms["control"]
        if min(canary.total, control.total) < self.look_at:
            return
        found = share_difference((canary.good, control.good), (canary.total, control.total))
        assert found is not None
        low, high = found
        if low > -self.limits.margin_ratio:
            self.baseline = control.good / control.total
            self._enter("promoted", "as good", now_seconds)
        elif high < 0:
            self._enter("rolled_back", "worse", now_seconds)
        else:
            self.look_at *= 2

    def _guard(self, counts: Counts, now_seconds: float) -> None:
        found = wilson(counts.good, counts.total, _GUARD_CONFIDENCE)
        assert found is not None
        if found[1] < self.baseline - self.limits.margin_ratio:
            self._enter("rolled_back", "regressed", now_seconds)
        counts.good = counts.total = 0

    def _enter(self, state: State, why: Why, now_seconds: float) -> None:
        self.state, self.since_seconds, self.look_at = state, now_seconds, self.limits.min_requests
        self.rollbacks += state == "rolled_back"
        for counts in self.arms.values():
            counts.good = counts.total = 0
        self.transitions.append(Transition(now_seconds, state, why))
