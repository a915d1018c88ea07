from __future__ import annotations

import json
from collections import OrderedDict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import Hashes
from prefixwatch.kvcache.reuse import ReuseProfile, reuse_profile

TRACES = Path(__file__).parents[3] / "shared" / "data" / "mooncake"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public Mooncake traces are not in {TRACES}")


@cache
def conversation() -> ReuseProfile:
    lines = (TRACES / "conversation_trace.jsonl").read_text().splitlines()
    return reuse_profile([np.array(json.loads(line)["hash_ids"], dtype=np.uint64) for line in lines])


def hashes(*prompts: list[int]) -> list[Hashes]:
    return [np.array(blocks, dtype=np.uint64) for blocks in prompts]


def lru_hits(prompts: list[list[int]], capacity: int) -> int:
    """Leading blocks found by a cache that is kept step by step."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in prompts:
        for block in blocks:
            if block not in held:
                break
            hits += 1
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
            while len(held) > capacity:
                held.popitem(last=False)
    return hits


def test_a_prompt_sent_again_needs_a_cache_of_its_own_length() -> None:
    profile = reuse_profile(hashes([1, 2, 3], [1, 2, 3]))
    assert profile.reused_blocks.tolist() == [0, 3]
    assert profile.needed_blocks.tolist() == [1, 2, 3]
    assert [profile.hit_blocks(capacity) for capacity in (0, 1, 2, 3, None)] == [0, 1, 2, 3, 3]
    assert profile.hit_ratio() == 0.5


def test_what_came_between_must_fit_too() -> None:
    profile = reuse_profile(hashes([1], [2, 3], [1]))
    assert profile.needed_blocks.tolist() == [3]
    assert (profile.capacity_for(0.9), profile.capacity_for(1.0)) == (3, 3)


def test_a_known_block_behind_a_new_one_is_not_reused() -> None:
    assert reuse_profile(hashes([1, 2], [9, 2])).reused_blocks.tolist() == [0, 0]


def test_nothing_is_reused_of_nothing() -> None:
    for prompts in ([], hashes([])):
        profile = reuse_profile(prompts)
        assert (profile.hit_ratio(), profile.capacity_for(1.0), profile.hit_blocks(5)) == (None, None, 0)


@given(st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=4), max_size=12), st.integers(1, 9))
def test_every_capacity_reuses_what_a_real_cache_of_that_size_does(paths: list[list[int]], capacity: int) -> None:
    """Blocks are chained, so a block's id says all that stands before it."""
    prompts = [[hash(tuple(path[: k + 1])) & 0xFFFFFFFF for k in range(len(path))] for path in paths]
    assert reuse_profile(hashes(*prompts)).hit_blocks(capacity) == lru_hits(prompts, capacity)


@needs_traces
@pytest.mark.parametrize(
    ("capacity_blocks", "percent"), [(None, 36.64), (1_000, 4.45), (5_000, 11.18), (10_000, 21.16), (50_000, 35.46)]
)
def test_block_hit_rates_of_the_public_conversation_trace(capacity_blocks: int | None, percent: float) -> None:
    """The same figures as `simulate --trace` with one engine of that capacity."""
    ratio = conversation().hit_ratio(capacity_blocks)
    assert ratio is not None
    assert 100 * ratio == pytest.approx(percent, abs=0.05)
