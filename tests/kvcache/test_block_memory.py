"""The memory of block chains: exact in its window, never too small beyond it, and bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.block_memory import SEGMENT_COST_BLOCKS, BlockMemory, GroupFilter
from prefixwatch.kvcache.blocks import Hashes, as_tokens, block_hashes
from prefixwatch.kvcache.prediction import longest_common_blocks

_LENGTHS = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 130])
_PROMPT = st.tuples(st.integers(0, 60), _LENGTHS, st.integers(0, 2), _LENGTHS)
"""Which earlier prompt is continued, how many of its blocks, by what, and by how much."""


def chain(tokens: list[int]) -> Hashes:
    return block_hashes(as_tokens(tokens), 1)


def prompts(drawn: list[tuple[int, int, int, int]]) -> list[list[int]]:
    made: list[list[int]] = []
    for which, kept, kind, added in drawn:
        base = made[which % len(made)][:kept] if made else []
        made.append([*base, *((kind * 1000 + len(base) + k) for k in range(added))])
    return made


@settings(max_examples=150, deadline=None)
@given(st.lists(_PROMPT, max_size=30))
def test_within_its_window_depths_are_exact(drawn: list[tuple[int, int, int, int]]) -> None:
    memory, earlier = BlockMemory(10**6), list[Hashes]()
    owner = memory.new_owner()
    for tokens in prompts(drawn):
        blocks = chain(tokens)
        exact = longest_common_blocks(blocks, earlier)
        assert memory.depth(owner, blocks) == exact
        assert memory.add(owner, blocks) == (exact, exact)
        earlier.append(blocks)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), _PROMPT), max_size=40), st.sampled_from([64, 200, 600]))
def test_beyond_its_window_bounds_are_never_too_small_and_its_size_never_too_large(
    drawn: list[tuple[int, tuple[int, int, int, int]]], capacity: int
) -> None:
    """Depths are never more, and bounds never less, than what an owner really had; and the owners are kept apart."""
    memory = BlockMemory(capacity)
    owners = [memory.new_owner() for _ in range(4)]
    earlier: list[list[Hashes]] = [[], [], [], []]
    for tokens, (who, _) in zip(prompts([prompt for _, prompt in drawn]), drawn, strict=True):
        blocks = chain(tokens)
        exact = longest_common_blocks(blocks, earlier[who])
        depth, bound = memory.add(owners[who], blocks)
        assert depth <= exact <= bound or owners[who].lost
        assert memory.blocks <= max(capacity, 0)
        earlier[who].append(blocks)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), _PROMPT), max_size=40), st.sampled_from([100, 300, 10**6]))
def test_what_is_kept_of_a_chain_is_its_beginning_and_its_cost_is_what_is_counted(
    drawn: list[tuple[int, tuple[int, int, int, int]]], capacity: int
) -> None:
    """Against every block of every prompt looked up by itself. A lookup that walks the tree finds all that is in it."""
    memory = BlockMemory(capacity)
    owners = [memory.new_owner(), memory.new_owner()]
    sent: list[tuple[int, Hashes]] = []
    for tokens, (who, _) in zip(prompts([prompt for _, prompt in drawn]), drawn, strict=True):
        sent.append((who, chain(tokens)))
        memory.add(owners[who], sent[-1][1])
        for number, owner in enumerate(owners):
            kept = [block for segment in owner.segments for block in segment.blocks.tolist()]
            assert len(kept) == len(set(kept)), "no block is kept twice"
            assert owner.blocks == len(kept) + SEGMENT_COST_BLOCKS * len(owner.segments)
            for blocks in (blocks for each, blocks in sent if each == number):
                positions = [position for position, block in enumerate(blocks.tolist()) if block in set(kept)]
                assert positions == list(range(memory.depth(owner, blocks)))


def test_a_conversation_is_one_segment_and_a_branch_splits_it_where_it_leaves() -> None:
    memory = BlockMemory(10**6)
    owner = memory.new_owner()
    for turn in range(1, 51):
        assert memory.add(owner, chain(list(range(7 * turn)))) == (7 * turn - 7, 7 * turn - 7)
    assert len(owner.segments) == 1
    memory.add(owner, chain([*range(100), 1, 2, 3]))
    memory.add(owner, chain([*range(100), 4]))
    kept = sorted((each.first, len(each.blocks)) for each in owner.segments)
    assert kept == [(0, 100), (100, 1), (100, 3), (100, 250)]
    assert owner.blocks == 354 + 4 * SEGMENT_COST_BLOCKS == memory.blocks


def test_a_branch_leaves_what_nobody_asks_for_to_be_given_up_first() -> None:
    """The first prompt's own end isn't kept for the sake of the opening that all others share."""
    memory = BlockMemory(1000)
    owner = memory.new_owner()
    first = chain(list(range(300)))
    memory.add(owner, first)
    for k in range(8):
        memory.add(owner, chain([*range(100), *range(1000 * k + 1000, 1000 * k + 1060)]))
    assert memory.depth(owner, first) == 100
    assert memory.bound(owner, first) == 300


def test_the_least_recently_used_chains_of_the_largest_owner_are_given_up_first() -> None:
    memory = BlockMemory(1000)
    small, large = memory.new_owner(), memory.new_owner()
    mine = chain(list(range(100)))
    memory.add(small, mine)
    system = list(range(5000, 5100))
    for k in range(50):
        memory.add(large, chain([*system, *range(10_000 * k + 7000, 10_000 * k + 7030)]))
    assert memory.depth(small, mine) == 100
    assert memory.depth(large, chain([*system, 1])) == 100, "each of its prompts used it"
    assert memory.depth(large, chain([*system, *range(17_000, 17_030)])) == 100, "the second of them is long gone"
    assert memory.depth(large, chain([*system, *range(497_000, 497_030)])) == 130
    assert (small.forgot, large.forgot, large.lost) == (False, True, False)


def test_what_was_given_up_is_still_bounded_by_its_groups() -> None:
    memory = BlockMemory(300)
    owner = memory.new_owner()
    first = chain(list(range(150)))
    memory.add(owner, first)
    for k in range(1, 10):
        memory.add(owner, chain(list(range(1000 * k, 1000 * k + 150))))
    assert memory.depth(owner, first) == 0
    assert memory.bound(owner, first) == 150, "its four whole groups are known, and the rest may have been there"
    assert memory.bound(owner, chain(list(range(500_000, 500_150)))) == 31, "a stranger: less than a group"


def test_ten_thousand_owners_stay_within_the_bound() -> None:
    memory, rng = BlockMemory(50_000), np.random.default_rng(1)
    owners = [memory.new_owner() for _ in range(10_000)]
    for owner in owners:
        memory.add(owner, rng.integers(1, 2**64, 40, dtype=np.uint64))
        assert memory.blocks <= 50_000
    kept = sum(owner.blocks for owner in owners)
    assert kept == memory.blocks > 50_000 * 63 // 64 - 40 - SEGMENT_COST_BLOCKS  # a 64th is given up at once


def test_a_full_filter_takes_few_strange_groups_for_its_own() -> None:
    rng = np.random.default_rng(1)
    own, strange = (rng.integers(0, 2**64, 20_000, dtype=np.uint64) for _ in range(2))
    filled = GroupFilter(20_000)
    filled.add(own)
    assert all(name in filled for name in own.tolist())
    assert sum(name in filled for name in strange.tolist()) < 20_000 / 70


@pytest.mark.parametrize("length", [0, 1, 32, 64, 1000])
def test_a_prompt_sent_again_is_known_whole(length: int) -> None:
    memory = BlockMemory(10**6)
    owner, blocks = memory.new_owner(), chain(list(range(length)))
    memory.add(owner, blocks)
    assert memory.add(owner, blocks) == (length, length)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=40), st.sampled_from([8, 64, 300]))
def test_blocks_with_one_hash_at_two_depths_break_nothing(drawn: list[list[int]], capacity: int) -> None:
    """Whoever knows the seed can look for such prompts: depths may be wrong then, and the books stay right."""
    memory = BlockMemory(capacity)
    owner = memory.new_owner()
    for names in drawn:
        memory.add(owner, np.array(names, dtype=np.uint64))
        assert memory.blocks == sum(len(segment.blocks) + SEGMENT_COST_BLOCKS for segment in owner.segments)
        assert memory.blocks <= capacity
