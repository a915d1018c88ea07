"""What `bench --target` asks of the endpoint before it sends anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from engines.tiny_model import default_model_dir
from kvcache.tokenizer import Tokenizer
from stack.errors import UsageError
from stack.targets import check_tokenizer, served_model

Serve = Callable[[dict[str, Any]], Awaitable[str]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve({path: answer or function of the body})` starts a server and answers its address."""
    servers: list[TestServer] = []

    async def start(answers: dict[str, Any]) -> str:
        async def handle(request: web.Request) -> web.Response:
            answer = answers.get(request.path)
            if answer is None:
                return web.json_response({}, status=404)
            return web.json_response(answer(await request.json()) if callable(answer) else answer)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


async def test_the_first_model_listed_is_asked_for(serve: Serve) -> None:
    url = await serve({"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}})
    assert await served_model(url) == await served_model(f"{url}/v1") == "a"


async def test_an_endpoint_that_lists_no_model_is_named(serve: Serve) -> None:
    url = await serve({"/v1/models": {"data": []}})
    with pytest.raises(UsageError, match="lists no model"):
        await served_model(url)
    with pytest.raises(UsageError, match="answers 404: is it an OpenAI-compatible endpoint"):
        await served_model(await serve({}))


async def test_a_tokenizer_that_counts_as_the_endpoint_does_is_accepted(serve: Serve) -> None:
    tokenizer = Tokenizer(default_model_dir())
    url = await serve({"/tokenize": lambda body: {"count": len(tokenizer.encode_chat(body["messages"]))}})
    await check_tokenizer(url, "tiny", default_model_dir())


async def test_a_tokenizer_that_counts_otherwise_is_refused_before_anything_is_sent(serve: Serve) -> None:
    """vllm-project/vllm#33907, kubernetes-sigs/inference-perf#230: prompts of another length than asked for."""
    url = await serve({"/tokenize": lambda body: {"count": 77}})
    with pytest.raises(UsageError, match=r"counts .* tokens where .* counts 77: give the folder of the model"):
        await check_tokenizer(url, "tiny", default_model_dir())


async def test_an_endpoint_without_tokenize_is_taken_at_its_usage(serve: Serve) -> None:
    await check_tokenizer(await serve({}), "tiny", default_model_dir())
