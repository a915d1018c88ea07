"""Dynamo's frontend with two mocked workers, sent requests and scraped by our exporter. Prints what both sides saw.

Dynamo's sockets listen on all interfaces, so this runs in a network namespace of its own (`unshare --net`). Arguments:
the peers' Python, a model's folder, a scratch folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from prefixwatch.engines.process import ManagedProcess
from prefixwatch.exporters.scraping.target import Target
from tests.peers.scraped import scraped

BLOCK = 16
PLANES = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
LOOPBACK = dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"), "127.0.0.1")
READY = re.compile(r'"tiny"|dynamo_endpoint="generate"')
"""What the frontend's list of models and a worker's metrics page say once they can serve."""
WORKERS = 2
PORTS = range(20_000, 20_001 + WORKERS)
"""Nobody else is in this namespace; and Dynamo takes no system port above 32767, where the OS gives them."""
PROMPTS = 6
TURNS = 3


async def main(python: str, model: str, scratch: Path) -> dict[str, Any]:
    (scratch / "discovery").mkdir()
    environment = {"PATH": os.defpath, "HOME": str(scratch), "HF_HUB_OFFLINE": "1",
                   "DYN_FILE_KV": str(scratch / "discovery"), **LOOPBACK}  # fmt: skip
    frontend_port, *worker_ports = PORTS
    mocker = [python, "-m", "dynamo.mocker", *PLANES, "--model-path", model, "--model-name", "tiny",
              "--block-size", str(BLOCK), "--num-gpu-blocks-override", "4096", "--speedup-ratio", "10"]  # fmt: skip
    frontend = [python, "-m", "dynamo.frontend", *PLANES, "--http-host", "127.0.0.1", "--http-port",
                str(frontend_port), "--router-mode", "kv", "--kv-cache-block-size", str(BLOCK)]  # fmt: skip
    processes: dict[str, ManagedProcess] = {}
    try:
        for port in worker_ports:
            own = environment | {"DYN_SYSTEM_PORT": str(port)}
            worker = ManagedProcess(f"worker {port}", mocker, scratch / f"{port}.log", own)
            processes[f"http://127.0.0.1:{port}/metrics"] = worker
        url = f"http://127.0.0.1:{frontend_port}"
        processes[f"{url}/v1/models"] = ManagedProcess("frontend", frontend, scratch / "frontend.log", environment)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            await _all_listen(session, processes)
            sent = await _send(session, url)
        targets = await scraped(url, *(f"http://127.0.0.1:{port}" for port in worker_ports))
        return {"sent": sent, "scraped": [_seen(target) for target in targets]}
    finally:
        for process in processes.values():
            process.stop(grace_seconds=1)


async def _all_listen(session: aiohttp.ClientSession, processes: dict[str, ManagedProcess]) -> None:
    """The workers have their metrics pages, and the frontend has heard of the model."""
    async with asyncio.timeout(120):
        for url, process in processes.items():
            while not READY.search(await _page(session, url)):
                process.check()
                await asyncio.sleep(0.1)


async def _page(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as response:
            return await response.text()
    except aiohttp.ClientConnectorError:
        return ""


async def _send(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """Streamed chats one after another, each prompt several times; sums of what their usage says."""
    sums = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    for turn in range(TURNS):
        for prompt in range(PROMPTS):
            content = " ".join(f"word{prompt}-{number}" for number in range(20 + 10 * prompt))
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4 + turn,
                    "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
            usage: dict[str, Any] = {}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        usage = json.loads(line.removeprefix(b"data: ")).get("usage") or usage
            sums["requests"] += 1
            sums["prompt_tokens"] += usage["prompt_tokens"]
            sums["completion_tokens"] += usage["completion_tokens"]
            sums["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
    return sums


def _seen(target: Target) -> dict[str, Any]:
    store, system = target.store, target.system
    assert store is not None
    assert system is not None
    signals = {name: store.total(name, "count" if signal.kind == "histogram" else "value")
               for name, signal in system.signals.items() if signal.kind in ("counter", "histogram")}  # fmt: skip
    return {"system": system.system, "version": target.version,
            "signals": {name: total for name, total in signals.items() if total is not None}}  # fmt: skip


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))))
