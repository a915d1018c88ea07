"""One worker's event stream: what the index believes afterwards, and what the edge is told to do."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import as_tokens, block_hashes, multimodal_key
from prefixwatch.kvcache.events.block_mapping import BlockSizeMismatch
from prefixwatch.kvcache.events.feed import PARK_SECONDS, Applied, WorkerFeed
from prefixwatch.kvcache.events.wire import Tier
from prefixwatch.kvcache.index.block_index import BlockIndex
from tests.kvcache.feed_bench import OURS, PROMPT, Bench


def test_blocks_are_hashed_anew_and_found(bench: Bench) -> None:
    done = bench.send(bench.run(0, 3))
    assert (done.stored, done.removed, done.cleared, done.replay) == (OURS[:3], [], False, None)
    bench.send(bench.run(3, 4))
    assert bench.depth() == 4
    assert bench.depth(PROMPT[:40]) == 2


def test_removals_go_by_the_engines_names(bench: Bench) -> None:
    bench.send(bench.run(0, 4))
    assert bench.send(bench.wire.removed([103])).removed == OURS[3:4]
    assert bench.send(bench.wire.removed([103])).removed == []
    assert bench.depth() == 3
    assert (bench.feed.counters.stored_blocks, bench.feed.counters.removed_blocks) == (4, 1)


def test_a_block_of_two_copies_leaves_with_the_last(bench: Bench) -> None:
    """vLLM computes the last block of a prompt sent twice at once twice, and evicts each copy by itself."""
    bench.send(bench.run(0, 4))
    assert bench.send(bench.run(3, 4)).stored == []
    assert bench.send(bench.wire.removed([103])).removed == []
    assert bench.depth() == 4
    assert bench.send(bench.wire.removed([103])).removed == OURS[3:4]
    assert bench.depth() == 3


def test_signed_and_raw_names_are_names_too(bench: Bench) -> None:
    bench.send(bench.wire.stored([-7], PROMPT[:16]), bench.wire.stored([b"\x01" * 32], PROMPT[16:32], parent=-7))
    assert bench.depth() == 2
    bench.send(bench.wire.removed([b"\x01" * 32]))
    assert bench.depth() == 1


def test_tenants_share_nothing(bench: Bench) -> None:
    """ai-dynamo/dynamo#8197 (IS06): A's salted blocks were predicted as hits for B."""
    bench.send(bench.run(0, 3, extra_keys=[["tenantA"], None, None]), bench.run(3, 4))
    assert bench.depth(salt="tenantA") == 4
    assert bench.depth(salt="tenantB") == 0
    assert bench.depth() == 0


def test_adapters_share_nothing(bench: Bench) -> None:
    bench.send(bench.run(0, 2, lora_name="ada", extra_keys=[["ada", "s"], ["ada"]]))
    assert (bench.depth(lora="ada", salt="s"), bench.depth(salt="s"), bench.depth()) == (2, 0, 0)


def test_pictures_are_part_of_the_block(bench: Bench) -> None:
    bench.send(bench.run(0, 3, extra_keys=[None, [["sha", 4]], None]))
    pictured = block_hashes(as_tokens(PROMPT[:48]), multimodal={1: [multimodal_key("sha", 4)]})
    assert bench.index.depths(pictured) == {"w": 3}
    assert bench.depth() == 1


def test_a_block_waits_briefly_for_its_parent(bench: Bench) -> None:
    bench.send(bench.run(2, 3), at=1.0)
    bench.send(bench.run(1, 2), at=1.01)
    assert (bench.depth(), bench.feed.parked) == (0, 2)
    assert bench.send(bench.run(0, 1), at=1.02).stored == OURS[:3]
    assert (bench.feed.parked, bench.feed.counters.unknown_parents) == (0, 0)


def test_a_block_whose_parent_never_comes_is_dropped_and_counted(bench: Bench) -> None:
    bench.send(bench.run(2, 3), at=1.0)
    bench.feed.expire(1.0 + PARK_SECONDS / 2)
    assert bench.feed.parked == 1
    bench.feed.expire(1.0 + PARK_SECONDS)
    assert (bench.feed.parked, bench.feed.counters.unknown_parents) == (0, 1)
    bench.send(bench.run(0, 2), at=1.1)
    assert bench.depth() == 2


def test_a_block_removed_while_it_waits_stays_removed(bench: Bench) -> None:
    bench.send(bench.run(1, 2), bench.wire.removed([101]), bench.run(0, 1))
    assert bench.depth() == 1


