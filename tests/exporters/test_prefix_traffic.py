"""Requests brought into the prefix tree: how many ran through each prefix, and how many found it cached."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from prefixwatch.exporters.caches.prefix_traffic import MOST_BLOCKS, SPAN_SECONDS, BlockCounts, PrefixTraffic
from prefixwatch.exporters.caches.prefixes import PrefixSource
from prefixwatch.exporters.caches.prefixes_api import columns_document, prefixes_document
from prefixwatch.exporters.requests.request import Identity, Request
from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.request_record import RequestRecord

SYSTEM = [7] * 48


def blocks(tokens: list[int]) -> list[int]:
    found: list[int] = block_hashes(as_tokens(tokens)).tolist()
    return found


def seen(prompt: int | None, reused: int | None = None, at: float | None = None, outcome: str = "completed") -> Request:
    record = RequestRecord(ended_unix_seconds=0.0, outcome=outcome, prompt_block=prompt, reused_block=reused)
    return Request(
        record, time.monotonic() if at is None else at, Identity("m"), "default", "none", outcome, "miss", "", None
    )


def source_with(traffic: PrefixTraffic, *prompts: list[int]) -> PrefixSource:
    source = PrefixSource(secret="key", traffic=traffic.counts)
    feed = TableFeed("w0", source.table)
    for sequence, tokens in enumerate(prompts):
        event: dict[str, Any] = {"type": "BlockStored", "block_hashes": blocks(tokens), "parent_block_hash": None}
        event |= {"token_ids": tokens, "block_size": 16, "medium": "GPU"}
        feed.apply(sequence, msgspec.msgpack.encode([1.7e9, [event], 0]), 0.0)
    return source


async def test_a_prompt_runs_through_all_nodes_above_its_last_block() -> None:
    one, two = [*SYSTEM, *[1] * 16], [*SYSTEM, *[2] * 16]
    traffic = PrefixTraffic()
    traffic.record(seen(blocks(one)[-1]))  # the first finds nothing
    traffic.record(seen(blocks(two)[-1], reused=blocks(SYSTEM)[-1]))
    traffic.record(seen(blocks(two)[-1], reused=blocks(two)[-1]))
    source = source_with(traffic, one, two)

    await source.refresh()
    system, *below = prefixes_document(source)["nodes"]

    assert (system["requests"], system["flow_tokens"], system["hit_share"]) == (3, 3 * 48, pytest.approx(2 / 3))
    assert sorted((node["requests"], node["hit_share"]) for node in below) == [(1, 0.0), (2, 0.5)]
    assert sorted(columns_document(source)["columns"]["reused_requests"]) == [0, 1, 2]


async def test_a_request_whose_last_block_is_gone_still_ran_through_what_it_reused() -> None:
    traffic = PrefixTraffic()
    traffic.record(seen(12345, reused=blocks(SYSTEM)[-1]))
    source = source_with(traffic, SYSTEM)

    await source.refresh()
    document = prefixes_document(source)

    assert [node["requests"] for node in document["nodes"]] == [1]
    assert document["unplaced_requests"] == 1


async def test_a_prefix_nobody_asked_for_has_no_share_and_not_a_share_of_zero() -> None:
    source = source_with(PrefixTraffic(), SYSTEM)

    await source.refresh()
    (node,) = prefixes_document(source)["nodes"]

    assert node["requests"] == 0
    assert "hit_share" not in node


async def test_without_request_records_the_reason_is_given() -> None:
    source = PrefixSource(secret="key")
    TableFeed("w0", source.table)
    await source.refresh()

    document = prefixes_document(source)

    assert set(document["absent"]) == {"nodes", "requests", "flow_tokens", "hit_share"}
    assert document["absent"]["nodes"] == "no block is cached at any worker now"
    assert "unplaced_requests" not in document


async def test_traffic_alone_changes_the_etag() -> None:
    traffic = PrefixTraffic()
    source = source_with(traffic, SYSTEM)
    await source.refresh()
    before = source.etag
    traffic.record(seen(blocks(SYSTEM)[-1]))
    source._traffic_at = float("-inf")  # the next look is due

    await source.refresh()

    assert source.etag != before


def test_traffic_is_of_one_to_two_spans() -> None:
    traffic = PrefixTraffic()
    traffic.record(seen(1, at=0.0))
    traffic.record(seen(2, at=SPAN_SECONDS))

    assert traffic.counts(SPAN_SECONDS * 1.5).both.ended == {1: 1, 2: 1}
    assert traffic.counts(SPAN_SECONDS * 2.5).both.ended == {2: 1}
    assert traffic.counts(SPAN_SECONDS * 9).both.ended == {}


def test_requests_that_failed_or_have_no_blocks_are_not_placed() -> None:
    traffic = PrefixTraffic()
    traffic.record(seen(None, at=0.0))
    traffic.record(seen(1, at=0.0, outcome="failed"))

    assert traffic.counts(0.0).both == BlockCounts(Counter(), Counter(), unread=1)


def test_memory_is_bounded_whatever_comes() -> None:
    traffic = PrefixTraffic()
    for block in range(MOST_BLOCKS + 100):
        traffic.record(seen(block, at=0.0))

    assert len(traffic.counts(0.0).both.ended) == MOST_BLOCKS
    assert traffic.counts(0.0).both.unread == 100
