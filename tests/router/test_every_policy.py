"""What every registered policy owes its callers, whatever its formula."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from time import process_time
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.router.option_ranges import RANGES
from prefixwatch.router.policies import POLICIES, make_policy
from prefixwatch.router.policy import Decision, Fleet, LoadReport, Policy, RouteRequest, Worker
from tests.router.fleets import a_fleet, a_request, serve

every_policy = pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if not policy.needs.truth])


@dataclass(frozen=True)
class Arrival:
    """One request and the fleet it meets; `workers` are numbers of candidates."""

    request: RouteRequest
    workers: list[int]
    in_flight: list[int]
    hits: Mapping[str, int]
    usage_ratio: float | None
    finishes: bool


def fleet_of(arrival: Arrival, now: float) -> Fleet:
    report = None if arrival.usage_ratio is None else LoadReport(now, 1, 2, arrival.usage_ratio)
    workers = [
        Worker(f"w{k}", in_flight=arrival.in_flight[k], prefill_tokens=100 * arrival.in_flight[k], report=report)
        for k in arrival.workers
    ]
    hits = {name: min(depth, len(arrival.request.blocks)) for name, depth in arrival.hits.items()}
    return Fleet(workers, lambda request: {name: depth for name, depth in hits.items() if depth}, now)


requests = st.builds(
    a_request,
    first_token=st.sampled_from([1, 1000]),
    prompt_tokens=st.sampled_from([0, 1, 15, 16, 160, 1600]),
    request_id=st.sampled_from(["r0", "r1", "r2"]),
    session=st.sampled_from(["", "s0", "s1", "\udcff"]),
    tenant=st.sampled_from(["", "t0", "\udcff"]),
    text=st.sampled_from(["", "a short text", "long " * 400]),
    max_output_tokens=st.sampled_from([0, 10, 4000]),
)
arrivals = st.builds(
    Arrival,
    request=requests,
    workers=st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    in_flight=st.lists(st.integers(0, 200), min_size=5, max_size=5),
    hits=st.dictionaries(st.sampled_from([f"w{k}" for k in range(6)]), st.integers(1, 100), max_size=4),
    usage_ratio=st.sampled_from([None, 0.0, 0.5, 1.0]),
    finishes=st.booleans(),
)


def play(policy: Policy, traffic: list[Arrival]) -> list[Decision]:
    """Place these one second apart; some finish at once, the others at the end."""
    decisions, open_requests = [], []
    for now, arrival in enumerate(traffic):
        decision = policy.choose(arrival.request, fleet_of(arrival, float(now)))
        policy.on_admit(arrival.request, decision.worker, float(now))
        if arrival.finishes:
            policy.on_first_token(arrival.request, decision.worker, float(now))
            policy.on_end(arrival.request, decision.worker, float(now))
        else:
            open_requests.append((arrival.request, decision.worker))
        decisions.append(decision)
    for request, worker in open_requests:
        policy.on_end(request, worker, float(len(traffic)))
    return decisions


@every_policy
@settings(max_examples=25)
@given(traffic=st.lists(arrivals, min_size=1, max_size=6), seed=st.integers(0, 3))
def test_the_choice_is_a_candidate_its_reason_is_declared_and_a_seed_repeats_it(
    name: str, traffic: list[Arrival], seed: int
) -> None:
    decisions = play(make_policy(name, seed=seed), traffic)
    for arrival, decision in zip(traffic, decisions, strict=True):
        candidates = {f"w{k}" for k in arrival.workers}
        assert decision.worker in candidates
        assert decision.reason in POLICIES[name].reasons
        assert 0 <= decision.hit_blocks <= len(arrival.request.blocks)
    assert play(make_policy(name, seed=seed), traffic) == decisions
    if POLICIES[name].deterministic:
        assert play(make_policy(name, seed=seed + 1), traffic) == decisions


@every_policy
@settings(max_examples=25)
@given(traffic=st.lists(arrivals, min_size=1, max_size=6), removed=st.integers(0, 4))
def test_a_worker_may_leave_while_requests_are_out_and_come_back(
    name: str, traffic: list[Arrival], removed: int
) -> None:
    policy = make_policy(name)
    placed = []
    for now, arrival in enumerate(traffic):
        decision = policy.choose(arrival.request, fleet_of(arrival, float(now)))
        policy.on_admit(arrival.request, decision.worker, float(now))
        placed.append((arrival.request, decision.worker))
    policy.on_worker_removed(f"w{removed}")
    policy.on_worker_removed(f"w{removed}")
    policy.on_worker_removed("never-seen")
    for request, worker in placed:
        policy.on_first_token(request, worker, 7.0)
        policy.on_end(request, worker, 7.0)
        policy.on_end(request, worker, 7.0)
    back = Arrival(a_request(), [0, 1, 2, 3, 4], [0] * 5, {}, None, True)
    for arrival in (replace(back, workers=[k for k in range(5) if k != removed]), back):
        decision = policy.choose(arrival.request, fleet_of(arrival, 9.0))
        assert decision.worker in {f"w{k}" for k in arrival.workers}
        policy.on_admit(arrival.request, decision.worker, 9.0)


def footprint(policy: Policy) -> int:
    """Bytes of everything the policy keeps."""
    return len(pickle.dumps(_state(policy, set()), protocol=5))


def _state(thing: Any, seen: set[int]) -> Any:
    """A policy's attributes, each object once and callables left out, so that they can be pickled."""
    if isinstance(thing, str | bytes | int | float | bool | None.__class__):
        return thing
    if id(thing) in seen or callable(thing):
        return None
    seen.add(id(thing))
    if isinstance(thing, dict):
        return [(_state(key, seen), _state(value, seen)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | set | frozenset) or hasattr(thing, "popleft"):
        return [_state(value, seen) for value in thing]
    own = [getattr(thing, slot, None) for slot in getattr(type(thing), "__slots__", ())]
    return [_state(value, seen) for value in (*own, *getattr(thing, "__dict__", {}).values())]


def mentions(policy: Policy, worker: str) -> bool:
    return worker.encode() in pickle.dumps(_state(policy, set()), protocol=5)


@every_policy
def test_nothing_is_kept_of_workers_that_left(name: str) -> None:
    """A fleet that is replaced worker by worker, each taking traffic and leaving, with and without requests out.

    Samples of a bounded number may fill up first, which name nobody; from then on nothing grows.
    """
    policy = make_policy(name)
    sizes = []
    for generation in range(80):
        worker = Worker(f"generation-{generation:02}")
        now = 1000.0 * generation
        fleet = Fleet([worker], lambda request: {}, now)
        for k in range(5):
            serve(policy, fleet, a_request(1000 * k, session=f"s{k}"))
        left_open = a_request(9000)
        policy.choose(left_open, fleet)
        policy.on_admit(left_open, worker.name, now)
        policy.on_worker_removed(worker.name)
        policy.on_first_token(left_open, worker.name, now)
        policy.on_end(left_open, worker.name, now)
        sizes.append(footprint(policy))
    assert not mentions(policy, "generation-")
    assert sizes[79] <= 1.05 * sizes[50]


def decision_seconds(name: str, workers: int, prompt_tokens: int) -> float:
    """CPU time of the fastest of some decisions on a fleet of which half the workers hold the prompt."""
    policy = make_policy(name)
    fleet = a_fleet([1] * workers, {f"w{k}": prompt_tokens // 32 for k in range(0, workers, 2)})
    request = a_request(1, prompt_tokens)
    fastest = float("inf")
    for _ in range(6):
        begun = process_time()
        serve(policy, fleet, request)
        fastest = min(fastest, process_time() - begun)
    return fastest


@every_policy
@pytest.mark.parametrize("grown", ["workers", "prompt"])
def test_a_decision_grows_at_most_linearly(name: str, grown: str) -> None:
    """Sixteen times the workers or the prompt: sixteen times the time if linear, 256 if quadratic."""
    large = {"workers": 256, "prompt_tokens": 1600} if grown == "workers" else {"workers": 8, "prompt_tokens": 51_200}
    small = {"workers": 16, "prompt_tokens": 1600} if grown == "workers" else {"workers": 8, "prompt_tokens": 3_200}
    assert decision_seconds(name, **large) < 64 * max(decision_seconds(name, **small), 2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@every_policy
def test_an_option_that_is_no_finite_number_is_refused(name: str, value: float) -> None:
    """With nan no worker was the best one, and the first request a traceback."""
    options = {key: kept for key, kept in asdict(POLICIES[name].Options()).items() if isinstance(kept, float)}
    for key in options:
        with pytest.raises(ValueError, match=f"policy {name}: option {key} is {value}: give a finite number"):
            make_policy(name, options={key: value})


def _numeric_options(name: str) -> list[str]:
    hints = get_type_hints(POLICIES[name].Options)
    return [f.name for f in fields(POLICIES[name].Options) if {int, float} & {hints[f.name], *get_args(hints[f.name])}]


@every_policy
def test_every_numeric_option_has_a_range_and_refuses_what_is_outside_of_it(name: str) -> None:
    """`loadaware{beta=1e300}`, a rate below zero and a share above 1 were taken, and every score was infinite."""
    for key in _numeric_options(name):
        allowed = RANGES[key]
        for value in (allowed.least - 1, -1e300, allowed.most * 2, 1e300, 10**400):
            with pytest.raises(ValueError, match=f"policy {name}: ") as refused:
                make_policy(name, options={key: value if "float" in _type(name, key) else int(value)})
            assert key in str(refused.value) or "Expected" in str(refused.value)


@every_policy
@settings(max_examples=25)
@given(traffic=st.lists(arrivals, min_size=1, max_size=4), data=st.data())
def test_with_options_at_the_ends_of_their_ranges_every_choice_is_a_candidate_with_finite_scores(
    name: str, traffic: list[Arrival], data: st.DataObject
) -> None:
    numeric = [key for key in _numeric_options(name) if key != "copies_cap"]  # at least copies_target
    chosen = data.draw(st.lists(st.sampled_from(numeric), unique=True, max_size=4)) if numeric else []
    ends = {key: data.draw(st.sampled_from(RANGES[key])) for key in chosen}
    options = {key: end if "float" in _type(name, key) else int(end) for key, end in ends.items()}
    for arrival, decision in zip(traffic, play(make_policy(name, options=options), traffic), strict=True):
        assert decision.worker in {f"w{k}" for k in arrival.workers}
        assert all(math.isfinite(score) for score in decision.scores.values())


def _type(name: str, key: str) -> str:
    return str(get_type_hints(POLICIES[name].Options)[key])