def test_waiting_blocks_are_bounded_and_long_chains_of_them_resolve(bench: Bench) -> None:
    wire, feed = bench.wire, bench.feed
    for k in range(1500, 0, -1):
        bench.send(wire.stored([k], [k] * 16, parent=k - 1))
    assert (feed.parked, feed.counters.unknown_parents) == (1024, 476)
    assert len(bench.send(wire.stored([0], [0] * 16)).stored) == 1025


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"group_idx": 0, "kv_cache_spec_kind": "full_attention"}, 1),
        ({"group_idx": 1, "kv_cache_spec_kind": "mla_attention"}, 1),
        ({"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}, 0),
        ({"group_idx": 0}, 1),
        ({"group_idx": 1}, 0),
        ({"medium": "CPU"}, 0),
    ],
)
def test_only_full_attention_on_the_gpu_counts(bench: Bench, fields: dict[str, Any], counted: int) -> None:
    bench.send(bench.run(0, 1, **fields))
    assert (bench.depth(), bench.feed.counters.ignored_events) == (counted, 1 - counted)


def test_another_groups_removals_are_ignored(bench: Bench) -> None:
    bench.send(
        bench.run(0, 2, group_idx=0, kv_cache_spec_kind="full_attention"),
        bench.run(0, 2, group_idx=1, kv_cache_spec_kind="sliding_window"),
        bench.wire.removed([100], group_idx=1),
    )
    assert bench.depth() == 2
    bench.send(bench.wire.removed([101], group_idx=0))
    assert bench.depth() == 1


def test_tiers_have_indexes_of_their_own(wire: Any) -> None:
    cpu = BlockIndex()
    bench = Bench(wire, tiers={Tier.CPU: cpu})
    bench.send(bench.run(0, 3))
    bench.send(wire.stored([100, 101, 999], [], medium="CPU"), wire.removed([100, 101, 102]))
    assert (bench.depth(), bench.feed.counters.unknown_parents) == (0, 1)
    assert cpu.depths(block_hashes(as_tokens(PROMPT))) == {"w": 2}
    bench.send(wire.removed([101], medium="CPU"), wire.stored([7], PROMPT[16:32], parent=100, medium="CPU"))
    assert cpu.depths(block_hashes(as_tokens(PROMPT))) == {"w": 2}
    with pytest.raises(ValueError, match="index of its own"):
        WorkerFeed("w", cpu, tiers={Tier.CPU: cpu})


def test_a_tiers_large_chunks_are_credited_whole(wire: Any) -> None:
    """llm-d/llm-d-router#2889 (RT11): 48 tokens credited of a 64-token CPU chunk, none could be loaded."""
    cpu = BlockIndex()
    bench = Bench(wire, tiers={Tier.CPU: cpu})
    bench.send(wire.stored([1], PROMPT[:64], block_size=64, medium="CPU"))
    assert cpu.depths(block_hashes(as_tokens(PROMPT[:48]))) == {}
    assert cpu.depths(block_hashes(as_tokens(PROMPT[:70]))) == {"w": 4}


def test_large_engine_blocks_are_split(bench: Bench) -> None:
    assert bench.send(bench.run(0, 2, block_size=32)).stored == OURS[:4]
    assert [bench.depth(PROMPT[:n]) for n in (31, 32, 48, 64)] == [0, 2, 2, 4]
    assert bench.send(bench.wire.removed([101])).removed == OURS[2:4]


def test_small_engine_blocks_are_joined_when_complete(wire: Any) -> None:
    bench = Bench(wire, block_size=32)
    ours = block_hashes(as_tokens(PROMPT), 32).tolist()
    assert bench.send(bench.run(0, 3)).stored == ours[:1]
    assert bench.send(bench.run(3, 4)).stored == ours[1:2]
    assert bench.send(wire.removed([102])).removed == ours[1:2]
    assert bench.send(wire.removed([103])).removed == []
    assert bench.depth() == 1


def test_a_joined_block_with_a_part_missing_is_not_credited(wire: Any) -> None:
    bench = Bench(wire, block_size=64)
    bench.send(bench.run(0, 2), wire.removed([100]))
    assert bench.send(bench.run(2, 4)).stored == []


def test_pages_of_one_token_are_joined(wire: Any) -> None:
    bench = Bench(wire)
    bench.send(bench.run(0, 40, block_size=1, extra_keys=[["tenantA"], *([None] * 39)]))
    assert (bench.depth(salt="tenantA"), bench.depth()) == (2, 0)


def test_sizes_that_do_not_divide_are_refused_by_name(bench: Bench) -> None:
    with pytest.raises(BlockSizeMismatch, match=r"worker w caches blocks of 24 tokens.* blocks of 16"):
        bench.send(bench.run(0, 2, block_size=24))


def test_a_late_removal_of_an_earlier_life_erases_nothing(bench: Bench) -> None:
    """ai-dynamo/dynamo#11190 (RT18): a removal sweep erased entries restored after it was issued."""
    bench.feed.restart(2)
    bench.send(bench.run(0, 9))
    bench.feed.lost(generation=1)
    bench.feed.close(generation=1)
    assert not bench.feed.restart(1)
    assert bench.depth() == 9


