"""202 and poll on two real vLLM engines: a prompt is computed while its client polls, and the wait is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.kvcache.request_record import RequestPage, RequestRecord
from prefixwatch.router.config import CacheViewConfig
from prefixwatch.router.degradation.config import DegradationConfig
from prefixwatch.stack.local.fleet import as_workers
from tests.live.chats import BLOCK, Client, Writer, routed

pytestmark = pytest.mark.vllm

ACCEPTED = {"Prefer": "respond-async"}
PROMPT_TOKENS = 1500
PATIENCE_SECONDS = 60.0


@pytest_asyncio.fixture
async def client(engines: list[EngineHandle], model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    """A router whose only step is the asynchronous prefill, at an objective that no miss on these engines meets."""
    degradation = DegradationConfig(
        enabled=True, ttft_seconds=0.02, steps=("async_prefill",), entry_seconds=0.0, async_kept_seconds=600.0
    )
    settings: dict[str, Any] = {"cache_view": CacheViewConfig(source="events"), "degradation": degradation}
    async with routed(as_workers(engines), model_dir, tmp_path, policy="least_load", **settings) as client:
        yield client


async def figure(client: Client, url: str, name: str, **labels: str) -> float:
    """The sum of a page's samples of this name with these labels."""
    async with client.session.get(f"{url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [one for family in families for one in family.samples if one.name == f"prefixwatch_{name}"]
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


async def pressed(client: Client, writer: Writer) -> None:
    """Misses of ordinary clients, which are answered at once, until the router takes the step."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await figure(client, client.url, "router_degradation_state", state="async_prefill"):
        assert time.monotonic() < deadline, "the step was not taken"
        for tokens in (100, 200, 300):
            await served(client, writer, tokens)


async def served(client: Client, writer: Writer, tokens: int) -> None:
    answer = await client.chat(writer.conversation(writer.text(tokens)))
    assert (answer.status, answer.done) == (200, True)


async def polled(client: Client, address: str) -> dict[str, Any]:
    """The document at the end of the preparation; 202 until then."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        async with client.session.get(client.url + address) as response:
            document: dict[str, Any] = await response.json()
            if response.status != 202:
                return document
        assert document["status"] == "preparing"
        assert time.monotonic() < deadline, "the prompt was not computed"
        await asyncio.sleep(0.05)


async def newest_record(client: Client) -> RequestRecord:
    async with client.session.get(f"{client.url}/router/requests") as answer:
        return msgspec.json.decode(await answer.read(), type=RequestPage).records[-1]


async def test_a_miss_is_computed_while_its_client_polls_and_its_request_then_finds_it_cached(
    client: Client, writer: Writer
) -> None:
    await pressed(client, writer)
    await served(client, writer, PROMPT_TOKENS)  # whoever doesn't accept a 202 gets none
    messages = writer.conversation(writer.text(PROMPT_TOKENS))
    accepted = await client.chat(messages, ACCEPTED)
    accepted_at = time.monotonic()
    assert accepted.status == 202
    ready = await polled(client, accepted.location)
    assert ready["status"] == "ready"
    waited_seconds = time.monotonic() - accepted_at

    key = accepted.location.rsplit("/", 1)[1]
    answer = await client.chat(messages, ACCEPTED | {"x-prefixwatch-prefill": key})
    assert (answer.status, answer.done) == (200, True)
    assert answer.cached_tokens is not None
    assert answer.cached_tokens >= PROMPT_TOKENS // BLOCK * BLOCK
    record = await newest_record(client)
    assert record.worker == answer.worker
    assert record.ttft_seconds is not None
    assert record.ttft_seconds > waited_seconds, "the wait counts"
    async with client.session.get(client.url + accepted.location) as response:
        assert response.status == 404, "it was used"

    target = TargetConfig(name="router", url=client.url)
    config = ExporterConfig(targets=(target,), listen="127.0.0.1:0", interval_seconds=3600.0, window_seconds=7200.0)
    async with running(config) as exporter:
        await exporter.scrape_all()
        assert await figure(client, exporter.url, "async_prefills_total") == 1
        assert await figure(client, exporter.url, "async_prefills_total", outcome="ready") == 1
        assert await figure(client, exporter.url, "async_prefill_wait_seconds_count") == 1
        assert await figure(client, exporter.url, "async_prefill_wait_seconds_sum") > 0
