"""The canary's trial decides once it may, never flaps, and always has a way on; its arms are kept by session."""

from __future__ import annotations

from collections import Counter
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.canary.policy import Canary
from prefixwatch.router.policies.canary.trial import Arm, Limits, Trial
from prefixwatch.router.policy import Fleet, Worker
from prefixwatch.router.sessions.moving import MovingPolicy, Trigger
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.slo.wilson import share_difference
from tests.router.fleets import a_request
from tests.router.test_session_moving import Around

LIMITS = Limits(min_requests=20, margin_ratio=0.05, most_seconds=100.0, cool_down_seconds=50.0)


def feed(trial: Trial, arm: Arm, good: int, bad: int, at: float) -> None:
    for k in range(good + bad):
        trial.ended(arm, k < good, at, at)


def test_a_canary_that_is_as_good_takes_over_and_a_worse_one_is_rolled_back() -> None:
    for canary_good, state, why in ((100, "promoted", "as good"), (60, "rolled_back", "worse")):
        trial = Trial(Limits(min_requests=100, margin_ratio=0.05))
        trial.advance(0.0)
        feed(trial, "control", 100, 0, 1.0)
        feed(trial, "canary", canary_good, 100 - canary_good, 2.0)
        assert (trial.state, trial.transitions[-1].why) == (state, why)


def test_nothing_is_decided_below_the_smallest_sample() -> None:
    trial = Trial(Limits(min_requests=100))
    trial.advance(0.0)
    feed(trial, "control", 500, 0, 1.0)
    feed(trial, "canary", 0, 99, 2.0)
    assert len(trial.transitions) == 1
    feed(trial, "canary", 0, 1, 3.0)
    assert trial.transitions[-1].why == "worse"


def test_an_undecided_trial_ends_by_time_and_each_wait_is_twice_the_last() -> None:
    trial = Trial(LIMITS)
    trial.advance(0.0)
    times = (99.9, 100.0, 149.9, 150.0, 250.0, 349.9, 350.0)
    assert [trial.advance(at) for at in times] == [
        *("trial", "rolled_back", "rolled_back", "trial", "rolled_back", "rolled_back", "trial")
    ]


def test_a_promoted_canary_that_gets_worse_is_rolled_back() -> None:
    trial = Trial(Limits(min_requests=100, margin_ratio=0.05))
    trial.advance(0.0)
    feed(trial, "control", 100, 0, 1.0)
    feed(trial, "canary", 100, 0, 2.0)
    feed(trial, "canary", 90, 10, 3.0)  # may be chance
    assert trial.state == "promoted"
    feed(trial, "canary", 60, 40, 4.0)
    assert (trial.state, trial.transitions[-1].why) == ("rolled_back", "regressed")


def test_a_request_from_before_the_state_tells_nothing_of_it() -> None:
    trial = Trial(LIMITS)
    trial.advance(10.0)
    trial.ended("canary", False, 9.0, 11.0)
    assert trial.arms["canary"].total == 0


RESULTS = st.lists(
    st.tuples(st.sampled_from(["canary", "control"]), st.booleans(), st.floats(0.0, 20.0)), min_size=1, max_size=400
)


@settings(max_examples=150)
@given(RESULTS)
def test_whatever_comes_trials_begin_ever_more_rarely(results: list[tuple[Arm, bool, float]]) -> None:
    trial, now = Trial(LIMITS), 0.0
    for arm, good, wait in results:
        now += wait
        trial.ended(arm, good, now, now)
    begun = sum(change.state == "trial" for change in trial.transitions)
    assert begun <= 1 + log2(1 + now / LIMITS.cool_down_seconds)
    for one, next_one in zip(trial.transitions, trial.transitions[1:], strict=False):
        allowed = {"trial": {"promoted", "rolled_back"}, "promoted": {"rolled_back"}, "rolled_back": {"trial"}}
        assert next_one.state in allowed[one.state]


