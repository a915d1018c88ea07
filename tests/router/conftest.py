"""Engines, and a router in front of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Policy
from prefixwatch.router.serving.create import ROUTER, create_app
from prefixwatch.router.serving.router import Router
from tests.router.fake_engine import FakeEngine, until

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class Client:
    """A client of the router under test."""

    def __init__(self, runner: web.AppRunner, session: aiohttp.ClientSession, router: Router) -> None:
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.session = session
        self.router = router
        self.stop = runner.cleanup

    def chat(self, text: str = "hi", *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """A streamed chat request, unless the fields say otherwise."""
        body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": text}], **fields}
        return self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    def value(self, name: str, **labels: str) -> float | None:
        """A sample of the router's registry."""
        return self.router.metrics.registry.get_sample_value(f"prefixwatch_router_{name}", labels)

    def in_flight(self) -> dict[str, int]:
        return self.router.ledger.in_flight()

    async def settled(self) -> None:
        """Nothing is in flight any more."""
        await until(lambda: not any(self.in_flight().values()))


Start = Callable[..., Awaitable[Client]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes: one token a byte, so that token counts are the texts' lengths."""
    folder = tmp_path_factory.mktemp("bytes-model")
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = RawTokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Two engines, `a` and `b`."""
    both = [FakeEngine("a"), FakeEngine("b")]
    for engine in both:
        await engine.start()
    yield both
    for engine in both:
        await engine.stop()


@pytest.fixture
async def start(tokenizer: Tokenizer) -> AsyncIterator[Start]:
    """Starts a router in front of engines; the keywords are fields of its configuration."""
    runners: list[web.AppRunner] = []
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def begin(engines: list[FakeEngine], *, policy: str | Policy = "round_robin", **fields: Any) -> Client:
        workers = [{"name": engine.name, "url": engine.url} for engine in engines]
        config = RouterConfig.model_validate({"workers": workers, **fields})
        chosen = make_policy(policy) if isinstance(policy, str) else policy
        app = create_app(config, policy=chosen, tokenizer=tokenizer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        return Client(runner, session, app[ROUTER])

    yield begin
    await session.close()
    for runner in runners:
        await runner.cleanup()
