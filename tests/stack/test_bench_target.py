"""`prefixwatch bench --target`: an endpoint behind TLS that wants a key, an end by Ctrl-C, one that goes away."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.request_log.records import Outcome, read_requests

pytestmark = pytest.mark.timeout(240)

KEY = "sk-3f9c-not-to-be-written"
SCENARIO = """
name: few
duration_seconds: 20
arrivals: {kind: closed, concurrency: 1, requests: 6}
groups: {count: 1, shared_tokens: 64, unique_tokens: 16, output_tokens: 2}
tenants: [{name: acme}, {name: zeta, headers: {authorization: "Bearer ${ZETA_KEY}"}}]
slo: [availability]
"""


class Endpoint:
    """An OpenAI-compatible server that takes two keys, and counts the chats of each."""

    def __init__(self, authority: trustme.CA) -> None:
        self.tokenizer = Tokenizer(default_model_dir())
        self.keys: list[str] = []
        self.sessions: list[str] = []
        self.chatted = asyncio.Event()
        """A chat has come that is never answered."""
        self.over = asyncio.Event()
        self.gone_after = 10**9
        """Chats after which it lists no models any more."""
        self.hold_from = 10**9
        """The first chat that is never answered."""
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        self.server = TestServer(app, host="localhost", scheme="https")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(self.context)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "who are you?"}, status=401)
        if len(self.keys) >= self.gone_after:
            return web.json_response({"error": "no backend"}, status=503)
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["model"] == "second"
        self.keys.append(request.headers.get("authorization", ""))
        self.sessions.append(request.headers["x-session-id"])
        if len(self.keys) >= self.hold_from:
            self.chatted.set()
            await self.over.wait()
        if len(self.keys) == 3:
            return web.json_response({"error": {"message": f"not now, {self.keys[-1]}"}}, status=401)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        counted = len(self.tokenizer.encode_chat(body["messages"]))
        usage = {"prompt_tokens": counted, "completion_tokens": 2, "total_tokens": counted + 2}
        tokens: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": "a"}}]}] * 2
        for event in (*tokens, {"choices": [], "usage": usage}):
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


@pytest_asyncio.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    (tmp_path / "few.yaml").write_text(SCENARIO)
    endpoint = Endpoint(authority)
    await endpoint.server.start_server(ssl=endpoint.context)
    yield endpoint
    endpoint.over.set()
    await endpoint.server.close()


Bench = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
def bench(endpoint: Endpoint, tmp_path: Path) -> Bench:
    """Starts a bench of the endpoint; `given` replaces or adds options."""

    async def start(**given: str) -> asyncio.subprocess.Process:
        options = {
            "target": endpoint.url,
            "model_dir": str(default_model_dir()),
            "model": "second",
            "api_key_env": "STAGING_KEY",
            "ca_file": str(tmp_path / "ca.pem"),
            "repeats": "2",
            "out": str(tmp_path / "out"),
        }
        words = [word for name, value in (options | given).items() if value for word in (f"--{name}", value)]
        words = [word.replace("_", "-") if word.startswith("--") else word for word in words]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "prefixwatch", "bench", str(tmp_path / "few.yaml"), *words),
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                "STAGING_KEY": KEY,
                "ZETA_KEY": KEY + "-zeta",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    return start


async def test_keys_are_sent_and_stand_in_no_file(endpoint: Endpoint, bench: Bench, tmp_path: Path) -> None:
    """Both the run's key and a tenant's own, over TLS that only the given authority vouches for."""
    process = await bench()
    said, _ = await process.communicate()
    assert process.returncode in (1, 3), said.decode()  # one failed; 3: a busy machine may spoil so short a run
    records = list(read_requests(tmp_path / "out" / "requests.parquet"))
    assert sorted(record.outcome for record in records) == [Outcome.COMPLETED] * 11 + [Outcome.FAILED]
    zeta = sum(record.tenant == "zeta" for record in records)
    assert 0 < zeta < 12
    assert sorted(endpoint.keys) == [f"Bearer {KEY}"] * (12 - zeta) + [f"Bearer {KEY}-zeta"] * zeta
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY.encode() not in said
    assert summary_of(tmp_path)["workers"] is None  # nobody told, and nothing may be made of a guess


async def test_a_second_bench_has_sessions_of_its_own(endpoint: Endpoint, bench: Bench, tmp_path: Path) -> None:
    """The fleet's exporter took them for those of the first, come back, and counted migrations that never were."""
    for name in ("a", "b"):
        process = await bench(repeats="1", out=str(tmp_path / name))
        await process.communicate()
    first, second = (set(endpoint.sessions[begin : begin + 6]) for begin in (0, 6))
    assert (len(endpoint.sessions), len(first), len(second)) == (12, 6, 6)
    assert not first & second
    logged = [[row.session for row in read_requests(tmp_path / name / "requests.parquet")] for name in ("a", "b")]
    assert logged[0] == logged[1]
    assert all(any(sent.startswith(f"{planned}-") for sent in first) for planned in logged[0])


