"""The life of one request: read, place, send, relay byte for byte, account for.

Until a byte has reached the client a failing engine costs one retry elsewhere; afterwards the stream ends with an
error event and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from router.config import RouterConfig
from router.dispatch import Dispatcher, Placement
from router.errors import BadRequest, error_body
from router.exchange import Exchange, Outcome, outcome_of_status
from router.health import Fault, HealthMonitor
from router.metrics import RouterMetrics
from router.policy import NoWorkers, RouteRequest
from router.prompt import CHAT, COMPLETIONS, Prompt, PromptReader, tokens_or_none
from router.records import Recorder, trace_id_of
from router.relay import Relay
from router.sse import AnswerWatch
from router.upstream import UpstreamFault, forward_headers, opened

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from router.tracing import Tracing

EXPLAIN_HEADER = "x-prefixwatch-explain"
"""A request with the value 1 gets its decision's scores in the answer's headers."""
_RETRIES = 1
_INLINE_BODY_BYTES = 8192
"""Larger bodies are tokenised in a thread: about 2,000 tokens take longer than the hop costs."""


class Proxy:
    """Answers the completion endpoints."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        reader: PromptReader,
        dispatcher: Dispatcher,
        health: HealthMonitor,
        metrics: RouterMetrics,
        recorder: Recorder,
        session: aiohttp.ClientSession,
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._reader = reader
        self._dispatcher = dispatcher
        self._health = health
        self._metrics = metrics
        self._recorder = recorder
        self._session = session
        self._tracing = tracing
        self._policy_name = dispatcher.policy.name
        self._relay = Relay(dispatcher, config.timeouts.inter_token_seconds)
        needs = dispatcher.policy.needs
        self.wants_blocks = needs.cache_view or config.always_predict
        self._wants_tokens = needs.tokens or self.wants_blocks
        self._wants_text = needs.text
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._urls = {
            (worker.name, path): URL(worker.url + path) for worker in config.workers for path in (CHAT, COMPLETIONS)
        }
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(
            id=request.headers.get("X-Request-Id") or f"pw-{next(self._numbers)}",
            path=request.path,
            arrived_at=perf_counter(),
            tenant=request.headers.get(self._config.tenants.header, ""),
            session=request.headers.get(self._config.tenants.session_header, ""),
            request_class=request.headers.get(self._config.tenants.class_header, ""),
            trace_id=trace_id_of(request.headers.get("traceparent", "")),
            explain=request.headers.get(EXPLAIN_HEADER) == "1",
        )
        span: Span | None = None
        try:
            try:
                exchange.prompt = await self._read(request, exchange)
            except web.HTTPRequestEntityTooLarge:
                limit = self._config.max_body_bytes
                return self._refuse(exchange, "too_large", 413, f"the body is larger than {limit} bytes")
            except BadRequest as error:
                return self._refuse(exchange, "not_json", 400, str(error))
            headers = forward_headers(request.headers)
            if self._tracing is not None:
                span = self._tracing.begin(exchange, request.headers)
                headers.update(self._tracing.headers(span))
                exchange.trace_id = self._tracing.trace_id(span)
            return await self._serve(request, exchange, exchange.prompt, headers)
        except asyncio.CancelledError:
            exchange.client_left()
            raise
        finally:
            exchange.ended_at = perf_counter()
            self._compare_prediction(exchange)
            self._metrics.record(exchange, self._config.block_size)
            self._recorder.ended(exchange)
            if span is not None and self._tracing is not None:
                self._tracing.finish(span, exchange, self._policy_name)

    async def _read(self, request: web.Request, exchange: Exchange) -> Prompt:
        body = await request.read()
        exchange.received_at = perf_counter()
        read = partial(
            self._reader.read,
            request.path,
            body,
            exchange.tenant,
            tokens=self._wants_tokens,
            blocks=self.wants_blocks,
            text=self._wants_text,
        )
        in_thread = (self._wants_tokens or self._wants_text) and len(body) > _INLINE_BODY_BYTES
        prompt = await asyncio.get_running_loop().run_in_executor(self._threads, read) if in_thread else read()
        if self._wants_tokens and prompt.tokens is None:
            self._metrics.untokenized.inc()
        return prompt

    async def _serve(
        self, request: web.Request, exchange: Exchange, prompt: Prompt, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        tokens = tokens_or_none(prompt)
        route_request = RouteRequest(
            id=exchange.id,
            prompt_tokens=len(tokens),
            tokens=tokens,
            blocks=prompt.blocks,
            block_size=self._config.block_size,
            max_output_tokens=prompt.max_output_tokens,
            model=prompt.model,
            tenant=exchange.tenant,
            session=exchange.session,
            text=prompt.text,
        )
        faults: list[UpstreamFault] = []
        tried: frozenset[str] = frozenset()
        while len(faults) <= _RETRIES:
            try:
                placement = self._place(exchange, route_request, tried, faults)
            except NoWorkers:
                break
            try:
                return await self._attempt(request, exchange, placement, prompt, headers)
            except UpstreamFault as fault:
                self._health.failed(placement.worker, fault.fault, str(fault))
                faults.append(fault)
                tried |= {placement.worker}
            except TimeoutError:
                seconds = self._config.timeouts.first_byte_seconds
                return self._failure(exchange, Outcome.TIMED_OUT, 504, f"no answer within {seconds:g} s")
            finally:
                self._dispatcher.end(placement)
                self._metrics.decided(exchange, self._policy_name)
        if not faults:
            return self._refuse(exchange, "no_workers", 503, "no engine is healthy; the router's /health says why")
        return self._failure(exchange, Outcome.FAILED, 502, "; then ".join(str(fault) for fault in faults))

    def _place(
        self, exchange: Exchange, request: RouteRequest, tried: frozenset[str], faults: list[UpstreamFault]
    ) -> Placement:
        placement = exchange.placement = self._dispatcher.place(request, tried)
        if faults:
            exchange.retries += 1
            self._metrics.retries.labels(faults[-1].fault.value).inc()
        else:  # once the request is on its way; callbacks keep the order of the placements
            asyncio.get_running_loop().call_soon(self._recorder.placed, exchange)
        return placement

    async def _attempt(
        self,
        request: web.Request,
        exchange: Exchange,
        placement: Placement,
        prompt: Prompt,
        headers: CIMultiDict[str],
    ) -> web.StreamResponse:
        url = self._urls[placement.worker, request.path]
        if request.query_string:
            url = url.with_query(request.query_string)
        seconds = self._config.timeouts.first_byte_seconds
        async with opened(self._session, url, headers, prompt.body, seconds) as opening:
            answer = exchange.watch = AnswerWatch()
            watch = answer.feed if opening.streamed else answer.whole
            watch(opening.first)
            suspicious = opening.response.status >= 500 or (answer.error is not None and not answer.content_seen)
            if suspicious and not await self._health.probe(placement.worker, self._session):
                raise UpstreamFault(Fault.UNHEALTHY, f"{placement.worker} failed and is not healthy")
            if opening.streamed:
                return await self._relay.stream(request, exchange, opening)
            return self._relay.whole(exchange, opening)

    def _compare_prediction(self, exchange: Exchange) -> None:
        if exchange.placement is not None and exchange.outcome is Outcome.COMPLETED:
            delivered = exchange.watch.cached_tokens
            exchange.prediction_cause = self._dispatcher.prediction_cause(exchange.placement, delivered)

    def _refuse(self, exchange: Exchange, reason: str, status: int, message: str) -> web.Response:
        """The router's own no."""
        self._metrics.refusals.labels(reason).inc()
        return self._failure(exchange, outcome_of_status(status), status, message)

    def _failure(self, exchange: Exchange, outcome: Outcome, status: int, message: str) -> web.Response:
        exchange.outcome, exchange.error = outcome, message
        headers = exchange.explanation(self._policy_name)
        return web.Response(
            status=status,
            body=error_body(message, f"router_{outcome.value}", status),
            content_type="application/json",
            headers=headers,
        )
