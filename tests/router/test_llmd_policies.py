"""llm-d's approximate and precise prefix routing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.kvcache.blocks import as_tokens
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.llmd.approx import LlmdApprox, text_chain
from prefixwatch.router.policies.llmd.scorers import kv_cache_scores, queue_scores
from prefixwatch.router.policy import Fleet, LoadReport, RouteRequest, Worker
from prefixwatch.simulator.runs import simulate_requests
from tests.router.fleets import BLOCK, a_fleet, a_request

PREFIX_ONLY: dict[str, Any] = {"prefix_weight": 1.0, "queue_weight": 0.0, "kv_weight": 0.0}


def reports(*waiting_and_usage: tuple[int | None, float | None]) -> list[LoadReport]:
    return [LoadReport(0.0, waiting=waiting, kv_usage_ratio=usage) for waiting, usage in waiting_and_usage]


def test_the_chain_equals_the_golden_vector() -> None:
    text = ("abcdefghij" * 20)[:150]
    request = RouteRequest("r", 0, as_tokens([]), np.empty(0, np.uint64), BLOCK, model="model-x", text=text)
    assert text_chain(request) == [16287675495215297884, 15116219079638179632, 11654547115541317872]
    assert text_chain(replace(request, tenant="salt"))[0] != text_chain(request)[0]


def test_without_text_16_tokens_make_a_block_and_256_blocks_are_the_most() -> None:
    assert len(text_chain(a_request(1, 161))) == 11
    assert text_chain(a_request(1, 5000)) == text_chain(a_request(1, 4096))
    assert len(text_chain(a_request(1, 5000))) == 256


def test_the_queue_scorer_spans_0_to_1_and_is_1_where_all_are_equal() -> None:
    workers = a_fleet([0, 0, 0], report=reports((8, 0.2), (2, 1.0), (5, None))).workers
    assert queue_scores(workers) == [0.0, 1.0, 0.5]
    assert kv_cache_scores(workers) == [0.8, 0.0, 0.0]  # unknown isn't empty
    assert queue_scores([Worker("a"), Worker("b")]) == [1.0, 1.0]


def test_precise_is_the_weighted_sum_of_the_guides_weights() -> None:
    fleet = a_fleet([0, 0, 0], {"w0": 10, "w1": 5}, report=reports((8, 0.9), (2, 0.5), (0, 0.0)))
    decision = make_policy("llmd_precise").choose(a_request(), fleet)
    assert decision.scores == pytest.approx({"w0": 2 + 0.1 + 0, "w1": 1 + 0.5 + 0.75, "w2": 0 + 1 + 1})
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w1", "hit_sacrificed", 5)
    for_prefix = make_policy("llmd_precise", options={"prefix_weight": 10}).choose(a_request(), fleet)
    assert (for_prefix.worker, for_prefix.reason) == ("w0", "hit_deepest")


@pytest.mark.parametrize("name", ["llmd_precise", "llmd_approx"])
def test_ties_are_drawn_uniformly(name: str) -> None:
    policy = make_policy(name)
    drawn = Counter(policy.choose(a_request(1000 * k), a_fleet([0] * 4)).worker for k in range(2000))
    assert all(abs(count - 500) < 100 for count in drawn.values())
    assert len(drawn) == 4


def test_approx_is_the_weighted_sum_of_the_baselines_weights() -> None:
    policy = make_policy("llmd_approx")
    policy.on_admit(a_request(1, 160), "w0", 0.0)
    policy.on_admit(a_request(1, 80), "w1", 0.0)
    fleet = a_fleet([0, 0], report=reports((4, 0.5), (0, 0.0)))
    decision = policy.choose(a_request(1, 160), fleet)
    assert decision.scores == pytest.approx({"w0": 3 + 0 + 1, "w1": 1.5 + 2 + 2})
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w1", "hit_sacrificed", 5)


def holding(policy: LlmdApprox, worker: str, request: RouteRequest, positions: list[int]) -> None:
    chain = text_chain(request)
    policy.sent.store(worker, [chain[k] for k in positions])


def test_approx_counts_hashes_without_their_predecessors() -> None:
    """F-7: w1 holds blocks 0, 2, 3 and can reuse one; w0 holds 0, 1 and can reuse two. `contiguous` sees it."""
    request = a_request(1, 5 * BLOCK)
    for contiguous, scores in ((False, {"w0": 2 / 5, "w1": 3 / 5}), (True, {"w0": 2 / 5, "w1": 1 / 5})):
        policy = LlmdApprox(**PREFIX_ONLY, contiguous=contiguous)
        holding(policy, "w0", request, [0, 1])
        holding(policy, "w1", request, [0, 2, 3])
        assert policy.choose(request, a_fleet([0, 0])).scores == scores


def test_the_block_index_counts_only_what_can_be_reused() -> None:
    """F-7 for the policies that ask the index: `score` and `affinity` follow the two blocks that w0 can reuse."""
    request, index = a_request(1, 5 * BLOCK), BlockIndex()
    blocks = request.blocks.tolist()
    index.store("w0", blocks[:2])
    index.store("w1", [blocks[0], blocks[2], blocks[3]])
    fleet = Fleet(a_fleet([0, 0]).workers, lambda request: index.depths_by_walk(request.blocks), 0.0)
    for name in ("score", "affinity", "llmd_precise"):
        decision = make_policy(name).choose(request, fleet)
        assert (decision.worker, decision.hit_blocks) == ("w0", 2)


def test_the_walk_ends_at_the_first_hash_that_nobody_holds() -> None:
    policy, request = LlmdApprox(**PREFIX_ONLY), a_request(1, 5 * BLOCK)
    holding(policy, "w0", request, [0, 2, 3, 4])
    assert policy.choose(request, a_fleet([0])).scores == {"w0": 1 / 5}


def test_the_lru_is_bounded_and_loses_heads_first() -> None:
    """F-9 isn't shown: 31,250 hashes a worker; F-7's holes arise because the start of a prompt is the oldest."""
    policy = LlmdApprox(lru_hashes=12, **PREFIX_ONLY)
    policy.on_admit(a_request(1, 160), "w0", 0.0)
    policy.on_admit(a_request(50_000, 160), "w0", 0.0)
    assert policy.sent.count("w0") == 12
    chain = text_chain(a_request(1, 160))
    assert [value in policy.sent for value in chain] == [False] * 8 + [True] * 2
    assert LlmdApprox().options.lru_hashes == 31_250


def test_requests_since_the_last_report_are_not_seen() -> None:
    """smg-project/smg#1683, F-6: between two scrapes the emptiest worker draws every arrival."""
    stale = reports((0, 0.0), (3, 0.3))
    fleet = a_fleet([0, 3], report=stale)
    policy, ours = make_policy("llmd_precise"), make_policy("affinity")
    assert {policy.choose(a_request(1000 * k), replace_load(fleet, 40)).worker for k in range(20)} == {"w0"}
    assert {ours.choose(a_request(1000 * k), replace_load(fleet, 40)).worker for k in range(20)} == {"w1"}


def replace_load(fleet: Fleet, in_flight: int) -> Fleet:
    first, *others = fleet.workers
    return Fleet([replace(first, in_flight=in_flight), *others], fleet.lookup, fleet.now_seconds)


def test_precise_predicts_what_the_engines_deliver() -> None:
    engine = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 12_000), block_size=BLOCK, capacity_blocks=400)
    requests = session_requests(12, 6)
    precise = simulate_requests(requests, policy="llmd_precise", workers=3, engine=engine, arrivals="serial")
    assert [record.predicted_tokens for record in precise.records] == [r.cached_tokens for r in precise.records]
    assert precise.token_hit_ratio is not None
    assert precise.token_hit_ratio > 0.7
