"""What `bench --target` asks of the endpoint before it sends anything."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from prefixwatch.documents.errors import InputError
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.prompts import PromptError
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.targets import Endpoint, check_served_tokenizer, check_tokenizer, served_model

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
    assert await served_model(Endpoint(url)) == await served_model(Endpoint(f"{url}/v1")) == "a"


async def test_an_endpoint_that_lists_no_model_is_named(serve: Serve) -> None:
    url = await serve({"/v1/models": {"data": []}})
    with pytest.raises(UsageError, match="lists no model"):
        await served_model(Endpoint(url))
    with pytest.raises(UsageError, match="answers 404: is it an OpenAI-compatible endpoint"):
        await served_model(Endpoint(await serve({})))


async def test_a_tokenizer_that_counts_as_the_endpoint_does_is_accepted(serve: Serve) -> None:
    tokenizer = Tokenizer(default_model_dir())
    url = await serve({"/tokenize": lambda body: {"count": len(tokenizer.encode_chat(body["messages"]))}})
    await check_tokenizer(Endpoint(url), "tiny", default_model_dir())


async def test_a_tokenizer_that_counts_otherwise_is_refused_before_anything_is_sent(serve: Serve) -> None:
    """vllm-project/vllm#33907, kubernetes-sigs/inference-perf#230: prompts of another length than asked for."""
    url = await serve({"/tokenize": lambda body: {"count": 77}})
    with pytest.raises(UsageError, match=r"counts .* tokens where .* counts 77: give the folder of the model"):
        await check_tokenizer(Endpoint(url), "tiny", default_model_dir())


async def test_an_endpoint_without_tokenize_is_taken_at_its_usage(serve: Serve) -> None:
    await check_tokenizer(Endpoint(await serve({})), "tiny", default_model_dir())


async def test_an_endpoint_makes_prompts_without_the_folder_if_it_can(serve: Serve) -> None:
    tokenizer = Tokenizer(default_model_dir())

    def tokens(body: dict[str, Any]) -> dict[str, Any]:
        chat = body.get("messages")
        return {"tokens": (tokenizer.encode_chat(chat) if chat else tokenizer.encode(body["prompt"])).tolist()}

    engine, gateway = await serve({"/tokenize": tokens}), Endpoint(await serve({}))
    await asyncio.to_thread(check_served_tokenizer, Endpoint(f"{engine}/v1"), "tiny", None)
    await asyncio.to_thread(check_served_tokenizer, gateway, "tiny", engine)
    with pytest.raises(PromptError, match=r"answers 404: .* as --model-dir, or"):
        await asyncio.to_thread(check_served_tokenizer, gateway, "tiny", None)


async def test_a_model_that_is_asked_for_must_be_listed(serve: Serve) -> None:
    endpoint = Endpoint(await serve({"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}))
    assert await served_model(endpoint, "b") == "b"
    with pytest.raises(UsageError, match=r"--model c: .*/v1/models lists a, b"):
        await served_model(endpoint, "c")


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    found = trustme.CA()
    found.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return found


async def test_an_authority_of_ones_own_is_trusted_when_it_is_given(authority: trustme.CA, tmp_path: Path) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = TestServer(app, host="localhost", scheme="https")
    await server.start_server(ssl=context)
    url = str(server.make_url(""))
    assert await served_model(Endpoint(url, ca_file=tmp_path / "ca.pem")) == "a"
    with pytest.raises(UsageError, match=r"a certificate that can't be trusted .*give the certificates of its auth"):
        await served_model(Endpoint(url))
    await server.close()


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no certificate")
    for name in ("notes.txt", "nowhere.pem"):
        with pytest.raises(UsageError, match=f"--ca-file .*{name}: no certificates can be read from it"):
            Endpoint("https://localhost", ca_file=tmp_path / name)


async def test_an_endpoint_that_wants_a_key_is_told_from_one_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(request: web.Request) -> web.Response:
        known = request.headers.get("authorization") == "Bearer open-sesame"
        return web.json_response({"data": [{"id": "a"}]} if known else {}, status=200 if known else 401)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        with pytest.raises(UsageError, match="answers 401: name the environment variable that holds its API key"):
            await served_model(Endpoint(url))
        with pytest.raises(InputError, match="environment variable STAGING_KEY is not set"):
            await served_model(Endpoint(url, api_key_env="STAGING_KEY"))
        monkeypatch.setenv("STAGING_KEY", "open-sesame")
        assert await served_model(Endpoint(url, api_key_env="STAGING_KEY")) == "a"


def test_a_password_in_the_address_is_refused() -> None:
    with pytest.raises(UsageError, match="a password in the address would be in every result") as refused:
        Endpoint("https://user:secret@localhost")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://", "http://localhost:x", "http://[x]"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="give it as http://HOST:PORT"):
        Endpoint(url)
