"""The prefix tree on the metrics page and as JSON; and nothing secret on either."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from pydantic import ValidationError

from prefixwatch.engines.simulated.kv_event_publisher import KvEventPublisher
from prefixwatch.exporters.app import running
from prefixwatch.exporters.caches.prefix_names import NamedPrefix
from prefixwatch.exporters.caches.prefixes import PrefixSource
from prefixwatch.exporters.caches.prefixes_api import UnknownNode, columns_document, prefixes_document, prefixes_handler
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.index.block_table import Runs
from prefixwatch.kvcache.index.table_layout import STORED_AFTER, STORED_BARE

SYSTEM_PROMPT = [7] * 48
FINGERPRINT = f"{int(block_hashes(as_tokens(SYSTEM_PROMPT))[-1]):016x}"
SUPPORT_BOT = NamedPrefix(name="support-bot system prompt v12", fingerprint=FINGERPRINT)
TIMEOUT_SECONDS = 10.0


def stored(tokens: list[int], **fields: Any) -> dict[str, Any]:
    """A prompt's blocks; an engine names equal openings equally."""
    names = (block_hashes(as_tokens(tokens)) ^ 1).tolist()
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None}
    return {**event, "token_ids": tokens, "block_size": 16, "medium": "GPU", **fields}


class Fleet:
    """Workers whose events reach a prefix source."""

    def __init__(self, *named: NamedPrefix, secret: str = "one key for all") -> None:
        self.source = PrefixSource(named, secret, wall_clock=lambda: 1_700_000_000.0)
        self._feeds: dict[str, TableFeed] = {}
        self._next: dict[str, int] = {}

    def hear(self, worker: str, *events: dict[str, Any]) -> None:
        if worker not in self._feeds:
            self._feeds[worker] = TableFeed(worker, self.source.table)
        sequence = self._next.get(worker, 0)
        self._next[worker] = sequence + 1
        self._feeds[worker].apply(sequence, msgspec.msgpack.encode([1.7e9, list(events), 0]), 0.0)

    def support(self, worker: str, ending: int) -> None:
        """A prompt of the support bot's, its system prompt and then one block of its own."""
        self.hear(worker, stored([*SYSTEM_PROMPT, *([ending] * 16)]))


@pytest.fixture
async def fleet() -> Fleet:
    fleet = Fleet(SUPPORT_BOT)
    fleet.support("a", 1)
    fleet.support("a", 2)
    fleet.support("b", 3)
    fleet.hear("b", stored([9] * 32))
    await fleet.source.refresh()
    return fleet


