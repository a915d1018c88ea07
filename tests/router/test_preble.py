from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.preble.policy import Preble
from prefixwatch.router.policies.preble.prefix_tree_load import (
    Node,
    PrefixTreeLoad,
    node_prefill_seconds,
    prefill_seconds,
)
from prefixwatch.router.policy import NO_TOKENS, Policy, RouteRequest
from prefixwatch.simulator.runs import simulate_requests
from tests.router.fleets import BLOCK, a_fleet

_fresh = count(1_000_000)


def a_prompt(opening: str, shared: int, own: int, output_tokens: int = 2) -> RouteRequest:
    """Blocks of a named opening, and blocks never seen before."""
    blocks = [hash((opening, k)) & 2**63 - 1 for k in range(shared)] + [next(_fresh) for _ in range(own)]
    array = np.array(blocks, dtype=np.uint64)
    return RouteRequest("r", BLOCK * len(blocks), NO_TOKENS, array, BLOCK, max_output_tokens=output_tokens)


def send(policy: Policy, request: RouteRequest, worker: str, now: float = 0.0, *, done: bool = True) -> None:
    """A request sent to this worker, whatever the policy would choose."""
    policy.choose(request, a_fleet([0, 0, 0], now=now))
    policy.on_admit(request, worker, now)
    if done:
        policy.on_end(request, worker, now)


def choose(policy: Policy, request: RouteRequest, now: float = 0.0, workers: int = 3) -> Any:
    return policy.choose(request, a_fleet([0] * workers, now=now))


@pytest.mark.parametrize(
    ("tokens", "context", "milliseconds"),
    [
        (100, 100, 22 + 0.32),
        (200, 200, -118 + 250 - 102.4 + 0.32),
        (1000, 1000, 108.42571 + 4.209777 + 0.32),
        (1000, 1048, 108.42571 + 4.209777 + (0.194928 + 0.159) / 2),
        (
            2000,
            4000,
            2 * 108.42571 + 4.209777 + 0.744 + 0.159 + 1.13e-3 * 2000 + 1.75e-3 * 4000 + 2.19e-6 * 8_000_000,
        ),
    ],
)
def test_the_prefill_model_is_mistral_on_an_a6000(tokens: int, context: int, milliseconds: float) -> None:
    assert prefill_seconds(tokens, context) == pytest.approx(milliseconds / 900, rel=1e-6)


def test_a_prompt_that_is_mostly_known_is_exploited_and_any_other_explored() -> None:
    policy = make_policy("preble")
    send(policy, a_prompt("a", 8, 0), "w2")
    decision = choose(policy, a_prompt("a", 8, 7))
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w2", "exploit", 8)
    decision = choose(policy, a_prompt("a", 8, 8))
    assert (decision.worker, decision.reason) == ("w0", "explore")


def test_exploring_takes_the_least_window_cost() -> None:
    policy = make_policy("preble")
    send(policy, a_prompt("a", 60, 0), "w0")
    send(policy, a_prompt("b", 10, 0), "w2")
    decision = choose(policy, a_prompt("c", 4, 0))
    assert decision.worker == "w1"
    assert decision.scores == pytest.approx(
        {"w0": prefill_seconds(960, 960), "w1": 0, "w2": prefill_seconds(160, 160)}, abs=1e-9
    )


def test_a_shared_opening_costs_its_workers_its_misses_only() -> None:
    policy = make_policy("preble")
    send(policy, a_prompt("a", 8, 2), "w0")
    send(policy, a_prompt("a", 8, 2), "w0")
    decision = choose(policy, a_prompt("b", 1, 0))
    misses = (10 + 2) / 20  # of the two prompts' blocks, those in their leaves
    assert decision.scores["w0"] == pytest.approx(misses * 2 * prefill_seconds(128, 128))


def test_running_requests_cost_their_output_at_the_workers_pace() -> None:
    policy = make_policy("preble")
    running = a_prompt("a", 30, 0, output_tokens=11)
    send(policy, running, "w0", done=False)
    first = prefill_seconds(480, 480)
    assert choose(policy, a_prompt("b", 1, 0)).scores["w0"] == pytest.approx(first + 11 * 0.15)
    policy.on_first_token(running, "w0", 1.0)
    policy.on_end(running, "w0", 1.5)
    send(policy, a_prompt("a", 30, 0, output_tokens=11), "w0", 2.0, done=False)
    assert choose(policy, a_prompt("b", 1, 0)).scores["w0"] == pytest.approx(2 * first + 11 * (0.15 + 0.05) / 2)


def test_of_several_holders_the_cheaper_one_is_chosen_by_name_and_not_by_position() -> None:
    """F-18: the source answers the position among the holders, so that w1 and w2 became w0 and w1."""
    policy = make_policy("preble")
    for worker in ("w1", "w2"):
        send(policy, a_prompt("a", 40, 4), worker)
    send(policy, a_prompt("b", 60, 0), "w1")
    assert choose(policy, a_prompt("a", 40, 4)).worker == "w2"
    send(policy, a_prompt("c", 200, 0), "w2")
    assert choose(policy, a_prompt("a", 40, 4)).worker == "w1"


