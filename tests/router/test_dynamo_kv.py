from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.dynamo.active_sequences import ActiveSequences
from prefixwatch.router.policies.dynamo.kv import DynamoKvOptions, WorkerLoad, worker_cost
from prefixwatch.router.policy import NO_TOKENS, Policy, RouteRequest
from tests.router.fleets import BLOCK, a_fleet, a_request


def blocks_request(*blocks: int) -> RouteRequest:
    """A prompt of whole blocks, named by numbers that serve as chain hashes."""
    return RouteRequest("r", BLOCK * len(blocks), NO_TOKENS, np.array(blocks, dtype=np.uint64), BLOCK)


def admit(policy: Policy, request: RouteRequest, worker: str, now: float = 0.0, hits: Any = None) -> None:
    policy.choose(request, a_fleet([0] * 2, hits, now))
    policy.on_admit(request, worker, now)


def costs(policy: Policy, request: RouteRequest, hits: Any = None, now: float = 0.0) -> Any:
    return policy.choose(request, a_fleet([0] * 2, hits, now)).scores


def test_the_cost_equals_the_golden_vector() -> None:
    """320 active tokens, 640 of prompt, blocks of 16, 10 on the device, 4 more on the host, 50 decode blocks."""
    assert worker_cost(640, 16, WorkerLoad(320, device_blocks=10, host_blocks=4, decode_blocks=50)) == 97.0


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({}, 97.0),
        ({"overlap_credit": 0.5}, 102.0),
        ({"prefill_load_scale": 0.0}, 50.0),
        ({"prefill_load_scale": 2.0}, 144.0),
        ({"overlap_decay": 2.0}, 102.0),  # 320 − 0 tokens ahead are 20 of 40 blocks: 10 / (1 + 2 · 0.5) = 5
        ({"active_request_weight": 3.0}, 103.0),
    ],
)
def test_each_option_enters_the_cost(options: dict[str, float], cost: float) -> None:
    load = WorkerLoad(320, device_blocks=10, host_blocks=4, decode_blocks=50, active_requests=2)
    assert worker_cost(640, 16, load, 0.0, DynamoKvOptions(**options)) == cost


def test_lower_tiers_are_credited_in_part_and_credit_ends_at_zero() -> None:
    assert worker_cost(160, 16, WorkerLoad(0, 2, 0, disk_blocks=4)) == 7.0
    assert worker_cost(160, 16, WorkerLoad(0, 10, 0, host_blocks=8)) == 0.0


def test_uncached_tokens_count_until_the_first_token_and_blocks_until_the_end() -> None:
    policy, request = make_policy("dynamo_kv"), a_request(1)
    other = a_request(1000)
    admit(policy, request, "w0", hits={"w0": 4})
    assert costs(policy, other) == {"w0": 10 + 6 + 10 + 10, "w1": 20}
    policy.on_first_token(request, "w0", 1.0)
    assert costs(policy, other) == {"w0": 10 + 10 + 10, "w1": 20}
    policy.on_end(request, "w0", 2.0)
    policy.on_end(request, "w0", 2.0)
    assert costs(policy, other) == {"w0": 20, "w1": 20}


def test_blocks_that_active_requests_share_count_once() -> None:
    policy, first = make_policy("dynamo_kv"), blocks_request(1, 2, 3)
    second = blocks_request(1, 2, 9)
    for request in (first, second):
        admit(policy, request, "w0")
        policy.on_first_token(request, "w0", 0.0)
    assert costs(policy, blocks_request(1, 2, 9, 10)) == {"w0": 4 + 5, "w1": 4 + 4}
    policy.on_end(first, "w0", 0.0)
    assert costs(policy, blocks_request(1, 2, 9, 10)) == {"w0": 4 + 4, "w1": 4 + 4}


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=8)


