"""The block index against a model so plain that it can't be wrong: a set of blocks a worker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixwatch.kvcache.blocks import Hashes, as_tokens, block_hashes
from prefixwatch.kvcache.index.block_index import BlockIndex

WORKERS = ["w0", "w1", "w2", "w3", "w4"]
PROMPTS = [block_hashes(as_tokens([*range(64), *([9] * 64)]), 8), block_hashes(as_tokens(range(128)), 8)]


def hashes(*values: int) -> Hashes:
    return np.array(values, dtype=np.uint64)


def naive(held: dict[str, set[int]], prompt: Hashes) -> dict[str, int]:
    depths = {}
    for worker, blocks in held.items():
        depth = next((k for k, block in enumerate(prompt.tolist()) if block not in blocks), len(prompt))
        if depth:
            depths[worker] = depth
    return depths


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(WORKERS), st.sampled_from([0, 1]), st.integers(0, 16))))
def test_bisection_walk_and_model_agree_on_prefix_closed_contents(stored: list[tuple[str, int, int]]) -> None:
    index, held = BlockIndex(), dict[str, set[int]]()
    for worker, which, depth in stored:
        index.store(worker, PROMPTS[which][:depth].tolist())
        held.setdefault(worker, set()).update(PROMPTS[which][:depth].tolist())
    for prompt in (*PROMPTS, PROMPTS[0][:5], PROMPTS[1][:0]):
        expected = naive(held, prompt)
        assert index.depths(prompt) == expected
        assert index.depths_by_walk(prompt) == expected


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(WORKERS), st.sets(st.integers(0, 15)), max_size=5))
def test_the_walk_is_right_even_with_holes(positions: dict[str, set[int]]) -> None:
    index, prompt = BlockIndex(), PROMPTS[0]
    held = {worker: {int(prompt[k]) for k in chosen} for worker, chosen in positions.items()}
    for worker, blocks in held.items():
        index.store(worker, blocks)
    assert index.depths_by_walk(prompt) == naive(held, prompt)


class IndexMachine(RuleBasedStateMachine):
    """Workers come and go, are cleared and reused, while the dead entries are swept underneath."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.held: dict[str, set[int]] = {}

    @rule(worker=st.sampled_from(WORKERS), depth=st.integers(0, 16), prompt=st.sampled_from([0, 1]))
    def store(self, worker: str, depth: int, prompt: int) -> None:
        blocks = PROMPTS[prompt][:depth].tolist()
        self.index.store(worker, blocks)
        self.held.setdefault(worker, set()).update(blocks)

    @rule(worker=st.sampled_from(WORKERS), first=st.integers(0, 16), prompt=st.sampled_from([0, 1]))
    def remove_tail(self, worker: str, first: int, prompt: int) -> None:
        blocks = PROMPTS[prompt][first:].tolist()
        self.index.remove(worker, blocks)
        self.held.get(worker, set()).difference_update(blocks)

    @rule(worker=st.sampled_from(WORKERS))
    def clear(self, worker: str) -> None:
        self.index.clear(worker)
        if worker in self.held:
            self.held[worker] = set()

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        self.index.forget(worker)
        self.held.pop(worker, None)

    @invariant()
    def agrees(self) -> None:
        assert sorted(self.index.workers) == sorted(self.held)
        for worker in WORKERS:
            assert self.index.block_count(worker) == len(self.held.get(worker, ()))
        for block in (int(PROMPTS[0][0]), int(PROMPTS[1][-1])):
            holders = sorted(worker for worker, blocks in self.held.items() if block in blocks)
            assert sorted(self.index.holders(block)) == holders
            assert [self.index.holds(worker, block) for worker in WORKERS] == [w in holders for w in WORKERS]
        for prompt in PROMPTS:
            assert self.index.depths_by_walk(prompt) == naive(self.held, prompt)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_a_cleared_worker_is_gone_at_once_however_much_it_held() -> None:
    index = BlockIndex()
    index.store("big", range(100_000))
    index.store("small", [0, 1])
    index.clear("big")
    assert index.depths(hashes(0, 1)) == {"small": 2}
    assert index.block_count("big") == 0
    index.store("big", [0])
    assert index.depths(hashes(0, 1)) == {"big": 1, "small": 2}


def test_dead_entries_are_swept_by_later_stores() -> None:
    index = BlockIndex()
    index.store("w", range(3000))
    index.clear("w")
    assert len(index) == 3000
    for _ in range(6):
        index.store("v", [1])
    assert len(index) == 1


def test_a_forgotten_workers_bit_is_reused_clean() -> None:
    index = BlockIndex()
    for generation in range(200):
        name = f"pod-{generation}"
        index.store(name, [1, 2, 3])
        index.forget(name)
    index.store("last", [7])
    assert index.workers == ("last",)
    assert index.holders(1) == []
    assert index.depths(hashes(7)) == {"last": 1}
    assert max(index._holders.values()).bit_length() < 5


def test_removals_may_arrive_twice_or_for_strangers() -> None:
    index = BlockIndex()
    index.store("w", [1])
    index.remove("w", [1, 1, 2])
    index.remove("stranger", [1])
    assert index.block_count("w") == 0
    assert index.workers == ("w",)


def test_a_match_never_exceeds_the_prompt() -> None:
    """kvcache-ai/Mooncake#4164 (RT12): a prompt of 40 tokens was said to match 48."""
    index, longer = BlockIndex(), as_tokens(range(64))
    index.store("w", block_hashes(longer, 16).tolist())
    assert index.depths(block_hashes(longer[:40], 16)) == {"w": 2}


def test_credit_comes_in_whole_retrieval_units() -> None:
    """llm-d/llm-d-router#2889 (RT11): 48 tokens were credited of a 64-token chunk that only loads whole."""
    index, chunk = BlockIndex(), block_hashes(as_tokens(range(128)), 16)
    index.store("w", chunk.tolist())
    index.set_retrieval_unit("w", 4)
    assert index.depths(chunk[:3]) == index.depths_by_walk(chunk[:3]) == {}
    assert index.depths(chunk[:7]) == index.depths_by_walk(chunk[:7]) == {"w": 4}
    assert index.depths(chunk) == {"w": 8}
    index.set_retrieval_unit("w", 1)
    assert index.depths(chunk[:3]) == {"w": 3}
    with pytest.raises(ValueError, match="at least 1"):
        index.set_retrieval_unit("w", 0)
