"""An engine's answer on its way to the client: every chunk at once and unchanged."""

from __future__ import annotations

import asyncio
from time import perf_counter

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from prefixwatch.openai_api.answer import is_event_stream
from prefixwatch.router.errors import error_event
from prefixwatch.router.exchange.exchange import Exchange, Outcome
from prefixwatch.router.placement.dispatch import Dispatcher
from prefixwatch.router.serving.upstream import Opening, backward_headers

_SECONDS_AFTER_DONE = 1.0
"""How long the end of a body may take after `[DONE]`; the client has its whole answer."""


class Relay:
    """Passes answers on, and notes in the exchange what they say."""

    def __init__(self, dispatcher: Dispatcher, inter_token_seconds: float) -> None:
        self._dispatcher = dispatcher
        self._inter_token_seconds = inter_token_seconds

    def whole(self, exchange: Exchange, opening: Opening) -> web.Response:
        """An answer that wasn't streamed, whatever its status."""
        _judge(exchange)
        if exchange.outcome is Outcome.COMPLETED:
            self._first_token(exchange)
        return web.Response(
            status=opening.response.status, body=opening.first, headers=self._headers(exchange, opening)
        )

    async def stream(self, request: web.Request, exchange: Exchange, opening: Opening) -> web.StreamResponse:
        """An event stream; one that breaks off ends with an error event."""
        response = web.StreamResponse(status=opening.response.status, headers=self._headers(exchange, opening))
        response.headers["X-Accel-Buffering"] = "no"
        try:
            await response.prepare(request)
            await self._pass_on(request, exchange, opening, response)
            if exchange.error and not exchange.answer.done:
                if not is_event_stream(response.headers.get("Content-Type", "")):
                    _hang_up(request)  # the client must not take it for complete
                    return response
                await response.write(_closing_event(exchange))
            await response.write_eof()
        except ConnectionResetError:
            exchange.client_left()
        return response

    async def _pass_on(
        self, request: web.Request, exchange: Exchange, opening: Opening, response: web.StreamResponse
    ) -> None:
        """Pass on all that the engine sends, and judge it. Raises ConnectionResetError when the client is gone."""
        try:
            async with asyncio.timeout(self._inter_token_seconds) as deadline:
                await self._pump(exchange, opening, response, deadline)
            exchange.answer.end()
            _judge(exchange)
        except TimeoutError:
            if _client_is_stuck(request):
                _hang_up(request)
                raise ConnectionResetError("the client stopped reading") from None
            if exchange.answer.done:
                return _judge(exchange)
            exchange.outcome = Outcome.TIMED_OUT
            exchange.error = f"no further token within {self._inter_token_seconds:g} s"
        except ConnectionResetError:
            raise
        except aiohttp.ClientError as error:
            exchange.outcome, exchange.error = Outcome.FAILED, f"the engine's stream broke off: {type(error).__name__}"

    async def _pump(
        self, exchange: Exchange, opening: Opening, response: web.StreamResponse, deadline: asyncio.Timeout
    ) -> None:
        now = asyncio.get_running_loop().time
        read, answer, chunk = opening.response.content.readany, exchange.answer, opening.first
        while chunk:
            exchange.last_chunk_at = perf_counter()
            if exchange.first_content_at is None and answer.content:
                exchange.first_content_at = exchange.last_chunk_at
                self._first_token(exchange)
            await response.write(chunk)
            deadline.reschedule(now() + (_SECONDS_AFTER_DONE if answer.done else self._inter_token_seconds))
            chunk = await read()
            answer.feed(chunk)

    def _first_token(self, exchange: Exchange) -> None:
        if exchange.placement is not None:
            self._dispatcher.first_token(exchange.placement)

    def _headers(self, exchange: Exchange, opening: Opening) -> CIMultiDict[str]:
        headers = backward_headers(opening.response.headers)
        headers.update(exchange.explanation(self._dispatcher.policy.label))
        return headers


def _judge(exchange: Exchange) -> None:
    """The outcome of an answer that the engine ended in order."""
    answer = exchange.answer
    exchange.outcome = Outcome(answer.outcome)
    if answer.error is not None:
        exchange.error = answer.error.message
    elif exchange.outcome is Outcome.FAILED and answer.status == 200:
        exchange.error = "the engine's stream ended without [DONE]"


def _closing_event(exchange: Exchange) -> bytes:
    """The last event of a broken stream, on a line of its own wherever the engine's bytes stopped."""
    status = 504 if exchange.outcome is Outcome.TIMED_OUT else 502
    event = error_event(exchange.error, f"router_{exchange.outcome.value}", status)
    return b"\n\n" + event if exchange.answer.inside_event else event


def _hang_up(request: web.Request) -> None:
    """Drop what can't be delivered; an orderly close would wait for the client to take it."""
    if isinstance(request.transport, asyncio.WriteTransport):
        request.transport.abort()


def _client_is_stuck(request: web.Request) -> bool:
    """Bytes for the client that it doesn't take."""
    return request.transport is not None and request.transport.get_write_buffer_size() > 0
