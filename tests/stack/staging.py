"""Two simulated engines, a router and an exporter, as somebody else runs them, and what others send there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prefixwatch.engines import fleet
from prefixwatch.engines.process import ManagedProcess, free_ports, stop_all
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.router.config import RouterConfig
from prefixwatch.stack.config import PrefixwatchConfig
from prefixwatch.stack.local.fleet import as_workers, start_router
from prefixwatch.stack.local.up import start_exporter


@dataclass
class Staging:
    router: str
    exporter: str
    engines: tuple[str, ...] = ()


@contextlib.contextmanager
def running_staging(folder: Path) -> Iterator[Staging]:
    router_port, exporter_port = free_ports(2)
    parts: list[ManagedProcess] = []

    async def start() -> tuple[str, ...]:
        engines = await fleet.start_simulated(2, default_model_dir(), folder)
        parts.extend(engine.process for engine in engines)
        workers = as_workers(engines)
        router = RouterConfig(port=router_port, workers=workers, model_dir=default_model_dir())
        parts.append(await start_router(router, folder))
        exporter = {"listen": f"127.0.0.1:{exporter_port}", "interval_seconds": 1}
        config = PrefixwatchConfig.model_validate({"exporter": exporter})
        parts.append(await start_exporter(config, workers, f"http://127.0.0.1:{router_port}", folder))
        return tuple(engine.url for engine in engines)

    try:
        engines = asyncio.run(start())
        yield Staging(f"http://127.0.0.1:{router_port}", f"http://127.0.0.1:{exporter_port}", engines)
    finally:
        stop_all(parts)


@contextlib.contextmanager
def others_chatting(url: str) -> Iterator[None]:
    """Somebody else's long prompts, one after another."""
    stop = threading.Event()
    other = threading.Thread(target=lambda: asyncio.run(_chatting(url, stop)))
    other.start()
    try:
        yield
    finally:
        stop.set()
        other.join()


async def _chatting(url: str, stop: threading.Event) -> None:
    async with aiohttp.ClientSession() as session:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = " ".join(f"word{number} and{k}" for k in range(400))
            body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()
