"""An engine that does as it is told, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any


class Out:
    """The engine's side of one answer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def head(self, status: int = 200, content_type: str = "text/event-stream") -> None:
        self._writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def reset(self) -> None:
        self._writer.transport.abort()

    async def stream(self, *events: bytes) -> None:
        await self.head()
        for event in events:
            await self.chunk(event)
        await self.end()

    async def json(self, body: Any, status: int = 200) -> None:
        await self.head(status, "application/json")
        await self.chunk(json.dumps(body).encode())
        await self.end()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


Behaviour = Callable[[Out], Awaitable[None]]


def delta(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n".encode()


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def usage(prompt: int, cached: int | None = None, output: int = 2) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


async def answer_ok(out: Out) -> None:
    await out.stream(ROLE, delta("hello "), delta("world"), DONE)


async def never_answer(out: Out) -> None:
    await asyncio.Event().wait()


async def reset_at_once(out: Out) -> None:
    out.reset()


class FakeEngine:
    """Listens on a free port; each POST is answered by the next of `script`, or by `behaviour` when that is empty."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviour: Behaviour = answer_ok
        self.script: list[Behaviour] = []
        self.health = 200
        self.models: list[str] = ["tiny"]
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.most_running = 0
        self.abandoned = asyncio.Semaphore(0)
        """Released once for each request that the other side gave up."""
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**26, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """As `kill -9` does it: nothing listens, nothing answers."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        out = Out(writer)
        method, path, _ = lines[0].split(" ")
        if method == "GET":
            listing = {"object": "list", "data": [{"id": model, "owned_by": self.name} for model in self.models]}
            await out.json(listing if path == "/v1/models" else {}, self.health if path == "/health" else 200)
            return True
        self.bodies.append(body)
        self.headers.append(headers)
        behaviour = self.script.pop(0) if self.script else self.behaviour
        return await self._answer(behaviour, out, reader)

    async def _answer(self, behaviour: Behaviour, out: Out, reader: asyncio.StreamReader) -> bool:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        answering = asyncio.ensure_future(behaviour(out))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.abandoned.release()
                return False
            await answering
            return not leaving.done()
        finally:
            self.running -= 1
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)


def events(body: bytes) -> list[Any]:
    """The events of a stream, `[DONE]` as text."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


async def read_for_ever(client: Any) -> None:
    async with client.chat() as answer:
        await answer.read()
