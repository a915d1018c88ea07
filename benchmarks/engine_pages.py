"""Many engines' metrics pages from one process: real text, distinct, and changing between scrapes.

Engine i listens at its own loopback address (127.x.y.z, all at one port), as engines in a fleet do: whoever scrapes
them keeps one connection to each.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

CAPTURE = Path(__file__).parent.parent / "tests/exporters/captures/metrics_vllm_0.32.0.txt"
PAGE_BYTES = 65_536
_FIRST_ADDRESS = ipaddress.IPv4Address("127.16.0.1")
_MOMENTS = 50
_BLOCKS = b'num_gpu_blocks="'
_DIGITS = 6


def address(engine: int) -> str:
    return str(_FIRST_ADDRESS + engine)


def pages() -> list[tuple[bytes, bytes]]:
    """A real page at many moments, cut where an engine's own number of blocks stands; 64 KB by longer help texts."""
    text = re.sub(rb'num_gpu_blocks="\d+"', _BLOCKS + b'"', CAPTURE.read_bytes())
    helps = text.count(b"(text removed)")
    filler = b"x" * (len(b"(text removed)") + (PAGE_BYTES - len(text)) // helps)
    text = text.replace(b"(text removed)", filler)

    def at(moment: int) -> tuple[bytes, bytes]:
        grown = re.sub(
            rb"(?m)^(vllm:\S*) ([1-9]\d*)\.0$", lambda match: b"%s %d.0" % (match[1], int(match[2]) + moment), text
        )
        before, blocks, after = grown.partition(_BLOCKS)
        return before + blocks, after

    return [at(moment) for moment in range(_MOMENTS)]


def _head(length: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % length


def serve(port: Synchronized[int], served: Synchronized[int], listening: Event) -> None:
    """Answer every request with its engine's next page until killed. `served` counts pages."""
    # Numbers grow over the moments and start again: once in fifty scrapes an engine looks restarted.
    texts = [(_head(len(before) + _DIGITS + len(after)) + before, after) for before, after in pages()]

    class Engine(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # what TCP servers get
            own = ipaddress.IPv4Address(transport.get_extra_info("sockname")[0])
            self.engine = int(own) - int(_FIRST_ADDRESS)
            self.turn = self.engine

        def data_received(self, _: bytes) -> None:
            before, after = texts[self.turn % _MOMENTS]
            self.turn += 1
            self.transport.writelines([before, b"%0*d" % (_DIGITS, 27_000 + self.engine), after])
            served.value += 1

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Engine, "0.0.0.0", 0, backlog=4096)
        port.value = server.sockets[0].getsockname()[1]
        listening.set()
        await server.serve_forever()

    asyncio.run(main())