def exported(source: PrefixSource) -> dict[str, float]:
    page = render([], "", [source])[0].decode()
    lines = (line for line in page.splitlines() if line.startswith("prefixwatch_"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_trees_shape_is_exported(fleet: Fleet) -> None:
    page = exported(fleet.source)
    assert page["prefixwatch_prefix_tree_blocks"] == 8
    assert page["prefixwatch_prefix_tree_height_levels"] == 1
    assert page['prefixwatch_prefix_tree_depth_levels{quantile="0.99"}'] == 1
    assert page['prefixwatch_prefix_tree_fan_out{quantile="0.5"}'] == 3
    assert page['prefixwatch_prefix_block_replicas{quantile="0.99"}'] == 2
    assert page['prefixwatch_prefix_hot_branch_tokens{prefix="support-bot system prompt v12"}'] == 9 * 16


async def test_a_named_prefix_that_is_not_cached_has_no_tokens(fleet: Fleet) -> None:
    other = Fleet(SUPPORT_BOT)
    other.hear("a", stored([9] * 32))
    await other.source.refresh()
    assert exported(other.source)['prefixwatch_prefix_hot_branch_tokens{prefix="support-bot system prompt v12"}'] == 0


def test_without_kv_events_nothing_is_said_and_the_document_says_why() -> None:
    source = PrefixSource()
    assert exported(source) == {}
    assert "set kv_events" in source.document(0.0)["absent"]["prefixes"]
    assert "set kv_events" in prefixes_document(source)["absent"]["nodes"]


def test_nodes_come_parents_first_and_add_up(fleet: Fleet) -> None:
    document = prefixes_document(fleet.source)
    shared, *others = document["nodes"]
    assert (shared["name"], shared["named"], shared["parent"]) == ("support-bot system prompt v12", True, None)
    assert (shared["blocks"], shared["tokens"], shared["children"], shared["replicas"]) == (3, 48, 3, 2)
    assert (shared["cached_tokens_below"], shared["copied_tokens_below"]) == (96, 144)
    assert shared["workers"] == {"a": 3, "b": 3}
    children = [node for node in others if node["parent"] == shared["id"]]
    assert sum(node["cached_tokens_below"] for node in children) + shared["tokens"] == shared["cached_tokens_below"]
    assert [(node["level"], node["start_tokens"], node["replicas"]) for node in children] == [(1, 48, 1)] * 3
    assert all(node["name"] == f"p-{node['id'][:8]}" for node in others)
    assert document["totals"] == {"nodes": 5, "blocks": 8, "tokens": 128, "copied_tokens": 176, "height_levels": 1}
    assert document["workers"] == ["a", "b"]
    assert "hit_share" in document["absent"]


def test_a_tree_is_browsed_in_levels(fleet: Fleet) -> None:
    top = prefixes_document(fleet.source, depth=0)["nodes"]
    assert [node["level"] for node in top] == [0, 0]
    below = prefixes_document(fleet.source, node=top[0]["id"], depth=1)["nodes"]
    assert [node["parent"] for node in below] == [None, *[top[0]["id"]] * 3]
    assert len(prefixes_document(fleet.source, limit=1)["nodes"]) == 1
    with pytest.raises(UnknownNode, match="no prefix has the id 00"):
        prefixes_document(fleet.source, node="00")


def test_the_whole_tree_in_columns(fleet: Fleet) -> None:
    document = columns_document(fleet.source)
    columns = document["columns"]
    assert columns["parent"][:2] == [-1, -1]
    assert sorted(columns["parent"][2:]) == [0, 0, 0]
    assert sum(columns["tokens"]) == 128
    assert document["names"] == {"0": "support-bot system prompt v12"}
    assert document["left_out_nodes"] == 0
    assert len(json.dumps(document)) < 1500


async def test_a_tree_of_fifty_thousand_nodes_is_a_page_and_a_dump_of_a_few_megabytes() -> None:
    source, rng = PrefixSource(), random.Random(1)
    names = np.arange(1, 75_001, dtype=np.uint64)
    runs = [(STORED_BARE, 1, 0), *((STORED_AFTER, 1, rng.randrange(max(1, k // 2), k)) for k in range(2, 75_001))]
    contents = np.random.default_rng(1).integers(1, 2**64, len(names), dtype=np.uint64)
    source.table.join("w").apply(Runs.of(runs, names, contents), 0.0)
    await source.refresh()
    dump = columns_document(source)
    assert len(dump["columns"]["id"]) == 50_000
    assert dump["left_out_nodes"] == dump["totals"]["nodes"] - 50_000
    assert len(json.dumps(dump, separators=(",", ":"))) < 3_000_000
    page = prefixes_document(source, depth=100)
    assert len(page["nodes"]) == 500
    known = {node["id"] for node in page["nodes"]}
    assert all(node["parent"] is None or node["parent"] in known for node in page["nodes"])


async def test_names_are_the_same_with_the_same_secret_and_no_others() -> None:
    found = []
    for secret in ("one", "one", "two"):
        fleet = Fleet(secret=secret)
        fleet.hear("a", stored([9] * 32))
        await fleet.source.refresh()
        found.append(prefixes_document(fleet.source)["nodes"][0]["id"])
    assert found[0] == found[1] != found[2]


async def test_the_tree_is_computed_again_only_when_something_changed(fleet: Fleet) -> None:
    before = fleet.source.view
    await fleet.source.refresh()
    assert fleet.source.view is before
    fleet.support("b", 5)
    await fleet.source.refresh()
    assert fleet.source.view is not before


async def test_names_may_change_while_running(fleet: Fleet) -> None:
    fleet.source.configure([NamedPrefix(name="renamed", fingerprint=FINGERPRINT)])
    await fleet.source.refresh()
    assert prefixes_document(fleet.source)["nodes"][0]["name"] == "renamed"


@pytest.mark.parametrize("fingerprint", ["", "xyz", "123", "g" * 16, "-00000000000000a"])
def test_a_fingerprint_that_is_none_is_refused(fingerprint: str) -> None:
    with pytest.raises(ValidationError, match="16 hex digits"):
        NamedPrefix(name="x", fingerprint=fingerprint)


@pytest.fixture
async def page(fleet: Fleet) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/api/v1/prefixes", prefixes_handler(fleet.source))])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/api/v1/prefixes"
    await runner.cleanup()


async def test_who_polls_gets_nothing_until_the_tree_changes(fleet: Fleet, page: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(page) as first:
            etag = first.headers["ETag"]
            assert (await first.json())["changed_unix_seconds"] == 1_700_000_000.0
        async with session.get(page, headers={"If-None-Match": etag}) as again:
            assert (again.status, await again.read()) == (304, b"")
        fleet.support("b", 5)
        await fleet.source.refresh()
        async with session.get(page, headers={"If-None-Match": etag}) as changed:
            assert changed.status == 200
            assert changed.headers["ETag"] != etag


@pytest.mark.parametrize(
    ("query", "status", "why"),
    [
        ("depth=x", 400, "depth must be"),
        ("depth=-1", 400, "depth must be"),
        ("limit=0", 400, "limit must be"),
        ("limit=5001", 400, "limit must be"),
        ("limit=99999999999999999999", 400, "limit must be"),
        ("format=xml", 400, "nodes or columns"),
        ("dept=1", 400, "unknown parameter dept"),
        ("node=ffffffffffffffff", 404, "no prefix has the id"),
    ],
)
async def test_what_can_not_be_answered_says_why(page: str, query: str, status: int, why: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{page}?{query}") as answer:
        assert answer.status == status
        assert why in (await answer.json())["error"]


SALT, TOKEN = "s3cret-salt-of-tenant-a", 987_654_321


async def test_neither_salts_nor_tokens_leave_the_process(
    serve_pages: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Everything that the exporter serves and logs, after events with recognisable salts and token ids."""
    publisher = KvEventPublisher("tcp://127.0.0.1:*")
    base = await serve_pages({"/metrics": b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"})
    target = TargetConfig(name="a", url=f"{base}/metrics", kv_events=(publisher.endpoint,))
    salted = stored([TOKEN] * 48, extra_keys=[[SALT], None, None], block_hashes=[1, 2, 3])
    chains = [f"{int(h):016x}" for h in block_hashes(as_tokens([TOKEN] * 48))]
    broken = stored([TOKEN] * 47, block_hashes=[1, 2, 3], cache_salt=SALT)
    texts: list[str] = []
    try:
        async with running(ExporterConfig(targets=(target,), listen="127.0.0.1:0", interval_seconds=0.2)) as exporter:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not (exporter.prefixes.view and len(exporter.prefixes.view.tree)):
                    publisher.publish([salted, stored([TOKEN] * 48)])
                    await exporter.prefixes.refresh()
                    await asyncio.sleep(0.02)
            paths = ["/metrics", "/api/v1/fleet", "/api/v1/prefixes", "/api/v1/prefixes?format=columns", "/"]
            async with aiohttp.ClientSession() as session:
                for path in paths:
                    async with session.get(exporter.url + path) as answer:
                        assert answer.status == 200
                        texts.append(await answer.text())
            publisher.publish([broken, {"type": "BlockRemoved", "block_hashes": SALT}])
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while await asyncio.sleep(0.02, len(exporter.prefixes.table)):
                    """Until the batch that can't be read has come."""
    finally:
        publisher.close()
    assert "prefixwatch_prefix_tree_blocks 6.0" in texts[0]
    assert '"blocks":6' in texts[2]
    for text in [*texts, caplog.text]:
        assert SALT not in text
        assert str(TOKEN) not in text
        assert not any(chain in text for chain in chains)
