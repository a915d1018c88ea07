"""KV events counted, and the fleet's log of them."""

from __future__ import annotations

from typing import Any

import msgspec

from prefixwatch.stack.bench.watching.kv_event_tally import KvEventTally


def batch(*events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def stored(ids: list[int], medium: str = "GPU") -> list[Any]:
    return ["BlockStored", ids, None, list(range(16 * len(ids))), 16, None, medium]


def removed(ids: list[int], medium: str = "GPU") -> list[Any]:
    return ["BlockRemoved", ids, medium]


def test_stored_removed_and_cleared_are_counted_in_blocks() -> None:
    tally = KvEventTally("w0")

    tally.apply(0, batch(stored([1, 2, 3]), removed([1])), 0.0)
    tally.apply(1, batch(["AllBlocksCleared"], stored([4])), 0.0)

    assert (tally.stored_blocks, tally.removed_blocks, tally.clears, tally.missed_batches) == (4, 1, 1, 0)


def test_other_tiers_are_no_blocks_of_the_gpu() -> None:
    tally = KvEventTally("w0")
    tally.apply(0, batch(stored([1, 2], "CPU"), removed([1], "CPU"), stored([3])), 0.0)
    assert (tally.stored_blocks, tally.removed_blocks) == (1, 0)


def test_a_batch_told_twice_counts_once() -> None:
    tally = KvEventTally("w0")
    for _ in range(2):
        tally.apply(0, batch(stored([1, 2])), 0.0)
    assert tally.stored_blocks == 2


def test_a_batch_that_nobody_can_read_is_missed_and_harms_nothing() -> None:
    tally = KvEventTally("w0")
    tally.apply(0, batch(stored([1])), 0.0)
    tally.apply(1, b"\xc1", 0.0)
    tally.apply(2, batch(stored([2])), 0.0)
    assert (tally.stored_blocks, tally.missed_batches) == (2, 1)


def test_a_gap_that_no_replay_closes_is_missed() -> None:
    tally = KvEventTally("w0")
    tally.apply(0, batch(stored([1])), 0.0)
    assert tally.apply(3, batch(stored([4])), 0.0).replay is not None  # the subscriber asks, and gets none
    tally.lost()
    tally.apply(3, batch(stored([4])), 0.0)
    assert (tally.stored_blocks, tally.missed_batches) == (2, 2)
