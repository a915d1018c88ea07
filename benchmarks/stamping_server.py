"""A streaming server that costs next to nothing: fixed time to first token, fixed gaps, each event stamped.

Speaks just enough HTTP/1.1 to be an engine: `POST` returns an event stream that ends with its usage, `GET` returns
200, with a model list if one is requested. The content of
every event is the monotonic clock (ns) at its sending, so a client on the same machine sees how late it arrives;
the first event also carries `"srv": [request read, event sent]` in the same clock.

    python -m benchmarks.stamping_server --port 0 --ttft-ms 20 --itl-ms 10 --chunks 64 --log stamps.csv

The log holds one line per finished answer: request read, first event sent, last event sent, in ns. It is written when
the server is terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"stamp","object":"model","created":0,"owned_by":"bench"}]}'
_BACKLOG = 4096
_PROMPT_TOKENS = 120


@dataclass(frozen=True, slots=True)
class Pace:
    """How an answer is spread over time."""

    ttft_seconds: float
    itl_seconds: float
    chunks: int


class StampingServer(asyncio.Protocol):
    """One connection; requests one after another."""

    def __init__(self, pace: Pace, answers: list[tuple[int, int, int]]) -> None:
        self._pace = pace
        self._answers = answers
        self._first_ns = 0
        self._received = b""
        self._read_ns = 0
        self._left = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._read_ns = time.monotonic_ns()
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        self._received = body[_content_length(head) :]
        if head.startswith(b"GET"):
            self._transport.write(_json_answer(_MODELS) if b"/models" in head.split(b"\r\n", 1)[0] else _EMPTY)
            return
        self._left = self._pace.chunks
        self._due = self._loop.time() + self._pace.ttft_seconds
        self._timer = self._loop.call_at(self._due, self._first)

    def _first(self) -> None:
        now = self._first_ns = time.monotonic_ns()
        self._transport.write(_HEAD + _chunk(_event(now, f',"srv":[{self._read_ns},{now}]')))
        self._sent()

    def _next(self) -> None:
        self._transport.write(_chunk(_event(time.monotonic_ns())))
        self._sent()

    def _sent(self) -> None:
        self._left -= 1
        if self._left:
            self._due += self._pace.itl_seconds
            self._timer = self._loop.call_at(self._due, self._next)
        else:
            self._transport.write(_chunk(_usage(self._pace.chunks) + b"data: [DONE]\n\n") + b"0\r\n\r\n")
            self._answers.append((self._read_ns, self._first_ns, time.monotonic_ns()))


def _event(now_ns: int, more: str = "") -> bytes:
    """As a chat's and as a completion's chunk at once: clients read either."""
    choice = f'{{"index":0,"text":"{now_ns}","delta":{{"content":"{now_ns}"}}}}'
    return f'data: {{"object":"chat.completion.chunk","model":"stamp","choices":[{choice}]{more}}}\n\n'.encode()


def _usage(tokens: int) -> bytes:
    counts = f'"prompt_tokens":{_PROMPT_TOKENS},"completion_tokens":{tokens},"total_tokens":{_PROMPT_TOKENS + tokens}'
    return f'data: {{"choices":[],"usage":{{{counts}}}}}\n\n'.encode()


def _json_answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _serve(port: int, pace: Pace, log: Path | None) -> None:
    loop = asyncio.get_running_loop()
    answers: list[tuple[int, int, int]] = []
    server = await loop.create_server(lambda: StampingServer(pace, answers), "127.0.0.1", port, backlog=_BACKLOG)
    print(f"ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    if log is not None:
        log.write_text("".join(f"{read},{first},{last}\n" for read, first, last in answers), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: the system picks one")
    parser.add_argument("--ttft-ms", type=float, default=20.0, help="time to first token")
    parser.add_argument("--itl-ms", type=float, default=10.0, help="time between events")
    parser.add_argument("--chunks", type=int, default=64, help="content events an answer")
    parser.add_argument("--log", type=Path, help="where to write the stamps of all answers in the end")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pace = Pace(options.ttft_ms / 1000, options.itl_ms / 1000, options.chunks)
        runner.run(_serve(options.port, pace, options.log))
