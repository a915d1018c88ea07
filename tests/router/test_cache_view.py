from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.placement.cache_view import EventView, HistoryView
from prefixwatch.router.policy import RouteRequest

BLOCK = 4


def request(*blocks: int) -> RouteRequest:
    """A prompt of whole blocks, each named by a number; equal openings have equal hashes."""
    tokens = np.repeat(np.array(blocks, dtype=np.uint32), BLOCK)
    return RouteRequest("r", len(tokens), tokens, block_hashes(tokens, BLOCK), BLOCK)


def test_history_knows_the_shared_opening_of_what_it_routed() -> None:
    view = HistoryView(capacity_blocks=100)
    view.routed(request(1, 2, 3), "a")
    view.routed(request(1, 9), "b")
    assert view.depths(request(1, 2, 7)) == {"a": 2, "b": 1}
    assert view.depths(request(8)) == {}


def test_history_forgets_the_least_recent_tail_first() -> None:
    view = HistoryView(capacity_blocks=4)
    view.routed(request(1, 2), "a")
    view.routed(request(3, 4), "a")
    view.routed(request(1), "a")  # refreshes the head only
    view.routed(request(5), "a")  # one block too many: the tail 2 goes
    assert view.depths(request(1, 2)) == {"a": 1}
    assert view.depths(request(3, 4)) == {"a": 2}
    assert view.block_count("a") == 4


def test_history_also_forgets_by_age_where_it_is_told_to() -> None:
    now = 0.0
    view = HistoryView(100, ttl_seconds=120, clock=lambda: now)
    view.routed(request(1, 2), "a")
    view.routed(request(1, 3), "b")
    now = 60.0
    view.routed(request(1), "a")  # routing it again renews its time
    now = 119.9
    assert view.depths(request(1, 2)) == {"a": 2, "b": 1}
    now = 120.0
    assert view.depths(request(1, 2)) == {"a": 1}
    assert (view.block_count("a"), view.block_count("b")) == (1, 0)
    now = 180.0
    assert view.block_count("a") == 0
    view.routed(request(1, 2), "a")
    now = 299.0
    assert view.depths(request(1, 2)) == {"a": 2}


def test_a_history_must_live_a_while() -> None:
    with pytest.raises(ValueError, match="time to live must be above 0 s, got 0"):
        HistoryView(1, ttl_seconds=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 1), st.integers(1, 6)), max_size=25))
def test_the_clock_takes_blocks_exactly_as_old_as_it_says(steps: list[tuple[float, int, int]]) -> None:
    now, last_routed = 0.0, dict[tuple[int, int], float]()
    view = HistoryView(1000, ttl_seconds=10, clock=lambda: now)
    for pause, opening, length in steps:
        now += pause
        view.routed(request(*[opening] * length), "a")
        last_routed |= {(opening, depth): now for depth in range(length)}
        kept = [key for key, at in last_routed.items() if at + 10 > now]
        assert view.block_count("a") == len(kept)
        for which in (0, 1):
            depth = sum(1 for key in kept if key[0] == which)
            assert view.depths(request(*[which] * 6)) == ({"a": depth} if depth else {})


def test_a_prompt_longer_than_the_history_keeps_its_head() -> None:
    view = HistoryView(capacity_blocks=2)
    view.routed(request(1, 2, 3), "a")
    assert view.depths(request(1, 2, 3)) == {"a": 2}


def test_a_removed_worker_is_forgotten_at_once() -> None:
    """sgl-project/sglang#39822 (RT17)"""
    view = HistoryView(capacity_blocks=4)
    view.routed(request(1, 2), "a")
    view.worker_removed("a")
    assert view.depths(request(1, 2)) == {}
    view.routed(request(1), "a")
    assert view.depths(request(1, 2)) == {"a": 1}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30), st.integers(1, 8))
def test_history_never_holds_a_block_without_its_predecessors(prompts: list[list[int]], capacity: int) -> None:
    view = HistoryView(capacity)
    for prompt in prompts:
        view.routed(request(*prompt), "a")
        assert view.block_count("a") <= capacity
    for prompt in prompts:
        blocks = request(*prompt).blocks
        assert view.depths(request(*prompt)) == view._index.depths_by_walk(blocks)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=400), st.integers(1, 8))
def test_history_keeps_what_a_list_in_order_of_use_keeps(prompts: list[list[int]], capacity: int) -> None:
    view, recency = HistoryView(capacity), OrderedDict[int, None]()
    for prompt in prompts:
        view.routed(request(*prompt), "a")
        for block in reversed(request(*prompt).blocks[:capacity].tolist()):
            recency.pop(block, None)
            recency[block] = None
        while len(recency) > capacity:
            recency.popitem(last=False)
        assert all(view._index.holds("a", block) for block in recency)
        assert view.block_count("a") == len(recency)


def test_events_are_read_from_the_index_and_dropped_with_the_worker() -> None:
    index = BlockIndex()
    view = EventView(index, {"a": [WorkerFeed("a", index, BLOCK)]})
    index.store("a", request(1, 2).blocks.tolist())
    view.routed(request(1, 2, 3), "a")  # the engine will say itself what it stored
    assert view.depths(request(1, 2, 3)) == {"a": 2}
    assert view.block_count("a") == 2
    view.worker_removed("a")
    assert view.depths(request(1, 2, 3)) == {}


def test_a_worker_of_several_ranks_is_credited_with_what_all_of_them_hold() -> None:
    """Which rank will serve a request isn't known (N20)."""
    index = BlockIndex()
    ranks = [WorkerFeed("a/0", index, BLOCK), WorkerFeed("a/1", index, BLOCK)]
    view = EventView(index, {"a": ranks, "b": [WorkerFeed("b", index, BLOCK)]})
    blocks = request(1, 2, 3, 4, 5).blocks.tolist()
    index.store("a/0", blocks[:4])
    index.store("b", blocks[:1])
    assert view.depths(request(1, 2, 3, 4, 5)) == {"b": 1}
    index.store("a/1", blocks[:3])
    assert view.depths(request(1, 2, 3, 4, 5)) == {"a": 3, "b": 1}
    assert (view.block_count("a"), view.block_count("b")) == (7, 1)
