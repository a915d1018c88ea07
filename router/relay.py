"""An engine's answer on its way to the client: every chunk at once and unchanged."""

from __future__ import annotations

import asyncio
from time import perf_counter

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from router.dispatch import Dispatcher
from router.errors import error_event
from router.exchange import Exchange, Outcome, outcome_of_status
from router.upstream import Opening, backward_headers


class Relay:
    """Passes answers on, and notes in the exchange what they say."""

    def __init__(self, dispatcher: Dispatcher, inter_token_seconds: float) -> None:
        self._dispatcher = dispatcher
        self._inter_token_seconds = inter_token_seconds

    def whole(self, exchange: Exchange, opening: Opening) -> web.Response:
        """An answer that wasn't streamed, whatever its status."""
        status = opening.response.status
        exchange.outcome = outcome_of_status(status)
        if exchange.outcome is Outcome.COMPLETED:
            self._first_token(exchange)
        elif exchange.watch.error is not None:
            exchange.error = exchange.watch.error.message
        return web.Response(status=status, body=opening.first, headers=self._headers(exchange, opening))

    async def stream(self, request: web.Request, exchange: Exchange, opening: Opening) -> web.StreamResponse:
        """An event stream; one that breaks off ends with an error event."""
        response = web.StreamResponse(status=opening.response.status, headers=self._headers(exchange, opening))
        response.headers["X-Accel-Buffering"] = "no"
        try:
            await response.prepare(request)
            await self._pass_on(request, exchange, opening, response)
            if exchange.error and not exchange.watch.done:
                await response.write(_closing_event(exchange))
            await response.write_eof()
        except ConnectionResetError:
            exchange.client_left()
        return response

    async def _pass_on(
        self, request: web.Request, exchange: Exchange, opening: Opening, response: web.StreamResponse
    ) -> None:
        """Everything the engine sends, and what became of it. Raises ConnectionResetError when the client is gone."""
        try:
            async with asyncio.timeout(self._inter_token_seconds) as deadline:
                await self._pump(exchange, opening, response, deadline)
            self._judge(exchange)
        except TimeoutError:
            if _client_is_stuck(request):
                _hang_up(request)
                raise ConnectionResetError("the client stopped reading") from None
            exchange.outcome = Outcome.TIMED_OUT
            exchange.error = f"no further token within {self._inter_token_seconds:g} s"
        except ConnectionResetError:
            raise
        except aiohttp.ClientError as error:
            exchange.outcome, exchange.error = Outcome.FAILED, f"the engine's stream broke off: {error}"

    async def _pump(
        self, exchange: Exchange, opening: Opening, response: web.StreamResponse, deadline: asyncio.Timeout
    ) -> None:
        now = asyncio.get_running_loop().time
        read, watch, chunk = opening.response.content.readany, exchange.watch, opening.first
        while chunk:
            exchange.last_chunk_at = perf_counter()
            if exchange.first_content_at is None and watch.content_seen:
                exchange.first_content_at = exchange.last_chunk_at
                self._first_token(exchange)
            await response.write(chunk)
            deadline.reschedule(now() + self._inter_token_seconds)
            chunk = await read()
            watch.feed(chunk)

    def _judge(self, exchange: Exchange) -> None:
        """The outcome of a stream that the engine closed in order."""
        error = exchange.watch.error
        if error is not None:
            exchange.outcome = Outcome.REFUSED if error.overload else Outcome.FAILED
            exchange.error = error.message
        elif exchange.watch.done:
            exchange.outcome = Outcome.COMPLETED
        else:
            exchange.outcome, exchange.error = Outcome.FAILED, "the engine's stream ended without [DONE]"

    def _first_token(self, exchange: Exchange) -> None:
        if exchange.placement is not None:
            self._dispatcher.first_token(exchange.placement)

    def _headers(self, exchange: Exchange, opening: Opening) -> CIMultiDict[str]:
        headers = backward_headers(opening.response.headers)
        headers.update(exchange.explanation(self._dispatcher.policy.name))
        return headers


def _closing_event(exchange: Exchange) -> bytes:
    """The last event of a broken stream, on a line of its own wherever the engine's bytes stopped."""
    status = 504 if exchange.outcome is Outcome.TIMED_OUT else 502
    event = error_event(exchange.error, f"router_{exchange.outcome.value}", status)
    return b"\n\n" + event if exchange.watch.inside_event else event


def _hang_up(request: web.Request) -> None:
    """Drop what can't be delivered; an orderly close would wait for the client to take it."""
    if isinstance(request.transport, asyncio.WriteTransport):
        request.transport.abort()


def _client_is_stuck(request: web.Request) -> bool:
    """Bytes for the client that it doesn't take."""
    return request.transport is not None and request.transport.get_write_buffer_size() > 0
