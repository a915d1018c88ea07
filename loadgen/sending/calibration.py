"""What the client itself adds to a TTFT on this machine, measured on a server of its own before a run.

A slow clock governor doubles the TTFT that a client reports, and looks like a slower prefill (ai-dynamo/aiperf#1424,
LT10). So the client first streams from a loopback server in this very process, which answers at once and stamps
what it sends; what is left between the stamps and the client's own is the floor under every figure of the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import gevent
import numpy as np
from gevent.server import StreamServer

from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.scenario.model import Timeouts

REQUESTS = 60
WARM_REQUESTS = 10
STREAMS = 4
_BODY = b'{"stream":true}'
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%d %d"}}]}\n\n'
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Milliseconds of TTFT that no server caused."""

    floor_p50_ms: float
    floor_p99_ms: float
    requests: int


def calibrate() -> Calibration:
    """Takes some tens of milliseconds. Raises RuntimeError when the client's own loopback doesn't answer."""
    server = StreamServer(("127.0.0.1", 0), _answer)
    server.start()
    client = HttpClient(Target("127.0.0.1", server.server_port, tls=False, path=""), Timeouts())
    try:
        head = client.head("/v1/chat/completions", {})
        gevent.joinall([gevent.spawn(client.post, head, _BODY) for _ in range(WARM_REQUESTS)])
        streams = [gevent.spawn(_floors, client, head, REQUESTS // STREAMS) for _ in range(STREAMS)]
        gevent.joinall(streams, raise_error=True)
    finally:
        client.close()
        server.stop()
    floors = [floor for stream in streams for floor in stream.value]
    p50, p99 = np.quantile(floors, (0.5, 0.99))
    return Calibration(float(p50) * 1e3, float(p99) * 1e3, len(floors))


def _floors(client: HttpClient, head: bytes, requests: int) -> list[float]:
    found = []
    for _ in range(requests):
        exchange = client.post(head, _BODY)
        if exchange.first_token is None:
            raise RuntimeError(f"the load generator can't reach its own loopback server: {exchange.error}")
        content = exchange.first_event_data.split(b'"content":"')[1].split(b'"')[0]
        read_ns, written_ns = (int(stamp) for stamp in content.split())
        found.append((exchange.first_token - exchange.sent) - (written_ns - read_ns) / 1e9)
    return found


def _answer(connection: Any, _: Any) -> None:
    """Requests on one connection, one after another; a request of this client fits one read."""
    while connection.recv(65_536):
        read = time.monotonic_ns()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        event = _EVENT % (read, time.monotonic_ns())
        connection.sendall(head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (event, _DONE, b"")))
