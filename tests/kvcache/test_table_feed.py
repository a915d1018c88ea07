"""The events of engines into the fleet's table: what is held and counted afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import as_tokens, block_hashes, multimodal_key, namespace_root
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.events.sequence import EventSequence, Replay
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.index.block_table import BlockTable

PROMPT = list(range(1, 161))
OURS = block_hashes(as_tokens(PROMPT)).tolist()
START = 1000.0


def run(wire: Any, first: int, last: int, base: int = 100, **fields: Any) -> Any:
    """Engine blocks first … last-1 of PROMPT, named base + position."""
    parent = base + first - 1 if first else None
    return wire.stored(range(base + first, base + last), PROMPT[first * 16 : last * 16], parent, **fields)


class Bench:
    """Feeds of one table, and their engines' payloads, numbered as they are made."""

    def __init__(self, wire: Any) -> None:
        self.wire, self.table = wire, BlockTable()
        self.feeds: dict[str, TableFeed] = {}
        self.next: dict[str, int] = {}

    def feed(self, worker: str = "w") -> TableFeed:
        if worker not in self.feeds:
            self.feeds[worker] = TableFeed(worker, self.table, wall_clock=lambda: START)
        return self.feeds[worker]

    def send(self, *events: Any, worker: str = "w", replayed: bool = False) -> Any:
        sequence = self.next.get(worker, 0)
        self.next[worker] = sequence + 1
        return self.feed(worker).apply(sequence, self.wire.batch(*events), 0.0, replayed=replayed)

    def held(self, worker: str = "w") -> list[int]:
        snapshot = self.table.snapshot()
        return sorted(snapshot.blocks["hash"][snapshot.rows_held[worker]].tolist())


@pytest.fixture
def bench(wire: Any) -> Bench:
    return Bench(wire)


def test_blocks_are_hashed_anew_and_removed_by_the_engines_names(bench: Bench) -> None:
    bench.send(run(bench.wire, 0, 3), run(bench.wire, 3, 4), bench.wire.removed([103]))
    assert bench.held() == sorted(OURS[:3])
    blocks = bench.feed().blocks
    assert (blocks.stored_blocks, blocks.evicted_blocks, blocks.resident_blocks) == (4, 1, 3)
    assert bench.feed().block_size == 16


def test_equal_blocks_of_several_engines_are_one(bench: Bench) -> None:
    for worker, base in (("a", 100), ("b", 700)):
        bench.send(run(bench.wire, 0, 4, base=base), worker=worker)
    bench.send(bench.wire.removed([703]), worker="b")
    assert (len(bench.table), len(bench.held("a")), len(bench.held("b"))) == (4, 4, 3)


@pytest.mark.parametrize(
    ("fields", "root"),
    [
        ({"extra_keys": [["tenantA"], None, None]}, namespace_root("tenantA")),
        ({"cache_salt": "tenantA"}, namespace_root("tenantA")),
        ({"lora_name": "ada", "extra_keys": [["ada", "s"], ["ada"], ["ada"]]}, namespace_root("s", "ada")),
        ({"lora_id": 3}, namespace_root(None, "lora_id=3")),
        ({"cache_salt": "s", "extra_key": "k"}, namespace_root("s", extra_key="k")),
    ],
)
def test_tenants_and_adapters_share_nothing(bench: Bench, fields: dict[str, Any], root: int) -> None:
    """ai-dynamo/dynamo#8197 (IS06): the same tokens under another salt are other blocks."""
    bench.send(run(bench.wire, 0, 3, **fields), run(bench.wire, 3, 4))
    bench.send(run(bench.wire, 0, 4), worker="public")
    assert bench.held() == sorted(block_hashes(as_tokens(PROMPT[:64]), root=root).tolist())
    assert len(bench.table) == 8


def test_a_salt_reaches_the_blocks_of_later_events(bench: Bench) -> None:
    """vllm-project/vllm#52655 (IS08): only a prompt's first block names its salt; the others are copies as well."""
    later = run(bench.wire, 2, 4, base=300)
    bench.send(run(bench.wire, 0, 4), run(bench.wire, 0, 2, base=300, extra_keys=[["tenantA"], None]), later)
    blocks = bench.feed().blocks
    assert (blocks.duplicate_tokens, blocks.lost_tokens, blocks.resident_blocks) == (64, 64, 8)
    bench.send(bench.wire.removed([301, 302, 303]))
    bench.send(later)
    assert (blocks.duplicate_tokens, bench.feed().parked) == (16, 1)  # its parent is gone
    bench.send(run(bench.wire, 1, 2, base=300))
    assert (blocks.duplicate_tokens, bench.feed().parked) == (64, 0)


def test_copies_are_of_one_worker(bench: Bench) -> None:
    for worker, salt in (("a", "tenantA"), ("b", "tenantB")):
        bench.send(run(bench.wire, 0, 4, cache_salt=salt), worker=worker)
    assert [bench.feed(worker).blocks.duplicate_tokens for worker in ("a", "b")] == [0, 0]


