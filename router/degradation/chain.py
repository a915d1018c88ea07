"""The degradation chain of one request class, as a pure state machine: which steps are taken, and when each ends.

    normal → re-sticky → warm pool → smaller model → asynchronous prefill

A step is entered when the predicted TTFT has been above the objective for `entry_seconds`. Steps add up: the state is
the latest one, and those before it stay in effect unless their own rule has ended them. A step ends

- by relief: the prediction has been at most `exit_ratio` of the objective (or nobody asked) for `relief_seconds`. The
  steps end in reverse order, one at a time. The warm pool also waits for the measured P99 to be back at the objective;
- by its own rule, when it doesn't help: re-sticky when the 5-minute hit ratio stops improving, the smaller model when
  fewer of its answers are completed than of the ordinary ones, asynchronous prefill when its wait exceeds its limit.
  Such a step is spent: it isn't tried again before the class has been calm for `rearm_seconds`.

Between the two lines nothing is entered, and nothing ends by relief. A relapse (an entry less than `rearm_seconds`
after an exit by relief) doubles the relief that the next exit needs, up to `longest_relief_seconds`. So a step that
removes its own cause swings more and more rarely: in D seconds without `rearm_seconds` of calm it is entered at most
2 + log2(1 + D / `relief_seconds`) times. A property test tries the default limits with loads of up to ten minutes.
Calm of `rearm_seconds` begins the count again. All times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

NORMAL = "normal"
_MOST_DOUBLINGS = 32


class Step(StrEnum):
    """What is done for a class under pressure, in the order in which it is tried."""

    RE_STICKY = "re_sticky"
    """Requests go where the opening of their prompt is cached, whatever their session."""
    WARM_POOL = "warm_pool"
    """Some workers are reserved for misses, the others for hits."""
    SMALLER_MODEL = "smaller_model"
    """Clients that accept it get the answer of a smaller model."""
    ASYNC_PREFILL = "async_prefill"
    """Clients that accept it get a 202, and their prompt is computed in the background."""


STATES = (NORMAL, *Step)


class Rule(StrEnum):
    """Why the state changed."""

    PRESSURE = "pressure"
    RELIEF = "relief"
    NO_GAIN = "no_gain"
    UNSATISFYING = "unsatisfying"
    WAIT_TOO_LONG = "wait_too_long"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a class is held to. Raises ValueError where a number can't work."""

    objective_seconds: float = 2.0
    """TTFT above which the chain begins."""
    exit_ratio: float = 0.7
    """Relief begins at this share of the objective."""
    entry_seconds: float = 3.0
    """How long the prediction must be above the objective before a step is entered."""
    dwell_seconds: float = 15.0
    """How long a step lasts at least before the next one is entered, or it ends by relief."""
    relief_seconds: float = 30.0
    longest_relief_seconds: float = 3600.0
    rearm_seconds: float = 300.0
    gain_seconds: float = 300.0
    """How often re-sticky must have gained hits."""
    gain_ratio: float = 0.01
    """The hit ratio that it must have gained in that time."""
    satisfaction_loss_ratio: float = 0.05
    """By how much fewer answers of the smaller model may be completed."""
    wait_seconds: float = 5.0
    """The longest P99 of an asynchronous prefill's wait."""

    def __post_init__(self) -> None:
        if not self.objective_seconds > 0:
            raise ValueError(f"the TTFT objective must be above 0 s, got {self.objective_seconds:g}")
        if not 0 < self.exit_ratio < 1:
            raise ValueError(f"exit_ratio must be between 0 and 1, got {self.exit_ratio:g}: the two lines must differ")


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known of a class at one moment; None is unknown."""

    predicted_ttft_seconds: float | None = None
    """P95 of what was predicted for the newest requests; None when there were hardly any."""
    hit_ratio: float | None = None
    """Hit tokens over prompt tokens of the last 5 minutes."""
    ttft_p99_seconds: float | None = None
    completed_ratio: float | None = None
    """Of the ordinary answers."""
    smaller_completed_ratio: float | None = None
    """Of the smaller model's."""
    async_wait_p99_seconds: float | None = None


class Entry(NamedTuple):
    """A step in effect."""

    step: Step
    since: float
    checked_at: float
    """When its gain was last looked at."""
    hit_ratio: float | None
    """What it was then."""


class Transition(NamedTuple):
    """A step was entered (by pressure), or ended (by any other rule)."""

    at: float
    step: Step
    rule: Rule
    state: str
    """The state afterwards."""


@dataclass(frozen=True, slots=True)
class State:
    """Where a class is in the chain."""

    active: tuple[Entry, ...] = ()
    """In the order of the chain."""
    spent: frozenset[Step] = frozenset()
    """Steps that ended by their own rule since the class was last calm."""
    over_since: float | None = None
    """When the prediction rose above the objective."""
    under_since: float | None = None
    """When it fell to the exit line."""
    relieved_at: float | None = None
    """The last exit by relief."""
    relapses: int = 0

    @property
    def name(self) -> str:
        """`normal`, or the latest step in effect."""
        return self.active[-1].step.value if self.active else NORMAL

    @property
    def steps(self) -> frozenset[Step]:
        """All steps in effect."""
        return frozenset(entry.step for entry in self.active)


