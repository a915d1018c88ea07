"""The baseline of `router_added_ttft`: an aiohttp and uvloop proxy that does nothing but pass bytes on.

python benchmarks/passthrough.py --target http://127.0.0.1:8100
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
import uvloop
from aiohttp import web


async def _serve(target: str) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
    ) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            async with session.post(f"{target}{request.path}", data=body) as answer:
                response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args().target))
