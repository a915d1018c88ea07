"""Gaps, replays and new lives in the sequence of one worker's batches."""

from __future__ import annotations

from prefixwatch.kvcache.events.feed import FeedCounters, Replay
from tests.kvcache.feed_bench import OURS, Bench


def test_a_gap_asks_for_a_replay_and_changes_nothing_meanwhile(bench: Bench) -> None:
    """llm-d/llm-d-router#1737 (RT14): a subscriber that ignores gaps drifts silently."""
    bench.send(bench.run(0, 1))
    bench.send(bench.run(1, 2))
    missed = [bench.wire.batch(bench.run(2, 3)), bench.wire.batch(bench.run(3, 4))]
    removal = bench.wire.batch(bench.wire.removed([100, 101, 102, 103]))
    assert bench.feed.apply(4, removal, 0.0).replay == Replay(1)
    assert bench.feed.apply(5, removal, 0.0).replay == Replay(1)
    assert (bench.feed.unsure, bench.feed.counters.missed_batches, bench.depth()) == (True, 2, 2)
    for sequence, payload in enumerate([*missed, removal], start=2):
        assert bench.feed.apply(sequence, payload, 0.0, replayed=True).replay is None
    assert (bench.feed.unsure, bench.feed.counters.replayed_batches, bench.depth()) == (False, 3, 0)


def test_without_a_replay_the_worker_is_cleared_and_goes_on(bench: Bench) -> None:
    """llm-d/llm-d-router#1737 (RT14)"""
    bench.send(bench.run(0, 2))
    payload = bench.wire.batch(bench.run(0, 1, base=500))
    assert bench.feed.apply(5, payload, 0.0).replay == Replay(0)
    bench.feed.lost()
    assert bench.depth() == 0
    assert bench.feed.apply(5, payload, 0.0).stored == OURS[:1]
    assert bench.depth() == 1
    assert bench.feed.counters == FeedCounters(batches=2, stored_blocks=3, missed_batches=4, lost_batches=4, cleared=1)


def test_a_replay_that_starts_too_late_clears_first(bench: Bench) -> None:
    bench.send(bench.run(0, 2))
    done = bench.feed.apply(7, bench.wire.batch(bench.run(0, 1, base=500)), 0.0, replayed=True)
    assert done.cleared
    assert bench.depth() == 1


def test_a_late_joiner_asks_from_the_beginning(bench: Bench) -> None:
    payloads = [bench.wire.batch(bench.run(k, k + 1)) for k in range(3)]
    assert bench.feed.apply(2, payloads[2], 0.0).replay == Replay(0)
    for sequence, payload in enumerate(payloads):
        bench.feed.apply(sequence, payload, 0.0, replayed=True)
    assert bench.depth() == 3
    assert bench.feed.counters.missed_batches == 0


def test_batches_seen_before_change_nothing(bench: Bench) -> None:
    payloads = [bench.wire.batch(bench.run(0, 2)), bench.wire.batch(bench.wire.removed([101]))]
    for sequence in (0, 1, 0, 1, 1):
        bench.feed.apply(sequence, payloads[sequence], 0.0)
    assert bench.depth() == 1
    assert (bench.feed.counters.batches, bench.feed.counters.restarts) == (2, 0)


def test_a_sequence_that_runs_backwards_is_a_new_engine(bench: Bench) -> None:
    """sgl-project/sglang#39822 (RT17): placements were still attributed to a restarted worker's empty cache."""
    for first in range(3):
        bench.send(bench.run(first, first + 1))
    done = bench.feed.apply(0, bench.wire.batch(bench.run(0, 1, base=500)), 0.0)
    assert (done.cleared, done.replay) == (True, None)
    assert bench.depth() == 1
    assert (bench.feed.generation, bench.feed.counters.restarts, bench.feed.last_sequence) == (2, 1, 0)


def test_a_new_engine_that_is_already_further_is_found_out_by_the_replays_first_batch(bench: Bench) -> None:
    """sgl-project/sglang#39822 (RT17)"""
    for first in range(3):
        bench.send(bench.run(first, first + 1))
    assert bench.feed.apply(9, bench.wire.batch(), 0.0).replay == Replay(2)
    other = bench.feed.apply(2, bench.wire.batch(bench.run(0, 1, base=500)), 0.0, replayed=True)
    assert (other.cleared, other.replay) == (True, Replay(0))
    assert bench.depth() == 0


def test_a_cleared_cache_is_believed(bench: Bench) -> None:
    """vllm-project/aibrix#2287 (RT16): the router kept steering to a cache that had been reset."""
    bench.send(bench.run(0, 4))
    assert bench.send(bench.wire.cleared(), bench.run(0, 1, base=500)).cleared
    assert bench.depth() == 1
    assert bench.feed.counters.cleared == 1


def test_an_unreadable_payload_may_have_held_removals(bench: Bench) -> None:
    bench.send(bench.run(0, 2))
    assert bench.feed.apply(1, b"\xc1", 0.0).cleared
    assert (bench.depth(), bench.feed.counters.malformed_batches, bench.feed.last_sequence) == (0, 1, 1)