def advance(
    state: State, limits: Limits, chain: Sequence[Step], now: float, signals: Signals
) -> tuple[State, list[Transition]]:
    """Return the state after `now`, and the changes that led to it. `chain` has the steps that may be taken."""
    transitions: list[Transition] = []
    state = _useless_ended(_timed(state, limits, now, signals), limits, now, signals, transitions)
    required = min(limits.relief_seconds * 2.0 ** min(state.relapses, _MOST_DOUBLINGS), limits.longest_relief_seconds)
    calm_seconds = 0.0 if state.under_since is None else now - state.under_since
    if state.active and state.under_since is not None and calm_seconds >= required:
        state = _relieved(state, limits, now, signals, transitions)
    elif not state.active and state.under_since is not None and calm_seconds >= limits.rearm_seconds:
        state = replace(state, spent=frozenset(), relapses=0, relieved_at=None)
    elif state.over_since is not None and now - state.over_since >= limits.entry_seconds:
        state, entered = _entered(state, limits, chain, now, signals.hit_ratio)
        transitions += entered
    return state, transitions


def _timed(state: State, limits: Limits, now: float, signals: Signals) -> State:
    predicted = signals.predicted_ttft_seconds
    over = predicted is not None and predicted > limits.objective_seconds
    under = predicted is None or predicted <= limits.objective_seconds * limits.exit_ratio
    return replace(
        state,
        over_since=_since(state.over_since, now) if over else None,
        under_since=_since(state.under_since, now) if under else None,
    )


def _since(earlier: float | None, now: float) -> float:
    return now if earlier is None else earlier


def _useless_ended(state: State, limits: Limits, now: float, signals: Signals, transitions: list[Transition]) -> State:
    for entry in state.active:
        rule = _own_rule(entry, limits, now, signals)
        if rule is not None:
            left = tuple(other for other in state.active if other.step is not entry.step)
            state = replace(state, active=left, spent=state.spent | {entry.step})
            transitions.append(Transition(now, entry.step, rule, state.name))
        elif entry.step is Step.RE_STICKY and now - entry.checked_at >= limits.gain_seconds:
            gained = entry._replace(checked_at=now, hit_ratio=signals.hit_ratio)
            state = replace(state, active=tuple(gained if other is entry else other for other in state.active))
    return state


def _own_rule(entry: Entry, limits: Limits, now: float, signals: Signals) -> Rule | None:
    """The rule by which a step doesn't help, if it applies."""
    if entry.step is Step.RE_STICKY and now - entry.checked_at >= limits.gain_seconds:
        before, after = entry.hit_ratio, signals.hit_ratio
        gained = before is not None and after is not None and after >= before + limits.gain_ratio
        return None if gained else Rule.NO_GAIN
    if entry.step is Step.SMALLER_MODEL:
        usual, smaller = signals.completed_ratio, signals.smaller_completed_ratio
        if usual is not None and smaller is not None and smaller < usual - limits.satisfaction_loss_ratio:
            return Rule.UNSATISFYING
    if entry.step is Step.ASYNC_PREFILL:
        wait = signals.async_wait_p99_seconds
        if wait is not None and wait > limits.wait_seconds:
            return Rule.WAIT_TOO_LONG
    return None


def _relieved(state: State, limits: Limits, now: float, signals: Signals, transitions: list[Transition]) -> State:
    latest = state.active[-1]
    measured = signals.ttft_p99_seconds
    slow = latest.step is Step.WARM_POOL and measured is not None and measured > limits.objective_seconds
    if slow or now - latest.since < limits.dwell_seconds:
        return state
    state = replace(state, active=state.active[:-1], under_since=now, relieved_at=now)
    transitions.append(Transition(now, latest.step, Rule.RELIEF, state.name))
    return state


def _entered(
    state: State, limits: Limits, chain: Sequence[Step], now: float, hit_ratio: float | None
) -> tuple[State, list[Transition]]:
    if state.active and now - max(entry.since for entry in state.active) < limits.dwell_seconds:
        return state, []
    following = next((step for step in chain if step not in state.steps and step not in state.spent), None)
    if following is None:
        return state, []
    relapsed = state.relieved_at is not None and now - state.relieved_at < limits.rearm_seconds
    order = list(chain)
    active = sorted([*state.active, Entry(following, now, now, hit_ratio)], key=lambda e: order.index(e.step))
    state = replace(
        state,
        active=tuple(active),
        over_since=now,
        relieved_at=None if relapsed else state.relieved_at,
        relapses=state.relapses + relapsed,
    )
    return state, [Transition(now, following, Rule.PRESSURE, state.name)]
