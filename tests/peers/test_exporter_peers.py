"""Our exporter in front of other projects' real processes: what it scrapes is what was sent."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefixwatch.engines.process import ManagedProcess, free_ports
from prefixwatch.engines.tiny_model import default_model_dir, words
from tests.needs import need
from tests.peers.dynamo_stack import BLOCK
from tests.peers.fake_worker import MODEL, FakeWorker
from tests.peers.peer_venv import PYTHON
from tests.peers.scraped import scraped

pytestmark = [pytest.mark.peers, pytest.mark.timeout(240)]

REQUESTS = 24
WORKERS = 2
ROUTERS = {
    "smg": ["smg", "launch", "--policy", "cache_aware"],
    "sglang-router": ["sglang_router.launch_router", "--policy", "cache_aware"],
    "vllm-router": ["vllm_router.launch_router", "--policy", "cache_aware"],
}


@pytest.mark.parametrize("router", ROUTERS)
async def test_a_routers_placements_are_the_requests_that_arrived(router: str, tmp_path: Path) -> None:
    """Trap 1 on the live page: the router's duration ends at the headers and is taken for no latency."""
    rng = random.Random(1)
    async with AsyncExitStack() as stack:
        arrivals, open_ = asyncio.Queue[int](), asyncio.Event()
        workers = [FakeWorker(number, arrivals, open_) for number in range(WORKERS)]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        port, metrics_port = free_ports(2)
        command = [str(PYTHON), "-m", *ROUTERS[router], "--host", "127.0.0.1", "--port", str(port),
                   "--worker-urls", *(worker.url for worker in workers),
                   "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]  # fmt: skip
        process = ManagedProcess(router, command, tmp_path / "log")
        stack.callback(process.stop, grace_seconds=1)
        await process.wait_ready(f"http://127.0.0.1:{port}/readiness", timeout_seconds=30)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for _ in range(REQUESTS):
            body = {"model": MODEL, "prompt": " ".join(rng.choices(words(), k=60)), "max_tokens": 1, "user": "x"}
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
        (target,) = await scraped(f"http://127.0.0.1:{metrics_port}/metrics")
    seen = Counter(workers[arrivals.get_nowait()].url for _ in range(arrivals.qsize()))
    assert target.system is not None
    assert target.store is not None
    assert target.system.system == router
    placed = target.store.totals_by("routed_requests", "worker")
    assert {worker: count for (worker,), count in placed.items() if count} == dict(seen)
    assert seen.total() == REQUESTS
    assert not target.store.has("e2e_seconds")


async def test_mooncakes_master_and_client_count_what_was_stored_and_fetched(tmp_path: Path) -> None:
    need(find_library("rdmacm") is not None, "Mooncake needs libraries that scripts/install-test-tools installs")
    rpc, own, master_page, client_page = free_ports(4)
    master = ManagedProcess(
        "mooncake_master",
        [str(PYTHON.with_name("mooncake_master")), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}",
         "--metrics_host=127.0.0.1", f"--metrics_port={master_page}"],
        tmp_path / "master.log",
    )  # fmt: skip
    try:
        await master.wait_ready(f"http://127.0.0.1:{master_page}/metrics", timeout_seconds=30)
        script = str(Path(__file__).with_name("mooncake_store.py"))
        arguments = [f"127.0.0.1:{rpc}", f"127.0.0.1:{own}", str(client_page)]
        with (tmp_path / "client.log").open("wb") as log:
            client = await asyncio.create_subprocess_exec(
                PYTHON, script, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        try:
            assert client.stdout is not None
            assert client.stdin is not None
            assert await client.stdout.readline() == b"{}\n", (tmp_path / "client.log").read_text()
            client.stdin.write(b'{"put": 20, "bytes": 4096, "get": 15, "missing": 5}\n')
            assert json.loads(await client.stdout.readline()) == {"bytes": 15 * 4096}
            pages = [f"http://127.0.0.1:{port}/metrics" for port in (master_page, client_page)]
            master_target, client_target = await scraped(*pages)
        finally:
            client.terminate()
            await client.wait()
    finally:
        master.stop(grace_seconds=1)
    store, moved = master_target.store, client_target.store
    assert store is not None
    assert moved is not None
    assert (store.system.system, moved.system.system) == ("mooncake-master", "mooncake-client")
    assert (store.total("lookup_objects"), store.total("lookup_hit_objects")) == (20.0, 15.0)
    assert list(store.gauges_of("stored_objects").values()) == [20.0]
    assert list(store.gauges_of("kv_used_bytes").values()) == [20 * 4096.0]
    assert moved.totals_by("kv_transfer_bytes", "source", "destination") == {
        ("remote", "local"): 15 * 4096.0,
        ("local", "remote"): 20 * 4096.0,
    }
    times = moved.histograms("kv_transfer", "source", "destination")
    assert {ends: sum(one.count for one in found) for ends, found in times.items()} == {
        ("remote", "local"): 15.0,
        ("local", "remote"): 20.0,
    }
    seconds = times["remote", "local"][0].total
    assert seconds is not None
    assert 0 < seconds < 1.0  # microseconds taken for seconds, or the other way round, would be far off


def test_dynamos_frontend_and_workers_say_what_was_sent(tmp_path: Path) -> None:
    """Exact in stream-only traffic, first tokens included (trap 12)."""
    own_network = shutil.which("unshare") and not subprocess.run(["unshare", "--net", "true"], check=False).returncode
    need(bool(own_network), "no network namespace of one's own, which Dynamo's sockets, on all interfaces, need")
    script = [sys.executable, "-m", "tests.peers.dynamo_stack", str(PYTHON), str(default_model_dir()), str(tmp_path)]
    ended = subprocess.run(
        ["unshare", "--net", *script], capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2],
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    sent = found["sent"]
    frontend, *workers = found["scraped"]
    assert (frontend["system"], frontend["version"]) == ("dynamo-frontend", "1.6+")
    signals = frontend["signals"]
    assert signals["router_prompt_tokens"] == sent["prompt_tokens"]
    assert signals["router_delivered_hit_tokens"] == sent["cached_tokens"] > 0
    beyond = signals["router_predicted_hit_tokens"] - sent["cached_tokens"]
    assert 0 <= beyond <= BLOCK * sent["requests"]  # it counts a block that the prompt ends in; the engine doesn't
    for counted in ("routed_requests", "finished_requests", "request_hit_tokens", "ttft_seconds", "e2e_seconds"):
        assert signals[counted] == sent["requests"], counted
    assert {worker["system"] for worker in workers} <= {"vllm", "dynamo-worker"}
    first_tokens = sum(worker["signals"].get("ttft_seconds", 0) for worker in workers)
    assert first_tokens == sent["requests"]