def test_any_order_of_lives_ends_the_same(wire: Any) -> None:
    """ai-dynamo/dynamo#11190 (RT18): shuffled delivery of the same events gives one final state."""
    seen = set()
    for order in permutations(range(4)):
        bench = Bench(wire)
        old, new = wire.batch(bench.run(0, 5)), wire.batch(bench.run(0, 9))
        for step in order:
            match step:
                case 0:
                    bench.feed.apply(0, old, 0.0, generation=1)
                case 1:
                    bench.feed.close(generation=1)
                case 2:
                    bench.feed.apply(0, new, 0.0, generation=2)
                case 3:
                    bench.feed.restart(2)
        seen.add((bench.depth(), bench.feed.generation))
    assert seen == {(9, 2)}


def test_a_worker_that_left_stays_gone(bench: Bench) -> None:
    bench.send(bench.run(0, 2))
    bench.feed.close()
    assert bench.send(bench.run(2, 3)) == Applied()
    assert (bench.index.workers, bench.feed.counters.stale_batches) == ((), 1)
    bench.feed.restart()
    bench.next = 0
    bench.send(bench.run(0, 1))
    assert bench.depth() == 1


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([(16, 16), (32, 16), (16, 32), (4, 16), (1, 8)]),
    st.lists(st.integers(0, 160), max_size=8),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_the_index_holds_exactly_what_the_engine_does(
    wire: Any, sizes: tuple[int, int], lengths: list[int], resent: list[int]
) -> None:
    """An engine grows and shrinks one prompt's cache; batches may arrive twice."""
    engine_size, our_size = sizes
    bench, held, sent = Bench(wire, block_size=our_size), 0, []
    for length in lengths:
        wanted = length // engine_size
        if wanted > held:
            event = bench.run(held, wanted, block_size=engine_size)
        else:
            event = wire.removed(range(100 + held - 1, 100 + wanted - 1, -1))
        sent.append(wire.batch(event))
        bench.feed.apply(len(sent) - 1, sent[-1], 0.0)
        held = wanted
        assert bench.depth() == held * engine_size // our_size
    for sequence in (k for k in resent if k < len(sent)):
        bench.feed.apply(sequence, sent[sequence], 0.0)
    assert bench.depth() == held * engine_size // our_size


MAMBA = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}


@pytest.mark.parametrize(
    "broken",
    [
        {"block_hashes": [7], "token_ids": list(range(3840)), "block_size": 768},  # one hash for a chunk of five blocks
        {"block_hashes": [7], "token_ids": None, "block_size": 0},
        {"block_hashes": None, "token_ids": [2**40], "block_size": "x"},
    ],
)
def test_recurrent_groups_of_a_hybrid_model_are_ignored_whatever_their_shape(
    bench: Bench, broken: dict[str, Any]
) -> None:
    """Infera#98, aibrix#2384, dynamo#12169 (N08): the attention group of the same batch is indexed, nothing is
    dropped."""
    attention: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    recurrent = {**bench.run(0, 1), **broken, **MAMBA}
    for first in (0, 2, 4):
        done = bench.send(recurrent, bench.run(first, first + 2, **attention), recurrent)
        assert (done.cleared, len(done.stored)) == (False, 2)
    bench.send({"type": "BlockRemoved", "block_hashes": "x", "medium": "GPU", "group_idx": 1})
    counters = bench.feed.counters
    assert (bench.depth(), counters.cleared, counters.malformed_batches, counters.malformed_events) == (6, 0, 0, 0)
    assert counters.ignored_events == 7
    assert bench.feed.unreadable is None


def test_stored_blocks_that_cannot_be_read_are_left_out_and_said(bench: Bench) -> None:
    """Leaving them out only makes the index claim less, so nothing is dropped, however often it happens."""
    bench.send(bench.run(0, 2))
    for broken in ({"token_ids": [1, 2, 3]}, {"token_ids": "x"}, {"block_size": 0}, {"token_ids": [2**32] * 32}):
        done = bench.send({**bench.run(2, 4), **broken}, bench.run(2, 3))
        assert not done.cleared
    counters = bench.feed.counters
    assert (bench.depth(), counters.malformed_events, counters.malformed_batches, counters.cleared) == (3, 4, 0, 0)
    assert bench.feed.unreadable is not None
    assert "token id" in bench.feed.unreadable


@pytest.mark.parametrize("event", [{"type": "BlockRemoved"}, 7, {"block_hashes": [100]}])
def test_what_may_have_been_a_removal_drops_the_worker(bench: Bench, event: Any) -> None:
    bench.send(bench.run(0, 2))
    done = bench.send(event)
    assert (done.cleared, bench.depth(), bench.feed.counters.malformed_batches) == (True, 0, 1)
    assert bench.feed.unreadable is not None