@pytest.mark.parametrize(
    ("fields", "tells"),
    [({}, False), ({"extra_keys": [None] * 4}, True), ({"cache_salt": "s"}, True), ({"extra_key": "k"}, False)],
)
def test_a_feed_knows_whether_its_engine_names_salts(bench: Bench, fields: dict[str, Any], tells: bool) -> None:
    bench.send(run(bench.wire, 0, 4, **fields))
    assert bench.feed().tells_salts == tells


def test_pictures_are_part_of_the_block(bench: Bench) -> None:
    bench.send(run(bench.wire, 0, 3, extra_keys=[None, [["sha", 4]], None]))
    pictured = block_hashes(as_tokens(PROMPT[:48]), multimodal={1: [multimodal_key("sha", 4)]})
    assert bench.held() == sorted(pictured.tolist())


@pytest.mark.parametrize("name", [-7, b"\x01" * 32, 2**64 - 1, 0])
def test_names_of_any_kind(bench: Bench, name: int | bytes) -> None:
    bench.send(bench.wire.stored([name], PROMPT[:16]), bench.wire.stored([5], PROMPT[16:32], parent=name))
    assert bench.held() == sorted(OURS[:2])
    bench.send(bench.wire.removed([name]))
    assert (bench.held(), len(bench.table)) == (OURS[1:2], 1)


def test_a_gap_counts_and_is_lost_without_a_replay(bench: Bench) -> None:
    """llm-d/llm-d-router#1737 (RT14): the gap is 2 batches; nothing is believed of the worker until it is closed."""
    bench.send(run(bench.wire, 0, 1))
    bench.send(run(bench.wire, 1, 2))
    bench.send(run(bench.wire, 0, 2), worker="other")
    feed, late = bench.feed(), bench.wire.batch(bench.wire.removed([100]))
    assert feed.apply(4, late, 0.0).replay == Replay(1)
    assert (feed.unsure, feed.counters.missed_batches, feed.counters.lost_batches) == (True, 2, 0)
    feed.lost()
    feed.apply(4, late, 0.0)
    assert (bench.held(), bench.held("other"), feed.clears) == ([], sorted(OURS[:2]), 1)
    assert (feed.unsure, feed.incomplete, feed.counters.lost_batches) == (False, True, 2)


def test_a_gap_that_a_replay_closes_costs_nothing(bench: Bench) -> None:
    """llm-d/llm-d-router#1737 (RT14)"""
    bench.send(run(bench.wire, 0, 2))
    missed = [bench.wire.batch(run(bench.wire, 2, 3)), bench.wire.batch(bench.wire.removed([102]))]
    late = bench.wire.batch(run(bench.wire, 2, 4))
    feed = bench.feed()
    assert feed.apply(3, late, 0.0).replay == Replay(0)
    for sequence, payload in enumerate([*missed, late], start=1):
        feed.apply(sequence, payload, 0.0, replayed=True)
    assert (bench.held(), feed.clears, feed.incomplete) == (sorted(OURS[:4]), 0, False)
    assert (feed.counters.replayed_batches, feed.counters.lost_batches) == (3, 0)
    assert (feed.blocks.stored_blocks, feed.blocks.evicted_blocks, feed.blocks.regretted_blocks) == (5, 1, 1)


def test_a_cleared_cache_is_no_eviction(bench: Bench) -> None:
    """vllm-project/aibrix#2287 (RT16): the engine dropped its cache; nothing is left, nothing was evicted."""
    bench.send(run(bench.wire, 0, 4))
    bench.send(bench.wire.cleared(), run(bench.wire, 0, 1, base=500))
    blocks = bench.feed().blocks
    assert (bench.held(), bench.feed().clears) == (OURS[:1], 1)
    assert (blocks.evicted_blocks, blocks.regretted_blocks, blocks.stored_blocks) == (0, 0, 5)


def test_a_restarted_engine_holds_nothing_of_its_earlier_life(bench: Bench) -> None:
    """sgl-project/sglang#39822 (RT17): hundreds of placements stayed with a worker whose cache was empty."""
    bench.send(*(run(bench.wire, k, k + 1) for k in range(10)))
    bench.feed().apply(0, bench.wire.batch(run(bench.wire, 0, 1, base=900)), 0.0)
    assert (bench.held(), bench.feed().clears, bench.feed().counters.restarts) == (OURS[:1], 1, 1)


def test_who_joins_late_without_a_replay_knows_that_something_is_missing(bench: Bench) -> None:
    feed = bench.feed()
    feed.lost()
    feed.apply(7, bench.wire.batch(run(bench.wire, 0, 1)), 0.0)
    assert (feed.incomplete, feed.clears) == (True, 0)
    feed.apply(8, bench.wire.batch(bench.wire.cleared()), 0.0)
    assert (feed.incomplete, feed.clears) == (False, 1)