async def test_ctrl_c_ends_the_run_and_keeps_what_was_measured(
    endpoint: Endpoint, bench: Bench, tmp_path: Path
) -> None:
    """The run at work is logged whole, with what it didn't send; all is graded, and called incomplete."""
    endpoint.hold_from = 6 + 3
    process = await bench(repeats="3", workers="3")
    await endpoint.chatted.wait()
    process.send_signal(signal.SIGINT)
    said, _ = await process.communicate()
    assert process.returncode == 3, said.decode()
    summary = summary_of(tmp_path)
    assert (summary["verdict"], summary["workers"]) == ("inconclusive", 3)
    assert "stopped by hand: 2 of 3 runs were made" in " ".join(summary["validity"]["reasons"])
    assert summary["policies"]["target"]["requests"]["completed"] == 5 + 2
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    regraded = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "prefixwatch", "report", str(tmp_path / "out"), "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await regraded.communicate()
    assert json.loads(printed[printed.index(b"{\n") :])["validity"] == summary["validity"]


async def test_a_killed_bench_leaves_no_load_generator_behind(endpoint: Endpoint, bench: Bench) -> None:
    endpoint.hold_from = 1
    process = await bench()
    await endpoint.chatted.wait()
    below = psutil.Process(process.pid).children(recursive=True)
    generators = [child for child in below if "prefixwatch.loadgen.run" in child.cmdline()]
    assert generators
    process.kill()
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, generators, timeout=60)
    assert alive == []


async def test_ctrl_c_before_anything_was_measured_just_ends(bench: Bench, tmp_path: Path) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        asked.set()
        await ended.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/models", never)
    server = TestServer(app)
    await server.start_server()
    process = await bench(target=str(server.make_url("")), ca_file="")
    await asked.wait()
    process.send_signal(signal.SIGINT)
    said, _ = await process.communicate()
    ended.set()
    await server.close()
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said
    assert not (tmp_path / "out" / "summary.json").exists()


async def test_a_target_that_goes_away_between_runs_costs_no_results(
    endpoint: Endpoint, bench: Bench, tmp_path: Path
) -> None:
    endpoint.gone_after = 6
    process = await bench()
    said, _ = await process.communicate()
    assert process.returncode == 2, said.decode()
    assert_matches(r"error: --target: https://localhost:\d+/v1/models answers 503", said)
    summary = summary_of(tmp_path)
    assert "1 of 2 runs were made, then: --target: https://localhost" in " ".join(summary["validity"]["reasons"])
    assert summary["policies"]["target"]["requests"]["completed"] == 5


def assert_matches(pattern: str, said: bytes) -> None:
    assert re.search(pattern, " ".join(said.decode().split())), said.decode()


def summary_of(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "out" / "summary.json").read_text()))
