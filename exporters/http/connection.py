"""One connection to a target, for one request at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

from prefixwatch.exporters.http.response import Answer, BadHttp, ResponseReader, TooLarge


class Overloaded(Exception):
    """All answers that are being received are larger together than allowed."""


@dataclass(slots=True)
class Receiving:
    """The bytes of all answers that are being received."""

    most_bytes: int
    held_bytes: int = 0

    def take(self, count: int) -> None:
        """Raises Overloaded; the bytes are held nevertheless, until they are given back."""
        self.held_bytes += count
        if self.held_bytes > self.most_bytes:
            raise Overloaded


class Connection(asyncio.Protocol):
    """Sends a request and waits for the answer."""

    __slots__ = ("_answer", "_held_bytes", "_reader", "_receiving", "_transport", "heard", "idle_since_seconds")

    def __init__(self, receiving: Receiving) -> None:
        self.heard = False
        """Whether anything came in answer to the last request."""
        self.idle_since_seconds = 0.0
        self._receiving = receiving
        self._held_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._answer: asyncio.Future[Answer] | None = None

    @property
    def usable(self) -> bool:
        """For another request; not any more when either side has closed."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, limit_bytes: int, deadline_seconds: float) -> Answer:
        """Raises BadHttp, TooLarge, Overloaded, TimeoutError, or ConnectionError when the peer closes too early."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._reader = reader = ResponseReader(limit_bytes)
        self._answer = loop.create_future()
        timer = loop.call_at(deadline_seconds, self._give_up)
        self.heard = False
        self._transport.write(request)
        try:
            answer = await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self._receiving.held_bytes -= self._held_bytes
            self._held_bytes = 0
            self._reader = self._answer = None
        if not reader.reusable:
            self.close()
        return answer

    def close(self) -> None:
        """At once: nobody waits for what is still under way, a TLS farewell included."""
        if self._transport is not None:
            self._transport.abort()

    def _give_up(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TimeoutError())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, answer = self._reader, self._answer
        if reader is None or answer is None or answer.done():
            self.close()  # nobody asked
            return
        self.heard = True
        self._held_bytes += len(data)
        try:
            self._receiving.take(len(data))
            reader.feed(data)
        except (BadHttp, TooLarge, Overloaded) as error:
            answer.set_exception(error)
            self.close()
            return
        if reader.answer is not None:
            answer.set_result(reader.answer)

    def connection_lost(self, exc: Exception | None) -> None:
        reader, answer = self._reader, self._answer
        if reader is None or answer is None or answer.done():
            return
        try:
            if exc is not None:
                raise ConnectionResetError(str(exc)) from exc
            reader.end()
        except OSError as error:
            answer.set_exception(error)
            return
        assert reader.answer is not None
        answer.set_result(reader.answer)
