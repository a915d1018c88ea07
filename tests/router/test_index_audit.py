"""The router audits its cache view and says what it found."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.placement.cache_view import EventView
from tests.router.fake_engine import FakeEngine

Start = Any  # a coroutine function, see conftest.start
TEXT = "x" * 111
"""With the chat template's words 8 blocks of 16 tokens."""


@pytest.mark.parametrize(
    ("settings", "audited", "holes", "predicted"),
    [
        pytest.param({"audit_share": 1}, 1, 1, "16", id="audited"),
        pytest.param({"audit_share": 0, "exact": True}, 0, 0, "16", id="exact"),
        pytest.param({"audit_share": 0}, 0, 0, "112", id="bisected"),
    ],
)
async def test_a_hole_in_a_workers_blocks_is_counted_and_walked_around(
    *,
    engines: list[FakeEngine],
    start: Start,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    audited: int,
    holes: int,
    predicted: str,
) -> None:
    worker = {"name": "a", "url": engines[0].url, "kv_events": "tcp://127.0.0.1:1"}
    cache_view = {"source": "events", **settings}
    client = await start([], policy="llmd_precise", workers=[worker], cache_view=cache_view)
    blocks = block_hashes(tokenizer.encode_chat([{"role": "user", "content": TEXT}]), 16).tolist()
    assert len(blocks) == 8
    view = client.router.view
    assert isinstance(view, EventView)
    view._index.store("a", [*blocks[:1], *blocks[2:7]])
    async with client.chat(TEXT) as answer:
        await answer.read()
    assert answer.headers["x-prefixwatch-predicted-tokens"] == predicted
    assert client.value("index_audited_lookups_total") == audited
    assert client.value("index_prefix_holes_total", worker="a") == holes
