"""A model folder to plan with, and a scripted HTTP server to send to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.prompts import PromptWriter

Script = Callable[["Connection", bytes], None]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"


class Connection:
    """The server's side of one connection, with the few things that scripts say on it."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw

    def send(self, data: bytes) -> None:
        self.raw.sendall(data)

    def start_stream(self, **headers: str) -> None:
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.send(STREAM_HEAD + lines.encode() + b"\r\n")

    def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        self.chunk(f"data: {text}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def content(self, text: str) -> None:
        self.event({"choices": [{"index": 0, "delta": {"content": text}}]})

    def usage(self, **tokens: int) -> None:
        self.event({"choices": [], "usage": tokens})

    def end_stream(self) -> None:
        self.event("[DONE]")
        self.send(b"0\r\n\r\n")

    def answer(self, status: str, body: Any) -> None:
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self.send(head.encode() + content)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.raw.close()

    def close(self) -> None:
        # Without the shutdown a thread that still reads would keep the connection open.
        with contextlib.suppress(OSError):
            self.raw.shutdown(socket.SHUT_RDWR)
        self.raw.close()


class FakeServer:
    """Runs `script` once a request, each connection in a thread of its own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = self.listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(raw)
        with contextlib.suppress(OSError):
            while request := _read_request(raw):
                self.requests.append(request)
                self.script(connection, request)
        raw.close()

    def close(self) -> None:
        # The shutdown wakes the accepting thread, which would otherwise keep the listener open.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def _read_request(raw: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        received = raw.recv(65536)
        if not received:
            return b""
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    while len(body) < length:
        body += raw.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def serve() -> Iterator[Callable[[Script], FakeServer]]:
    servers: list[FakeServer] = []

    def start(script: Script) -> FakeServer:
        servers.append(FakeServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture(scope="session")
def writer(tokenizer: Tokenizer) -> PromptWriter:
    return PromptWriter(tokenizer)