@given(RESULTS)
def test_every_state_has_a_way_on(results: list[tuple[Arm, bool, float]]) -> None:
    trial, now = Trial(LIMITS), 0.0
    for arm, good, wait in results:
        now += wait
        trial.ended(arm, good, now, now)
    before = len(trial.transitions)
    if trial.state == "promoted":
        trial.baseline = 1.0
        feed(trial, "canary", 0, 2 * LIMITS.min_requests, now)
    else:
        trial.advance(now + LIMITS.most_seconds + LIMITS.cool_down_seconds * 2**trial.rollbacks)
    assert len(trial.transitions) > before


def test_newcombes_interval_of_his_own_example() -> None:
    """56 of 70 against 48 of 80: method 10 gives 0.0524 to 0.3339 (Newcombe, Stat. Med. 17, 1998, table II)."""
    found = share_difference((56, 48), (70, 80))
    assert found is not None
    assert found == pytest.approx((0.0524, 0.3339), abs=5e-5)


WORKLOAD = SharedPrefixWorkload(
    requests=3000, rate_per_second=40, groups=60, zipf_exponent=0.6, shared_blocks=30, unique_blocks=2,
    output_tokens=8, block_size=64,
)  # fmt: skip
ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 8000), block_size=64, capacity_blocks=700)


def simulated(**options: object) -> tuple[Canary, dict[str, int]]:
    policy = make_policy("canary", options={"share": 0.3, "ttft_seconds": 0.3, **options})
    assert isinstance(policy, Canary)
    result = FleetSimulation([policy], ENGINE, 4).run(shared_prefix_requests(WORKLOAD, seed=1))
    reasons: dict[str, int] = {}
    for record in result.records:
        reasons[record.reason] = reasons.get(record.reason, 0) + 1
    return policy, reasons


def test_in_the_simulator_the_better_policy_takes_over_and_the_worse_one_goes() -> None:
    better, placed = simulated(control="round_robin", canary="score")
    assert better.trial.state == "promoted"
    assert placed["canary_promoted"] > placed["canary_trial"] > 200
    worse, placed = simulated(control="score", canary="round_robin")
    assert worse.trial.state == "rolled_back"
    assert set(placed) == {"canary_trial", "control_trial", "control_rolled_back"}


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=40), st.floats(0.05, 0.95))
def test_the_turn_of_a_moved_session_counts_for_the_arm_of_its_session(numbers: set[int], share: float) -> None:
    """The wrapping policy places it: neither arm chose, and the session belongs to one all the same."""
    canary = make_policy("canary", options={"share": share, "ttft_seconds": 1.0, "min_requests": 10_000})
    assert isinstance(canary, Canary)
    moving = MovingPolicy(canary)
    moving.driver = Around(link=None)
    workers = {name: Worker(name) for name in "ab"}
    turns = [a_request(1 + 1000 * number, request_id=f"r{number}", session=f"s{number}") for number in numbers]

    def serve(names: str, now: float) -> list[str]:
        reasons = []
        for turn in turns:
            decision = moving.choose(turn, Fleet([workers[name] for name in names], lambda _: {}, now))
            moving.on_admit(turn, decision.worker, now)
            moving.on_first_token(turn, decision.worker, now + 0.1)
            moving.on_end(turn, decision.worker, now + 0.2)
            reasons.append(decision.reason)
        return reasons

    arms = Counter(reason.partition("_")[0] for reason in serve("ab", 0.0))
    moved = Counter(stay.key.session for stay in moving.book.of("a"))
    moving.leave("a", Trigger.DRAIN, [workers["b"]], 1.0)
    assert serve("b", 2.0).count("moved_hard") == len(moved)
    counted = {arm: counts.total for arm, counts in canary.trial.arms.items() if counts.total}
    assert counted == {arm: 2 * count for arm, count in arms.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.0}, "share is 1: give a number from 0.001 to 0.999"),
        ({"min_requests": 0}, "min_requests is 0: give a number from 1 to"),
        ({"canary": "canary"}, "no canary of its own"),
        ({"control": "oracle"}, "true state"),
        ({"canary": "scores"}, "unknown policy 'scores'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy("canary", options=options)
