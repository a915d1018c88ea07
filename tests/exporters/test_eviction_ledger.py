"""Evictions and regret from KV events, and their way to the metrics page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from exporters.kv_events import EvictionLedger, KvEventCounts, KvEventWatcher
from exporters.metrics_text import render
from exporters.target import Target


def test_a_block_stored_again_soon_after_its_eviction_was_evicted_too_early() -> None:
    ledger = EvictionLedger(regret_seconds=300)
    ledger.apply(stored=[1, 2, 3], removed=[], now_seconds=0)
    ledger.apply(stored=[], removed=[1, 2], now_seconds=10)
    ledger.apply(stored=[1], removed=[], now_seconds=200)
    ledger.apply(stored=[2], removed=[], now_seconds=400)
    assert (ledger.evicted_blocks, ledger.regretted_blocks) == (2, 1)


def test_blocks_that_come_back_after_a_restart_are_no_regret() -> None:
    ledger = EvictionLedger()
    ledger.apply(stored=[], removed=[1], now_seconds=0)
    ledger.cleared()
    ledger.apply(stored=[1], removed=[], now_seconds=1)
    assert ledger.regretted_blocks == 0


def test_memory_is_bounded() -> None:
    ledger = EvictionLedger(remembered=2)
    ledger.apply(stored=[], removed=[1, 2, 3], now_seconds=0)
    ledger.apply(stored=[1, 3], removed=[], now_seconds=1)
    assert (ledger.evicted_blocks, ledger.regretted_blocks) == (3, 1)


class Source:
    """Stands in for a subscription."""

    def __init__(self, counts: KvEventCounts | None) -> None:
        self._counts = counts

    def counts(self) -> KvEventCounts | None:
        return self._counts

    def why_unknown(self) -> str:
        return "no publisher"


def test_evictions_are_exported_when_known_and_absent_otherwise(make_target: Callable[..., Target]) -> None:
    target = make_target("a", "vllm:num_requests_running 0\n")
    assert "kv_blocks_evicted" not in render([target])[0].decode()
    target.kv_events = Source(None)
    page = render([target])[0].decode()
    assert "kv_blocks_evicted" not in page
    assert 'prefixwatch_data_quality{flag="kv_events_unknown",target="a"} 1.0' in page
    target.kv_events = Source(KvEventCounts(7, 2, 100, 0, 0.01))
    page = render([target])[0].decode()
    assert 'prefixwatch_kv_blocks_evicted_total{target="a"} 7.0' in page
    assert 'prefixwatch_kv_blocks_regretted_total{target="a"} 2.0' in page


async def test_a_watcher_counts_what_an_engine_publishes() -> None:
    """Blocks in the engine's own size: two stored, one evicted, and that one stored again."""
    stored = {"type": "BlockStored", "parent_block_hash": None, "token_ids": list(range(64)), "block_size": 32}
    batches = [
        {**stored, "block_hashes": [b"a", b"b"]},
        {"type": "BlockRemoved", "block_hashes": [b"b"]},
        {**stored, "block_hashes": [b"b"], "parent_block_hash": b"a", "token_ids": list(range(32, 64))},
    ]
    publisher = zmq.asyncio.Context.instance().socket(zmq.XPUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    watcher = KvEventWatcher("a", f"tcp://127.0.0.1:{port}", None, block_size=32)
    watcher.start()
    try:
        await asyncio.wait_for(publisher.recv(), 5)  # it has subscribed
        for sequence, event in enumerate(batches):
            payload = msgspec.msgpack.encode([0.0, [event], None])
            await publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
        for _ in range(500):
            counts = watcher.counts()
            if counts and counts.regretted_blocks:
                break
            await asyncio.sleep(0.01)
    finally:
        await watcher.stop()
        publisher.close(linger=0)
    assert counts is not None
    assert (counts.evicted_blocks, counts.regretted_blocks, counts.resident_blocks) == (1, 1, 2)


async def test_a_watcher_without_a_publisher_knows_nothing() -> None:
    watcher = KvEventWatcher("a", "tcp://127.0.0.1:1", None, block_size=None)
    assert watcher.counts() is None
    assert "tcp://127.0.0.1:1" in watcher.why_unknown()