def test_a_holder_that_is_not_a_candidate_is_passed_over() -> None:
    policy = make_policy("preble")
    send(policy, a_prompt("a", 40, 0), "w2")
    assert choose(policy, a_prompt("a", 40, 4), workers=2).reason == "explore"


def test_after_three_minutes_nothing_is_left_of_a_prompt() -> None:
    policy = make_policy("preble")
    send(policy, a_prompt("a", 40, 0), "w2")
    known = a_prompt("a", 40, 4)
    assert choose(policy, known, now=180.0).reason == "exploit"
    send(policy, known, "w2", now=180.0)
    decision = choose(policy, a_prompt("a", 40, 5), now=361.0)
    assert (decision.reason, decision.scores) == ("explore", {"w0": 0, "w1": 0, "w2": 0})


def test_eviction_adds_what_must_make_room() -> None:
    policy = make_policy("preble", options={"enable_eviction": True})
    send(policy, a_prompt("a", 10, 0), "w0", 0.0)
    send(policy, a_prompt("b", 20, 0), "w0", 1.0)
    window = prefill_seconds(160, 160) + prefill_seconds(320, 320)
    small, large = choose(policy, a_prompt("c", 10, 0)).scores, choose(policy, a_prompt("d", 11, 0)).scores
    assert small["w0"] == pytest.approx(window + prefill_seconds(160, 160))
    assert large["w0"] == pytest.approx(2 * window)
    assert small["w1"] == 0


def rebalanced(policy: Policy, prefixes: list[str], now: float = 1.0) -> None:
    """Enough traffic on w0 for the policy to look at the balance of three workers."""
    for k in range(150):
        send(policy, a_prompt(prefixes[k % len(prefixes)], 40, 1), "w0", now, done=False)


def test_an_overloaded_worker_gives_cheap_hot_prefixes_to_the_lightest() -> None:
    policy = make_policy("preble")
    rebalanced(policy, ["a", "b", "c", "d"])
    at = {name: choose(policy, a_prompt(name, 40, 1), 2.0).worker for name in "abcd"}
    assert at == {"a": "w0", "b": "w0", "c": "w2", "d": "w2"}
    off = make_policy("preble", options={"enable_rebalancing": False})
    rebalanced(off, ["a", "b", "c", "d"])
    assert {choose(off, a_prompt(name, 40, 1), 2.0).worker for name in "abcd"} == {"w0"}


@pytest.mark.parametrize(("later_ttft", "workers"), [(0.9, {"w0"}), (1.1, {"w0", "w2"})])
def test_a_lone_hot_prefix_is_copied_when_its_ttft_has_doubled(later_ttft: float, workers: set[str]) -> None:
    policy = make_policy("preble")
    for at, ttft in ((0.0, 0.5), (100.0, later_ttft)):
        for _ in range(75):
            request = a_prompt("a", 40, 1)
            send(policy, request, "w0", at, done=False)
            policy.on_first_token(request, "w0", at + ttft)
    send(policy, a_prompt("a", 40, 1), "w0", 102.0)
    assert isinstance(policy, Preble)
    assert set(choose(policy, a_prompt("a", 40, 1), 103.0).scores) == workers


paths = st.lists(st.integers(0, 1), min_size=1, max_size=6)
steps = st.lists(st.tuples(paths, st.sampled_from("xyz"), st.booleans(), st.integers(0, 120)), max_size=25)


@given(steps)
def test_the_running_costs_equal_a_recount(traffic: list[tuple[list[int], str, bool, int]]) -> None:
    """Splits, ends, expiry and removal keep each worker's cost what a walk over the tree gives."""
    tree, now = PrefixTreeLoad(), 0.0
    running: list[tuple[Node, str]] = []
    for path, worker, finishes, seconds in traffic:
        now += seconds
        leaf = tree.insert([int("1" + "".join(map(str, path[: k + 1]))) for k in range(len(path))], BLOCK, now)
        tree.place(leaf, worker, 10, now)
        running.append((leaf, worker))
        if finishes:
            tree.finish(*running.pop(0), now)
        for name in "xyz":
            expected = sum(node_prefill_seconds(node) for node in tree.nodes() if name in node.workers)
            assert tree.costs[name].prefill_seconds == pytest.approx(expected, abs=1e-9)
    for leaf, worker in running:
        tree.finish(leaf, worker, now)
    tree.expire(now + 181)
    assert tree.nodes() == [tree.root]
    for name in "xyz":
        tree.forget_worker(name)
    assert not tree.counts


def test_popular_prefixes_stay_together_and_the_fleet_is_used() -> None:
    engine = EngineConfig(
        StepTime(base_s=0.01, per_prefill_token_s=1 / 12_000), block_size=BLOCK, capacity_blocks=20_000
    )
    workload = SharedPrefixWorkload(requests=400, rate_per_second=20, groups=20, shared_blocks=64, unique_blocks=8)
    requests = shared_prefix_requests(workload, seed=1)
    blind, preble = (
        simulate_requests(requests, policy=policy, workers=4, engine=engine) for policy in ("round_robin", "preble")
    )
    assert blind.token_hit_ratio is not None
    assert preble.token_hit_ratio is not None
    assert preble.token_hit_ratio > blind.token_hit_ratio + 0.05
    assert preble.busiest_share < 0.6
    assert Counter(record.reason for record in preble.records)["exploit"] > 200