@given(prompts, st.data())
def test_the_active_blocks_are_those_of_the_active_requests(paths: list[list[int]], data: Any) -> None:
    """Against sets, with requests ending in any order."""
    index = BlockIndex()
    sequences = ActiveSequences("w", index)
    active = {}
    for path in paths:
        chain = [int("1" + "".join(map(str, path[: k + 1]))) for k in range(len(path))]
        active[blocks_request(*chain)] = set(chain)
    for request in active:
        sequences.admit(request, request.prompt_tokens, 0.0)
    for request in data.draw(st.permutations(list(active))):
        assert sequences.blocks == len(set().union(*active.values()))
        assert index.block_count("w") == sequences.blocks
        assert sequences.prefill_tokens(0.0) == BLOCK * sum(len(each.blocks) for each in active)
        sequences.free(request, 0.0)
        del active[request]
    assert (sequences.requests, sequences.blocks, sequences.prefill_tokens(0.0)) == (0, 0, 0.0)


def test_prefill_decays_at_the_anchors_pace_and_past_it() -> None:
    sequences = ActiveSequences("w", BlockIndex(), prefill_tokens_per_second=1000.0)
    first, second = a_request(1, 1000), a_request(5000, 2000)
    sequences.admit(first, 1000, 0.0)
    sequences.admit(second, 2000, 0.25)
    assert sequences.prefill_tokens(0.5) == 2500.0
    assert sequences.prefill_tokens(1.5) == 1500.0  # spills into the second
    assert sequences.prefill_tokens(9.0) == 0.0
    sequences.prefilled(first, 2.0)
    assert sequences.prefill_tokens(2.0) == 2000.0  # the second is timed from here
    assert sequences.prefill_tokens(2.5) == 1500.0


def test_a_sequence_of_reservations_spreads_as_dynamos_own_selector_did() -> None:
    """Six times one prompt of 20 blocks, 10 of it on w2 and 4 on w3: tokens to prefill as Dynamo 1.6.1 had them."""
    policy, tokens, hits = make_policy("dynamo_kv"), Counter[str](), {"w2": 10, "w3": 4}
    for _ in range(6):
        request = a_request(prompt_tokens=320)
        chosen = policy.choose(request, a_fleet([0] * 4, hits)).worker
        policy.on_admit(request, chosen, 0.0)
        tokens[chosen] += 320 - BLOCK * hits.get(chosen, 0)
    assert tokens == {"w0": 320, "w1": 320, "w2": 480, "w3": 256}


def test_exact_ties_are_drawn_uniformly() -> None:
    policy = make_policy("dynamo_kv")
    decisions = [policy.choose(a_request(), a_fleet([0] * 4, {"w3": 2, "w1": 2})) for _ in range(1000)]
    counts = Counter(decision.worker for decision in decisions)
    assert set(counts) == {"w1", "w3"}
    assert 400 < counts["w1"] < 600
    assert {decision.reason for decision in decisions} == {"tie_random"}


def test_a_temperature_draws_by_cost() -> None:
    policy = make_policy("dynamo_kv", options={"temperature": 0.5})
    counts = Counter(policy.choose(a_request(), a_fleet([0, 0], {"w0": 8})).worker for _ in range(4000))
    assert counts["w1"] / counts["w0"] == pytest.approx(math.exp(-2), rel=0.2)
    level = Counter(policy.choose(a_request(), a_fleet([0, 0])).worker for _ in range(1000))
    assert 400 < level["w0"] < 600


def test_a_request_that_never_ends_leaves_the_books_after_300_seconds() -> None:
    """Generations longer than that vanish from the load, too."""
    policy, other = make_policy("dynamo_kv"), a_request(1000)
    admit(policy, a_request(1), "w0", now=100.0)
    assert costs(policy, other, now=400.0) == {"w0": 40, "w1": 20}
    assert costs(policy, other, now=461.0) == {"w0": 20, "w1": 20}


def test_a_worker_that_left_takes_its_load_along() -> None:
    policy, request = make_policy("dynamo_kv"), a_request(1)
    admit(policy, request, "w0")
    policy.on_worker_removed("w0")
    policy.on_end(request, "w0", 1.0)
    assert costs(policy, a_request(1)) == {"w0": 20, "w1": 20}
