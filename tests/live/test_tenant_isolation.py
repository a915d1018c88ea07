"""Reuse across tenants on real vLLM engines, told by the router's records: every case found, and no false one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.exporters.requests.ledger import ROUTER, RequestLedger
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.kvcache.request_record import RequestPage
from prefixwatch.router.config import PolicyConfig, RouterConfig
from prefixwatch.router.tenant_config import IsolationConfig, TenantsConfig
from prefixwatch.stack.local.fleet import as_workers, start_router
from tests.live.conftest import MakePrompt

pytestmark = pytest.mark.vllm

SALTS = {"acme": "salt of acme", "bolt": "salt of bolt"}
ENGINE_BLOCK = 32


class Client:
    """Sends token ids, so that no tokenizer stands between what was sent and what was cached."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def complete(self, tenant: str, ids: list[int], max_tokens: int = 2) -> tuple[int, list[int]]:
        """Cached tokens, and the tokens of the answer."""
        body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "return_token_ids": True}
        headers = {"x-tenant-id": tenant}
        async with self._session.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            reply: dict[str, Any] = await answer.json()
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["token_ids"]

    async def isolation(self) -> dict[str, Any]:
        """What the exporter's ledger makes of the records so far."""
        ledger = RequestLedger(objectives=[])
        async with self._session.get(f"{self.url}/router/requests") as answer:
            page = msgspec.json.decode(await answer.read(), type=RequestPage)
        for record in page.records:
            ledger.record(record, ROUTER)
        told: dict[str, Any] = ledger.document(0.0)["isolation"]
        return told


Start = Callable[..., Awaitable[Client]]


@pytest_asyncio.fixture
async def start(engines: list[EngineHandle], model_dir: Path, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a router in front of the first engine, whose cache is empty."""
    routers: list[ManagedProcess] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def begin(salts: dict[str, str]) -> Client:
            config = RouterConfig(
                port=free_port(),
                workers=as_workers(engines[:1]),
                policy=PolicyConfig(name="round_robin"),
                model_dir=model_dir,
                always_predict=True,
                tenants=TenantsConfig(names=list(SALTS), salts=salts),
                isolation=IsolationConfig(caches_at_start="empty"),
            )
            routers.append(await start_router(config, tmp_path))
            return Client(f"http://127.0.0.1:{config.port}", session)

        yield begin
        for router in routers:
            router.stop()


@pytest.mark.parametrize("salted", [False, True])
async def test_another_tenants_opening_is_found_exactly_when_the_engine_reuses_it(
    start: Start, make_prompt: MakePrompt, tokenizer: Tokenizer, salted: bool
) -> None:
    client = await start(SALTS if salted else {})
    opening, *tails = (tokenizer.encode(make_prompt(tokens)).tolist() for tokens in (256, 96, 96))
    await client.complete("acme", opening + tails[0])
    crossed, _ = await client.complete("bolt", opening + tails[1])
    again, _ = await client.complete("bolt", opening + tails[1])
    assert again >= 256
    assert crossed == (0 if salted else 256)
    told = await client.isolation()
    assert told["audited_requests"] == 3
    assert told["violations"]["cross_tenant_hit"] == (0 if salted else 1)


async def test_a_conversation_that_finds_its_own_answers_is_no_violation(
    start: Start, make_prompt: MakePrompt, tokenizer: Tokenizer
) -> None:
    """vLLM caches what it generates, so each turn reuses more than was ever sent."""
    client = await start({})
    ids = tokenizer.encode(make_prompt(200)).tolist()
    for turn in range(4):
        sent = len(ids)
        _, answer = await client.complete("acme", ids, max_tokens=3 * ENGINE_BLOCK)
        ids += answer
        if turn:
            cached, _ = await client.complete("acme", ids)
            assert cached > sent
    told = await client.isolation()
    assert told["violations"]["cross_tenant_hit"] == 0
    assert told["not_audited_requests"] == 0
