"""Takes what a forwarding scraper sends and drops it, in a process of its own: the pages' server isn't slowed by it."""

from __future__ import annotations

import asyncio
import re
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


async def _take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            match = _LENGTH.search(head)
            await reader.readexactly(int(match[1]) if match else 0)
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def sink(port: Synchronized[int], listening: Event) -> None:
    """Answer every POST with 204 until killed."""

    async def main() -> None:
        server = await asyncio.start_server(_take, "127.0.0.1", 0)
        port.value = server.sockets[0].getsockname()[1]
        listening.set()
        await server.serve_forever()

    asyncio.run(main())
