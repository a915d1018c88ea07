"""From a client's request to the exporter's page: simulated engines, the real router, the real exporter."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.tiny_model import default_model_dir, words
from prefixwatch.exporters.app import once, running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import ROUTER, create_app

WORDS = words()
SHARED = " ".join(WORDS[:300])
OUTPUT_TOKENS = 4
IDENTITY = ("model", "role", "pool", "namespace", "cluster")
"""Labels that all of a page has here, or none: figures are added up over them."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def prompt(tail: int) -> str:
    """The shared opening and words of its own."""
    return f"{SHARED} {' '.join(WORDS[400 + 40 * tail : 440 + 40 * tail])}"


@dataclass
class Client:
    """Sends requests, and keeps what the answers say."""

    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    cached: dict[str, list[int]] = field(default_factory=dict)
    """Cached tokens by tenant, as reported."""

    async def chat(self, tenant: str, text: str, **fields: Any) -> None:
        body = {
            "model": "tiny", "stream": True, "max_tokens": OUTPUT_TOKENS, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": text}], **fields,
        }  # fmt: skip
        headers = {
            "x-tenant-id": tenant,
            "x-session-id": f"session-of-{tenant}",
            "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            self.statuses[answer.status] += 1
            events = [line[6:] for line in (await answer.read()).split(b"\n") if line.startswith(b"data: {")]
            for usage in (event["usage"] for event in map(json.loads, events) if event.get("usage")):
                self.cached.setdefault(tenant, []).append(usage["prompt_tokens_details"]["cached_tokens"])


@asynccontextmanager
async def router(engines: list[EngineHandle], **fields: Any) -> AsyncIterator[Client]:
    """A router before these engines, which it sees for the first time."""
    workers = [{"name": engine.name, "url": engine.url} for engine in engines]
    settings = {
        "policy": {"name": "round_robin"},
        "always_predict": True,
        "model_dir": str(default_model_dir()),
        **fields,
    }
    config = RouterConfig.model_validate({"workers": workers, **settings})
    app = create_app(config, policy=make_policy(config.policy.name), tokenizer=Tokenizer(default_model_dir()))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await app[ROUTER].wait_for_workers()
        yield Client(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def exporter_of(client: Client, engines: list[EngineHandle]) -> AsyncIterator[Exporter]:
    targets = (
        TargetConfig(name="router", url=client.url),
        *(TargetConfig(name=engine.name, url=engine.url) for engine in engines),
    )
    config = ExporterConfig(targets=targets, listen="127.0.0.1:0", interval_seconds=0.2)
    async with running(config) as exporter:
        await page(exporter, scrapes=4)  # no verdict on isolation is certain within two intervals of the start
        yield exporter


@asynccontextmanager
async def simulated(count: int, folder: Path) -> AsyncIterator[list[EngineHandle]]:
    engines = await fleet.start_simulated(count, default_model_dir(), folder, speed=50.0, max_model_len=2048)
    try:
        yield engines
    finally:
        await fleet.stop(engines)


async def page(exporter: Exporter, records: int = 0, scrapes: int = 0) -> dict[tuple[str, ...], float]:
    """The exporter's page once it has read this many records and scraped the router this often: by name and labels."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{exporter.url}/metrics") as answer:
                families = text_string_to_metric_families(await answer.text())
            shown: dict[tuple[str, ...], float] = {}
            for sample in (sample for family in families for sample in family.samples):
                labels = [value for name, value in sorted(sample.labels.items()) if name not in IDENTITY]
                key = (sample.name.removeprefix("prefixwatch_"), *labels)
                shown[key] = shown.get(key, 0.0) + sample.value
            read, scraped = (shown.get((f"{name}_total", "router"), 0) for name in ("request_records", "scrapes"))
            if read >= records and scraped >= scrapes:
                return shown
            await asyncio.sleep(0.05)


async def fleet_api(exporter: Exporter) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{exporter.url}/api/v1/fleet") as answer:
        return await answer.json()


async def traced_buckets(exporter: Exporter) -> list[str]:
    """Lines of the OpenMetrics page that carry an exemplar of our trace."""
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with aiohttp.ClientSession() as session, session.get(f"{exporter.url}/metrics", headers=headers) as answer:
        return [line for line in (await answer.text()).splitlines() if f'# {{trace_id="{TRACE}"}}' in line]


async def two_tenants(client: Client) -> int:
    """Two tenants whose prompts share an opening; how many requests of theirs could reuse the other's."""
    await client.chat("acme", prompt(0))
    await client.chat("bolt", prompt(1))  # the opening that acme sent
    await client.chat("bolt", prompt(1))
    await client.chat("acme", prompt(1))  # the whole prompt, that bolt sent
    await client.chat("acme", prompt(2))
    return 2


@pytest.mark.parametrize("salted", [True, False])
async def test_reuse_across_tenants_is_counted_exactly(tmp_path: Path, salted: bool) -> None:
    salts = {"acme": "salt of acme", "bolt": "salt of bolt"} if salted else {}
    tenants = {"names": ["acme", "bolt"], "salts": salts}
    async with (
        simulated(1, tmp_path) as engines,
        router(engines, tenants=tenants) as client,
        exporter_of(client, engines) as exporter,
    ):
        crossed = await two_tenants(client)
        shown = await page(exporter, records=5)
        document = await fleet_api(exporter)
        traced = await traced_buckets(exporter)
    assert shown["isolation_violations_total", "cross_tenant_hit"] == (0 if salted else crossed)
    assert shown["isolation_violations_total", "unsalted_traffic"] == (0 if salted else 4)
    assert shown["isolation_audited_requests_total",] == 5
    assert not {"goodput", "isolation_violations", "requests", "ttft_by_cache"} & document["fleet"]["absent"].keys()
    assert document["requests"]["isolation"]["violations"]["cross_tenant_hit"] == (0 if salted else crossed)
    assert document["requests"]["absent"]["cold_prefill_cost_usd"] == "no price: set pricing.gpu_usd_per_hour"
    assert any(line.startswith("prefixwatch_ttft_seconds_bucket{") for line in traced)
    for tenant, cached in client.cached.items():
        assert shown["tenant_hit_tokens_total", tenant] == sum(cached) > 0


async def test_every_request_is_in_the_counts_and_the_funnel_ends_at_what_clients_saw(tmp_path: Path) -> None:
    async with simulated(2, tmp_path) as engines, router(engines) as client, exporter_of(client, engines) as exporter:
        for tail in (0, 0, 0, 1, 1):
            await client.chat("acme", prompt(tail))
        await client.chat("acme", " ".join(WORDS[:100] * 40))  # longer than the engine takes
        await fleet.stop(engines)
        for _ in range(3):
            await client.chat("acme", prompt(0))
        shown = await page(exporter, records=9)
        text, _ = await once(ExporterConfig(targets=(TargetConfig(name="router", url=client.url),)))
    completed = 'prefixwatch_requests_total{class="default",model="tiny",outcome="completed"} 5.0'
    assert completed in text  # of all that is kept
    lost = client.statuses[502] + client.statuses[503]  # the first may meet an engine that the router thinks is up
    assert (client.statuses[200], client.statuses[400], lost) == (5, 1, 3)
    failed, refused = client.statuses[502], client.statuses[503]
    outcomes = {"completed": 5, "rejected": 1, "failed": failed, "refused": refused, "timed_out": 0, "disconnected": 0}
    assert {name: shown["requests_total", "default", name] for name in outcomes} == outcomes
    assert shown["slo_requests_total", "availability", "good"] == 5
    assert shown["slo_requests_total", "availability", "bad"] == 4
    assert shown["ttft_seconds_count", "miss"] + shown["ttft_seconds_count", "hit"] + shown[
        "ttft_seconds_count", "partial"
    ] == 5  # fmt: skip
    (cached,) = client.cached.values()
    assert shown["prefix_funnel_tokens_total", "delivered"] == sum(cached) > 0
    assert shown["delivered_hit_tokens_total",] == shown["request_hit_tokens_sum",] == sum(cached)
    assert shown["prefix_funnel_tokens_total", "held"] > shown["prefix_funnel_tokens_total", "routed"]
    assert shown["sticky_requests_total",] == 4
    assert shown["session_migrations_total", "worker"] == 4  # round robin over two
