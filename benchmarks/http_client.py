"""CPU of getting one metrics page over loopback: the exporter's client against aiohttp with a bounded read loop.

Both get the same 56 KB page from the same server in turns, with a deadline and a limit of bytes. Each figure is the
median of several rounds of CPU time.

    python -m benchmarks.http_client [--pages 400] [--rounds 7]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from prefixwatch.exporters.http.connection import Receiving
from prefixwatch.exporters.http.page_client import PageClient

MOST_OF_AIOHTTP = 0.8
"""The exporter's own client is only worth keeping while it takes at most this share of aiohttp's CPU."""

_PAGE = Path(__file__).parent.parent / "tests/exporters/captures/metrics_vllm_0.32.0.txt"
_LIMIT_BYTES = 16 * 1024 * 1024
_DEADLINE_SECONDS = 5.0
_HEADERS = {"Accept": "text/plain", "Accept-Encoding": "identity"}


def serve(port: Pipe) -> None:
    """Serve the page on a free port, which is sent through the pipe."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=_PAGE.read_bytes(), content_type="text/plain")

    async def started() -> None:
        app = web.Application()
        app.router.add_get("/metrics", page)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(started())


async def cpu_us(get: Callable[[], Awaitable[bytes]], pages: int) -> float:
    """CPU time of one page, in microseconds."""
    assert len(await get()) == _PAGE.stat().st_size
    begun = time.process_time()
    for _ in range(pages):
        await get()
    return (time.process_time() - begun) / pages * 1e6


async def measure(url: str, pages: int, rounds: int) -> dict[str, float]:
    """Medians by client."""
    loop = asyncio.get_running_loop()
    client = PageClient(Receiving(2 * _LIMIT_BYTES), 15.0)

    async def own() -> bytes:
        return (await client.get(url, _HEADERS, _LIMIT_BYTES, loop.time() + _DEADLINE_SECONDS)).body

    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def general() -> bytes:
            parts, size = [], 0
            async with (
                asyncio.timeout(_DEADLINE_SECONDS),
                session.get(url, headers=_HEADERS, allow_redirects=False) as response,
            ):
                async for part in response.content.iter_any():
                    size += len(part)
                    if size > _LIMIT_BYTES:
                        raise ValueError("too large")
                    parts.append(part)
            return b"".join(parts)

        found: dict[str, list[float]] = {"own": [], "aiohttp": []}
        for _ in range(rounds):
            found["own"].append(await cpu_us(own, pages))
            found["aiohttp"].append(await cpu_us(general, pages))
    await client.close()
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    found = uvloop.run(measure(f"http://127.0.0.1:{ours.recv()}/metrics", args.pages, args.rounds))
    server.terminate()
    ratio = found["own"] / found["aiohttp"]
    print(f"one page of {_PAGE.stat().st_size:,} bytes: own client {found['own']:.0f} µs, aiohttp "
          f"{found['aiohttp']:.0f} µs of CPU, ratio {ratio:.2f} (aim: at most {MOST_OF_AIOHTTP})")  # fmt: skip
    return 0 if ratio <= MOST_OF_AIOHTTP else 1


if __name__ == "__main__":
    raise SystemExit(main())
