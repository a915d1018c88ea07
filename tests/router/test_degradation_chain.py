"""The degradation chain: what begins each step and what ends it, whatever the load does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.router.degradation.chain import NORMAL, Limits, Rule, Signals, State, Step, Transition, advance

LIMITS = Limits(objective_seconds=2.0)
CHAIN = list(Step)
HOUR = 3600


def run(
    signals: Iterable[Signals], state: State | None = None, start: float = 0.0, every: float = 1.0
) -> tuple[State, list[Transition]]:
    """One signal every second, or as said."""
    state, seen = state or State(), []
    for number, signal in enumerate(signals):
        state, changes = advance(state, LIMITS, CHAIN, start + number * every, signal)
        seen += changes
    return state, seen


def predicted(seconds: float | None, **others: float) -> Signals:
    return Signals(predicted_ttft_seconds=seconds, **others)


def entries(transitions: Iterable[Transition], step: Step) -> list[float]:
    return [each.at for each in transitions if each.step is step and each.rule is Rule.PRESSURE]


def test_steps_are_entered_in_order_while_the_prediction_stays_above_the_objective() -> None:
    state, seen = run([predicted(2.1)] * 60)

    assert [(each.at, each.state) for each in seen] == [
        (3, "re_sticky"), (18, "warm_pool"), (33, "smaller_model"), (48, "async_prefill"),
    ]  # fmt: skip
    assert state.name == "async_prefill"
    assert state.steps == frozenset(Step)


def test_steps_end_in_reverse_order_once_the_prediction_is_at_the_exit_line() -> None:
    state, _ = run([predicted(3.0)] * 60)
    state, seen = run([predicted(1.4)] * 130, state=state, start=60)

    assert [(each.at, each.step) for each in seen] == [
        (90, Step.ASYNC_PREFILL), (120, Step.SMALLER_MODEL), (150, Step.WARM_POOL), (180, Step.RE_STICKY),
    ]  # fmt: skip
    assert {each.rule for each in seen} == {Rule.RELIEF}
    assert state.name == NORMAL


def test_the_warm_pool_stays_until_the_measured_p99_is_back_at_the_objective() -> None:
    state, _ = run([predicted(3.0)] * 20)
    state, seen = run([predicted(1.0, ttft_p99_seconds=2.5)] * 100, state=state, start=20)
    assert (state.name, seen) == ("warm_pool", [])

    state, seen = run([predicted(1.0, ttft_p99_seconds=2.0)] * 1, state=state, start=120)
    assert [(each.step, each.rule) for each in seen] == [(Step.WARM_POOL, Rule.RELIEF)]


@pytest.mark.parametrize(
    ("seconds", "signal", "left"),
    [
        (303, Signals(2.5, hit_ratio=0.5), (Step.RE_STICKY, Rule.NO_GAIN)),
        (303, Signals(2.5), (Step.RE_STICKY, Rule.NO_GAIN)),
        (33, Signals(2.5, completed_ratio=0.99, smaller_completed_ratio=0.9), (Step.SMALLER_MODEL, Rule.UNSATISFYING)),
        (48, Signals(2.5, async_wait_p99_seconds=5.1), (Step.ASYNC_PREFILL, Rule.WAIT_TOO_LONG)),
    ],
)
def test_a_step_that_does_not_help_ends_and_is_not_tried_again_under_the_same_pressure(
    seconds: int, signal: Signals, left: tuple[Step, Rule]
) -> None:
    state, seen = run([signal] * HOUR)

    exits = [each for each in seen if each.rule is not Rule.PRESSURE]
    assert [(each.step, each.rule) for each in exits if each.step is left[0]] == [left]
    assert len(entries(seen, left[0])) == 1
    assert seconds <= next(each.at for each in exits if each.step is left[0]) <= seconds + 1
    assert left[0] not in state.steps


def test_re_sticky_stays_as_long_as_the_hit_ratio_rises() -> None:
    rising = [predicted(2.5, hit_ratio=0.3 + 0.00005 * second) for second in range(4000)]
    assert Step.RE_STICKY in run(rising)[0].steps


def test_a_spent_step_is_tried_again_after_the_class_was_calm() -> None:
    state, _ = run([Signals(2.5, async_wait_p99_seconds=9.0)] * 100)
    assert Step.ASYNC_PREFILL in state.spent
    state, _ = run([predicted(None)] * 700, state=state, start=100)
    assert (state.name, state.spent) == (NORMAL, frozenset())
    assert run([predicted(2.5)] * 60, state=state, start=800)[0].name == "async_prefill"


loads = st.lists(st.one_of(st.none(), st.floats(0.0, 10.0)), min_size=1, max_size=20)
"""Predictions of a bounded load, each held for a while."""


def held(load: list[float | None], seconds: int) -> list[Signals]:
    return [predicted(value) for value in load for _ in range(seconds)]


@settings(max_examples=30, deadline=None)
@given(load=loads, seconds=st.integers(1, 30))
def test_no_bounded_load_makes_a_step_swing(load: list[float | None], seconds: int) -> None:
    """Each return to a step needs twice the calm of the last: in D seconds at most log2(1 + D / relief) returns."""
    signals = held(load, seconds)
    _, seen = run(signals)

    for step in Step:
        at = entries(seen, step)
        assert len(at) <= 2 + math.log2(1 + len(signals) / LIMITS.relief_seconds)
        assert all(later - earlier >= LIMITS.dwell_seconds for earlier, later in pairwise(at))


@settings(max_examples=30, deadline=None)
@given(before=loads, band=st.lists(st.floats(1.401, 2.0), min_size=1, max_size=200))
def test_between_the_two_lines_nothing_is_entered_and_nothing_is_relieved(
    before: list[float | None], band: list[float]
) -> None:
    signals = held(before, 10)
    state, _ = run(signals)
    _, seen = run([predicted(value) for value in band], state=state, start=len(signals))
    assert not {each.rule for each in seen} & {Rule.PRESSURE, Rule.RELIEF}


@settings(max_examples=25, deadline=None)
@given(load=loads, value=st.one_of(st.none(), st.floats(0.0, 10.0)))
def test_a_constant_load_ends_in_one_state(load: list[float | None], value: float | None) -> None:
    signals = held(load, 20)
    state, _ = run(signals)
    settled, _ = run([predicted(value)] * 480, state=state, start=len(signals), every=30)
    _, later = run([predicted(value)] * 120, state=settled, start=len(signals) + 4 * HOUR, every=30)
    assert later == []


@settings(max_examples=25, deadline=None)
@given(load=loads, calm=st.one_of(st.none(), st.floats(0.0, 1.4)))
def test_every_entry_has_an_exit_calm_leads_back_to_normal_from_wherever_it_got(
    load: list[float | None], calm: float | None
) -> None:
    signals = held(load, 20)
    state, seen = run(signals)
    longest = len(Step) * (LIMITS.relief_seconds * 2**state.relapses + 10)
    state, left = run([predicted(calm)] * int(longest / 10 + 2), state=state, start=len(signals), every=10)

    assert state.name == NORMAL
    for step in Step:
        assert len(entries(seen + left, step)) == sum(
            each.step is step and each.rule is not Rule.PRESSURE for each in seen + left
        )


@pytest.mark.parametrize("relieved_ttft", [0.5, 1.0, 1.3])
def test_a_step_that_removes_its_own_cause_comes_back_ever_more_rarely(relieved_ttft: float) -> None:
    """Closed loop: the load is too high without the step, and fine with it."""
    plant: Callable[[State], float] = lambda state: relieved_ttft if state.active else 4.0  # noqa: E731
    state, seen = State(), []
    for second in range(0, 6 * HOUR, 2):
        state, changes = advance(state, LIMITS, CHAIN, second, predicted(plant(state)))
        seen += changes

    at = entries(seen, Step.RE_STICKY)
    assert len(at) <= 12
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert all(later >= 1.5 * earlier for earlier, later in pairwise(gaps))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"objective_seconds": 0.0}, "above 0 s"), ({"exit_ratio": 1.0}, "the two lines must differ")],
)
def test_limits_that_cannot_work_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**wrong)
