"""The paged block pool: who holds what, what is evicted, and that no block is ever lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixwatch.engines.model.block_pool import BlockPool


def store(pool: BlockPool, blocks: list[int]) -> list[int]:
    """Compute and release a prompt, as a request does; answers what was evicted for it."""
    hits = pool.match(blocks)
    evicted = pool.allocate(len(blocks) - hits, blocks[:hits])
    assert evicted is not None
    pool.commit(blocks[hits:])
    pool.release(blocks)
    return evicted


def test_a_released_prompt_is_found_up_to_where_another_one_leaves_it() -> None:
    pool = BlockPool(8)
    store(pool, [1, 2, 3])
    assert pool.match([1, 2, 9]) == 2
    assert pool.match([9, 2, 3]) == 0


def test_the_least_recent_prompt_goes_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(4)
    store(pool, [1, 2])
    store(pool, [3, 4])
    assert pool.eviction_order() == [2, 1, 4, 3]
    store(pool, [1])
    assert store(pool, [5, 6, 7]) == [2, 4, 3]
    assert pool.evicted_blocks == 3


def test_blanks_are_reused_before_anything_is_evicted() -> None:
    pool = BlockPool(4)
    store(pool, [1, 2])
    assert pool.allocate(2) == []
    pool.release([], blanks=2)
    assert pool.allocate(2) == []
    assert pool.match([1, 2]) == 2


def test_held_blocks_are_never_evicted_and_a_request_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4)
    store(pool, [1, 2])
    store(pool, [3])
    assert pool.allocate(1, [1, 2]) == []
    assert pool.allocate(2) is None
    assert pool.allocate(1, [3]) is None
    assert pool.eviction_order() == [3]
    assert (pool.used_blocks, pool.usage_ratio) == (3, 0.75)
    assert pool.allocate(1) == [3]


def test_two_requests_that_compute_the_same_block_keep_one_copy() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.allocate(2)
    assert pool.commit([1, 2]) == [1, 2]
    assert pool.commit([1, 3]) == [3]
    assert (pool.references(1), pool.used_blocks) == (2, 3)
    pool.release([1, 2])
    assert (pool.references(1), pool.eviction_order()) == (1, [2])


def test_a_block_that_lay_idle_is_held_again_by_who_computed_it_once_more() -> None:
    pool = BlockPool(4)
    store(pool, [1, 2])
    pool.allocate(2)
    assert pool.commit([1, 2]) == []
    assert (pool.eviction_order(), pool.references(1), pool.free_blocks) == ([], 1, 2)


def test_free_blocks_need_no_eviction_and_available_ones_may() -> None:
    pool = BlockPool(4)
    store(pool, [1, 2])
    pool.allocate(1)
    assert (pool.free_blocks, pool.available_blocks) == (1, 3)
    assert (pool.references(1), pool.references(9)) == (0, 0)
    unlimited = BlockPool()
    assert (unlimited.free_blocks, unlimited.available_blocks) == (None, None)


def test_clear_waits_until_nothing_is_held() -> None:
    pool = BlockPool(4)
    store(pool, [1])
    pool.allocate(1)
    assert not pool.clear()
    assert 1 in pool
    pool.release([], blanks=1)
    assert pool.clear()
    assert (pool.cached_blocks, pool.allocate(4)) == (0, [])


def test_without_a_limit_nothing_is_evicted() -> None:
    pool = BlockPool(None)
    store(pool, list(range(10_000)))
    assert (pool.cached_blocks, pool.evicted_blocks, pool.usage_ratio) == (10_000, 0, 0.0)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_blocks must be at least 1"):
        BlockPool(0)
    assert BlockPool(1).free_blocks == 1


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=40), st.integers(6, 12))
def test_serial_prompts_hit_as_in_a_least_recently_used_list_touched_tail_first(
    prompts: list[list[int]], capacity: int
) -> None:
    """The reference keeps one ordered list: touch a prompt's blocks tail first, then cut the list."""
    pool = BlockPool(capacity)
    recent: list[tuple[int, ...]] = []
    for prompt in prompts:
        chained = [tuple(prompt[: k + 1]) for k in range(len(prompt))]
        expected = next((k for k, block in enumerate(chained) if block not in recent), len(chained))
        blocks = [hash(block) for block in chained]
        assert pool.match(blocks) == expected
        store(pool, blocks)
        recent = [block for block in recent if block not in chained] + chained[::-1]
        recent = recent[-capacity:]


class HeldBlocks(RuleBasedStateMachine):
    """Requests with shared openings come and go in any order; the pool's books must balance throughout."""

    CAPACITY = 10

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.CAPACITY)
        self.held: list[tuple[list[int], int]] = []  # blocks and blanks of each request

    @rule(family=st.integers(0, 2), length=st.integers(1, 4), blanks=st.integers(0, 2))
    def admit(self, family: int, length: int, blanks: int) -> None:
        blocks = [family * 10 + k for k in range(length)]
        hits = self.pool.match(blocks)
        before = (self.pool.eviction_order(), self.pool.used_blocks)
        if self.pool.allocate(length - hits + blanks, blocks[:hits]) is None:
            assert before == (self.pool.eviction_order(), self.pool.used_blocks)
            return
        self.pool.commit(blocks[hits:])
        self.held.append((blocks, blanks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        blocks, blanks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks, blanks)

    @rule()
    def clear(self) -> None:
        assert self.pool.clear() == (not self.held)

    @invariant()
    def references_are_what_requests_hold(self) -> None:
        expected = Counter(block for blocks, _ in self.held for block in blocks)
        assert all(self.pool.references(block) == count for block, count in expected.items())
        assert self.pool.used_blocks == len(expected) + sum(blanks for _, blanks in self.held)

    @invariant()
    def nothing_is_lost_or_made(self) -> None:
        assert self.pool.used_blocks + len(self.pool.eviction_order()) <= self.CAPACITY
        assert self.pool.cached_blocks - len(self.pool.eviction_order()) == len({b for bs, _ in self.held for b in bs})

    @invariant()
    def no_block_outlives_the_one_before_it(self) -> None:
        for family in range(3):
            cached = [family * 10 + k in self.pool for k in range(4)]
            assert cached == sorted(cached, reverse=True)


TestHeldBlocks = HeldBlocks.TestCase
TestHeldBlocks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