def test_what_happened_before_joining_is_held_and_not_counted(bench: Bench) -> None:
    bench.wire.timestamp = START - 100
    bench.send(run(bench.wire, 0, 4), replayed=True)
    bench.wire.timestamp = START + 10
    bench.send(bench.wire.removed([103]))
    blocks = bench.feed().blocks
    assert (blocks.resident_blocks, blocks.stored_blocks, blocks.evicted_blocks) == (3, 0, 1)
    assert blocks.lifetimes[1] == 110.0


def test_an_engine_whose_clock_is_behind_is_counted_all_the_same(bench: Bench) -> None:
    bench.wire.timestamp = START - 7200
    bench.send(run(bench.wire, 0, 4))
    bench.send(bench.wire.removed([103]))
    assert (bench.feed().blocks.stored_blocks, bench.feed().blocks.evicted_blocks) == (4, 1)


@pytest.mark.parametrize("timestamp", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_batch_without_a_time_happened_now(bench: Bench, timestamp: float) -> None:
    bench.wire.timestamp = timestamp - 0.5
    bench.send(run(bench.wire, 0, 2))
    bench.wire.timestamp = timestamp - 0.5
    bench.feed().apply(1, bench.wire.batch(bench.wire.removed([101])), 0.0)
    assert bench.feed().blocks.lifetimes == ([1, *[0] * 9], 0.0)


def test_a_block_waits_briefly_for_its_parent(bench: Bench) -> None:
    bench.send(run(bench.wire, 2, 3))
    bench.send(run(bench.wire, 1, 2))
    assert (bench.held(), bench.feed().parked) == ([], 2)
    bench.send(run(bench.wire, 0, 1))
    assert (bench.held(), bench.feed().parked) == (sorted(OURS[:3]), 0)
    bench.send(run(bench.wire, 5, 6))
    bench.feed().expire(1.0)
    assert (bench.feed().parked, bench.feed().counters.unknown_parents) == (0, 1)


def test_a_block_removed_while_it_waits_stays_removed(bench: Bench) -> None:
    bench.send(run(bench.wire, 1, 2), bench.wire.removed([101]), run(bench.wire, 0, 1))
    assert bench.held() == OURS[:1]


def test_what_is_no_full_attention_on_the_gpu_is_left_out(bench: Bench) -> None:
    bench.send(
        run(bench.wire, 0, 1, medium="CPU"),
        run(bench.wire, 0, 1, kv_cache_spec_kind="sliding_window", group_idx=1),
        run(bench.wire, 0, 1, group_idx=1),
        {"type": "BlockPromoted"},
    )
    assert (bench.held(), bench.feed().counters.ignored_events) == ([], 4)


def test_an_unreadable_payload_may_have_held_removals(bench: Bench) -> None:
    bench.send(run(bench.wire, 0, 2))
    bench.feed().apply(1, b"\xc1", 0.0)
    assert (bench.held(), bench.feed().counters.malformed_batches, bench.feed().clears) == ([], 1, 1)


def test_a_worker_that_left_leaves_nothing_and_may_come_back(bench: Bench) -> None:
    bench.send(run(bench.wire, 0, 2))
    bench.feed().close()
    assert (len(bench.table), dict(bench.table.workers)) == (0, {})
    bench.feed().restart()
    bench.feed().apply(0, bench.wire.batch(run(bench.wire, 0, 1)), 0.0)
    assert bench.held() == OURS[:1]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 9), st.integers(1, 4)),
        st.tuples(st.just("remove"), st.integers(0, 9), st.integers(1, 3)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
        st.tuples(st.just("lose"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
        st.tuples(st.just("again"), st.just(0), st.just(0)),
        st.tuples(st.just("garbage"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


def _events(wire: Any, kind: str, first: int, count: int) -> list[Any]:
    if kind == "store":
        return [run(wire, first, min(first + count, 10))]
    return [wire.removed(range(100 + first, 100 + first + count)) if kind == "remove" else wire.cleared()]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_the_table_holds_what_a_routers_index_holds(wire: Any, steps: list[tuple[str, int, int]]) -> None:
    """The same events to both; batches are lost, arrive twice, or begin again."""
    table, index = BlockTable(), BlockIndex()
    feeds: list[EventSequence] = [TableFeed("w", table), WorkerFeed("w", index)]
    sequence, last = 0, (0, b"")
    for kind, first, count in steps:
        if kind == "lose":
            sequence += 1
            continue
        if kind == "restart":
            sequence = 0
            continue
        if kind != "again":
            last = (sequence, b"\xc1" if kind == "garbage" else wire.batch(*_events(wire, kind, first, count)))
            sequence += 1
        for feed in feeds:
            if feed.apply(*last, 0.0).replay:
                feed.lost()
                feed.apply(*last, 0.0)
        snapshot = table.snapshot()
        held = snapshot.blocks["hash"][snapshot.rows_held["w"]].tolist()
        assert sorted(held) == sorted(block for block in OURS if index.holds("w", block))
        assert feeds[0].counters.lost_batches == feeds[1].counters.lost_batches
