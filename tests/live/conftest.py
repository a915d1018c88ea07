"""Two real vLLM engines for all live tests, started once, each test with empty caches."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.tiny_model import default_model_dir, words
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from tests.live.chats import Writer

ENGINES = 2


@pytest.fixture(scope="module")
def sharing(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineHandle]]:
    """Two more engines, whose connectors keep KV in one folder."""
    yield from engines_with_a_store(2, model_dir, tmp_path_factory.mktemp("sharing"))


def engines_with_a_store(count: int, model_dir: Path, folder: Path) -> Iterator[list[EngineHandle]]:
    """Engines whose connectors keep KV below this folder, by tokens and without the salt."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "store")},
    }
    arguments = ("--kv-transfer-config", json.dumps(connector))
    handles = asyncio.run(fleet.start_vllm(count, model_dir, folder, extra_arguments=arguments))
    yield handles
    asyncio.run(fleet.stop(handles))


@dataclass(frozen=True, slots=True)
class Completion:
    """What one streamed completion was. `deltas` are the texts that were not empty."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    deltas: list[str]
    finish_reason: str | None
    ttft_seconds: float


Complete = Callable[..., Awaitable[Completion]]
MakePrompt = Callable[[int], str]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return default_model_dir()


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture(scope="session")
def _running_engines(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineHandle]]:
    """The list is filled by `engines`; whatever is in it at the end is stopped."""
    handles: list[EngineHandle] = []
    yield handles
    asyncio.run(fleet.stop(handles))


@pytest.fixture
def engines(
    _running_engines: list[EngineHandle], model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[EngineHandle]:
    """Two engines that run and have cached nothing; a test may kill them, the next one gets new ones."""
    handles = _running_engines
    if not handles or not all(handle.process.alive for handle in handles):
        asyncio.run(fleet.stop(handles))
        handles.clear()
        handles += asyncio.run(fleet.start_vllm(ENGINES, model_dir, tmp_path_factory.mktemp("vllm-logs")))
    asyncio.run(fleet.reset_caches(handles))
    return handles


@pytest.fixture
def make_prompt(request: pytest.FixtureRequest) -> MakePrompt:
    """Prompts of an exact number of tokens, that no other test sends."""
    rng = random.Random(request.node.nodeid)
    alphabet = words()
    return lambda tokens: "".join(f" {word}" for word in rng.choices(alphabet, k=tokens))


@pytest.fixture
def writer(request: pytest.FixtureRequest) -> Writer:
    return Writer(request.node.nodeid)


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture
def complete(session: aiohttp.ClientSession) -> Complete:
    """`await complete(url, prompt, **fields)`: one streamed completion of one token, or as `fields` say."""

    async def send(url: str, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> Completion:
        options = {"include_usage": True}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": True, "stream_options": options}
        deltas: list[str] = []
        usage: dict[str, Any] = {}
        finish_reason, first_seen = None, 0.0
        sent = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body | fields, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                for choice in event["choices"]:
                    finish_reason = choice["finish_reason"] or finish_reason
                    if choice["text"]:
                        first_seen = first_seen or time.perf_counter()
                        deltas.append(choice["text"])
                usage = event.get("usage") or usage
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        ttft_seconds = first_seen - sent
        counts = usage["prompt_tokens"], cached, usage["completion_tokens"]
        return Completion(*counts, deltas, finish_reason, ttft_seconds)

    return send
