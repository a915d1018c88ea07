"""The life of one request: read, place, send, relay byte for byte, account for.

Until a byte has reached the client a failing engine costs one retry elsewhere; afterwards the stream ends with an
error event and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from prefixwatch.openai_api.answer import outcome_of_status
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.errors import BadRequest, error_body
from prefixwatch.router.exchange.endpoints import GENERATING, OPERATIONS, READ
from prefixwatch.router.exchange.exchange import Exchange, Outcome
from prefixwatch.router.exchange.prompt import Prompt, PromptReader, tokens_or_none
from prefixwatch.router.exchange.routing_key import RoutingKey
from prefixwatch.router.exchange.session_key import session_key
from prefixwatch.router.placement.dispatch import Dispatcher, Placement
from prefixwatch.router.placement.fair_share import FairShare
from prefixwatch.router.policy import NoWorkers, RouteRequest
from prefixwatch.router.records.metrics import RouterMetrics
from prefixwatch.router.records.recorder import Recorder, trace_id_of
from prefixwatch.router.serving.bodies import Bodies
from prefixwatch.router.serving.degraded import RESPOND_ASYNC, Degraded, preferences
from prefixwatch.router.serving.health import Fault, HealthMonitor
from prefixwatch.router.serving.identity import Identities
from prefixwatch.router.serving.models import ServedModels
from prefixwatch.router.serving.relay import Relay
from prefixwatch.router.serving.split import Split
from prefixwatch.router.serving.upstream import UpstreamFault, forward_headers, opened

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from prefixwatch.router.records.tracing import Tracing

EXPLAIN_HEADER = "x-prefixwatch-explain"
"""A request with the value 1 gets its decision's scores in the answer's headers."""
_RETRIES = 1
_INLINE_BODY_BYTES = 8192
"""Larger bodies are tokenised in a thread: about 2,000 tokens take longer than the hop costs."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """An attempt that failed before anything reached the client."""

    worker: str
    fault: Fault
    details: str


class Proxy:
    """Serves the completion endpoints."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        reader: PromptReader,
        dispatcher: Dispatcher,
        health: HealthMonitor,
        models: ServedModels,
        metrics: RouterMetrics,
        recorder: Recorder,
        session: aiohttp.ClientSession,
        tracing: Tracing | None = None,
        degraded: Degraded | None = None,
        identities: Identities | None = None,
        split: Split | None = None,
    ) -> None:
        self._split = split
        self._prefill_workers = config.prefill_workers
        self._identities = identities
        groups = config.identity.trust_groups
        self._session_header = "header" in config.session_keys
        self._session_keys = [key for key in config.session_keys if key != "header"]
        self._fair = FairShare(config.fairness) if config.fairness.cache_tokens is not None else None
        if self._fair is not None:
            metrics.watch_shares(self._fair)
        self._group_of = {tenant: group for group, tenants in groups.items() for tenant in tenants}
        self._config = config
        self._reader = reader
        self._dispatcher = dispatcher
        self._health = health
        self._models = models
        self._metrics = metrics
        self._recorder = recorder
        self._session = session
        self._tracing = tracing
        self._degraded = degraded
        self._policy_name = dispatcher.policy.label
        self._relay = Relay(dispatcher, config.timeouts.inter_token_seconds)
        needs = dispatcher.policy.needs
        self.wants_blocks = needs.cache_view or config.always_predict
        self._wants_tokens = needs.tokens or self.wants_blocks
        self._wants_text = needs.text
        self._bodies = Bodies(config.max_body_bytes, config.max_bodies_bytes)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._urls = {(worker.name, path): URL(worker.url + path) for worker in config.workers for path in OPERATIONS}
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        exchange = Exchange(
            id=headers.get("X-Request-Id") or f"pw-{next(self._numbers)}",
            path=request.path,
            arrived_at=perf_counter(),
            session=headers.get(self._config.tenants.session_header, "") if self._session_header else "",
            user=headers.get(self._config.tenants.user_header, ""),
            request_class=headers.get(self._config.tenants.class_header, ""),
            trace_id=trace_id_of(headers.get("traceparent", "")),
            explain=headers.get(EXPLAIN_HEADER) == "1",
        )
        span: Span | None = None
        try:
            try:
                self._identify(request, exchange)
                exchange.prompt = await self._read(request, exchange)
            except BadRequest as error:
                return self._refuse(exchange, error.reason, error.status, str(error))
            onward = forward_headers(headers)
            if self._identities is not None:
                onward = self._identities.onward(onward, exchange.tenant)
            if self._tracing is not None:
                span = self._tracing.begin(exchange, headers)
                onward.update(self._tracing.headers(span))
                exchange.trace_id = self._tracing.trace_id(span)
            return await self._serve(request, exchange, exchange.prompt, onward)
        except asyncio.CancelledError:
            exchange.client_left()
            raise
        finally:
            self._bodies.release(exchange.body_bytes)
            exchange.ended_at = perf_counter()
            if not exchange.deferred:
                self._ended(exchange)
            if span is not None and self._tracing is not None:
                self._tracing.finish(span, exchange, self._policy_name)

    def _ended(self, exchange: Exchange) -> None:
        self._compare_prediction(exchange)
        self._metrics.record(exchange, self._config.block_size)
        if exchange.asks_for_an_answer:
            self._recorder.ended(exchange)
        if self._degraded is not None:
            self._degraded.answered(exchange)

    def _identify(self, request: web.Request, exchange: Exchange) -> None:
        """Who asks, and with whom it may share. Raises BadRequest."""
        if self._identities is not None:
            exchange.tenant = self._identities.tenant(request)
        else:
            named = request.headers.getall(self._config.tenants.header, ("",))
            if len(named) > 1:
                raise BadRequest(f"more than one {self._config.tenants.header} header", "two_tenants")
            exchange.tenant = named[0]
        exchange.trust_group = self._group_of.get(exchange.tenant, "")

    async def _read(self, request: web.Request, exchange: Exchange) -> Prompt:
        body = await self._bodies.read(request, exchange)
        exchange.received_at = perf_counter()
        if self._session_keys and not exchange.session:
            exchange.session = session_key(self._session_keys, body, request.cookies, exchange.tenant)
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
        if (self._wants_tokens and prompt.tokens is None) or prompt.unread == "media":
            self._metrics.untokenized.labels(request.path, prompt.unread).inc()
        return prompt

    async def _serve(
        self, request: web.Request, exchange: Exchange, prompt: Prompt, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        prefer: frozenset[str] = frozenset()
        if self._degraded is not None:
            prefer = preferences(request.headers)
            self._degraded.resume(exchange, request.headers)
            exchange.prompt = prompt = self._degraded.for_smaller_model(exchange, prompt, prefer)
        if self._fair is not None and (wait := self._fair.wait_seconds(exchange.owner, perf_counter())):
            message = "this tenant has filled its share of the caches while others use them: send again later"
            refused = self._refuse(exchange, "tenant_share", 429, message)
            refused.headers["Retry-After"] = str(math.ceil(wait))
            return refused
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
            request_class=exchange.request_class,
        )
        if prompt.key is not None:
            route_request = _with_key(route_request, prompt.key)
        if self._degraded is not None and RESPOND_ASYNC in prefer:
            accepted = self._degraded.accepted(exchange, prompt, route_request, headers)
            if accepted is not None:
                return accepted
        faults: list[_Tried] = []
        while len(faults) <= _RETRIES:
            try:
                placement = self._place(exchange, route_request, faults)
            except NoWorkers:
                break
            try:
                await self._prefill(exchange, placement, prompt, headers)
                sent_at = self._health.clock()
                return await self._attempt(request, exchange, placement, prompt, headers)
            except UpstreamFault as fault:
                self._health.failed(placement.worker, fault.fault, str(fault))
                faults.append(_Tried(placement.worker, fault.fault, str(fault)))
            except TimeoutError:
                reason = f"no answer within {self._patience_seconds(prompt):g} s"
                replaceable = any(worker != placement.worker for worker in self._candidates(prompt.model))
                self._health.timed_out(placement.worker, sent_at, reason, replaceable=replaceable)
                faults.append(_Tried(placement.worker, Fault.SLOW, reason))
                if not prompt.stream:
                    break  # a client that waited that long for a whole answer won't wait as long again
            finally:
                self._dispatcher.end(placement)
                self._metrics.decided(exchange, self._policy_name)
        if not faults:
            return self._unplaced(exchange, prompt.model)
        silent = faults[-1].fault is Fault.SLOW
        outcome, status = (Outcome.TIMED_OUT, 504) if silent else (Outcome.FAILED, 502)
        shown = "; then ".join(f"engine {tried.worker} {tried.fault.shown}" for tried in faults)
        answer = self._failure(exchange, outcome, status, shown)
        exchange.error = "; then ".join(tried.details for tried in faults)  # for spans; clients must not see it
        return answer

    async def _prefill(
        self, exchange: Exchange, placement: Placement, prompt: Prompt, headers: CIMultiDict[str]
    ) -> None:
        """In a split fleet, have a prefill worker compute the prompt first where little of it is cached; once."""
        predicted = placement.predicted_tokens
        known = predicted is not None and exchange.asks_for_an_answer
        if self._split is None or not known or exchange.prefilled_by or exchange.split:
            return
        uncached = placement.request.prompt_tokens - (predicted or 0)
        serving = self._models.workers(prompt.model)
        where, worker = await self._split.prefill(exchange.path, prompt, headers, uncached, serving)
        self._metrics.split_prefills.labels(where.value).inc()
        exchange.split = f"{where.value}:{worker}" if worker else where.value

    def _candidates(self, model: str) -> list[str]:
        """The healthy workers that may serve the model."""
        serving = self._models.workers(model)
        return [
            name
            for name, up in self._health.up().items()
            if up and name not in self._prefill_workers and (serving is None or name in serving)
        ]

    def _patience_seconds(self, prompt: Prompt) -> float:
        timeouts = self._config.timeouts
        return timeouts.first_byte_seconds if prompt.stream else timeouts.answer_seconds

    def _unplaced(self, exchange: Exchange, model: str) -> web.Response:
        """No worker was asked: none is healthy, or none that is serves the model."""
        serving = self._models.workers(model)
        if serving is not None and not self._candidates(model):
            if not serving:
                message = f"no engine serves the model '{model[:100]}': use one of {', '.join(self._models.names())}"
                return self._refuse(exchange, "no_model", 404, message)
            return self._refuse(exchange, "no_workers", 503, f"no engine that serves '{model[:100]}' is healthy")
        return self._refuse(exchange, "no_workers", 503, "no engine is healthy; the router's /health says why")

    def _place(self, exchange: Exchange, request: RouteRequest, faults: Sequence[_Tried]) -> Placement:
        excluded = frozenset(tried.worker for tried in faults)
        if exchange.prefilled_by and not faults and self._health.is_up(exchange.prefilled_by):
            excluded = frozenset(worker.name for worker in self._config.workers) - {exchange.prefilled_by}
        placement = exchange.placement = self._dispatcher.place(request, excluded)
        if exchange.prompt is not None and exchange.prompt.batch:  # what is known is of its first prompt alone
            placement.predicted_tokens, placement.held_tokens, placement.held_by = None, None, ""
        exchange.expected_prefill_seconds = self._recorder.costs.expected_prefill_seconds(placement)
        if self._fair is not None and not faults:
            # An unread prompt counts by its size: a token is about four bytes.
            written = request.prompt_tokens - (placement.predicted_tokens or 0) or exchange.body_bytes // 4
            self._fair.wrote(exchange.owner, written, perf_counter())
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
        opening_answer = opened(
            self._session,
            url,
            headers,
            prompt.body,
            timeout_seconds=self._patience_seconds(prompt),
            opaque=request.path not in READ,
            other_usage=request.path in GENERATING,
        )
        async with opening_answer as opening:
            self._health.heard(placement.worker)
            answer = exchange.answer = opening.answer
            suspicious = answer.status >= 500 or (answer.error is not None and not answer.content)
            if suspicious and not await self._health.probe(placement.worker, self._session):
                raise UpstreamFault(Fault.UNHEALTHY, f"{placement.worker} failed and is not healthy")
            if answer.streamed:
                return await self._relay.stream(request, exchange, opening)
            return self._relay.whole(exchange, opening)

    def _compare_prediction(self, exchange: Exchange) -> None:
        if exchange.placement is not None and exchange.outcome is Outcome.COMPLETED:
            delivered = exchange.answer.usage.cached_tokens
            exchange.prediction_cause = self._dispatcher.prediction_cause(exchange.placement, delivered)
            self._learn(exchange, exchange.placement)

    def _learn(self, exchange: Exchange, placement: Placement) -> None:
        """What a streamed answer shows of its worker's hardware."""
        usage = exchange.answer.usage
        if exchange.first_content_at is None or exchange.last_chunk_at is None or exchange.retries:
            return
        elsewhere = exchange.computed_elsewhere or placement.decision.sends_blocks
        self._dispatcher.ledger.learn(
            placement.ticket,
            uncached_tokens=None if elsewhere else usage.uncached_tokens,
            first_token_at=exchange.first_content_at,
            output_tokens=usage.output_tokens,
            ended_at=exchange.last_chunk_at,
        )

    def _refuse(self, exchange: Exchange, reason: str, status: int, message: str) -> web.Response:
        """The router's own no."""
        self._metrics.refusals.labels(reason).inc()
        return self._failure(exchange, Outcome(outcome_of_status(status)), status, message)

    def _failure(self, exchange: Exchange, outcome: Outcome, status: int, message: str) -> web.Response:
        exchange.outcome, exchange.error = outcome, message
        headers = exchange.explanation(self._policy_name)
        return web.Response(
            status=status,
            body=error_body(message, f"router_{outcome.value}", status),
            content_type="application/json",
            headers=headers,
        )


def _with_key(request: RouteRequest, key: RoutingKey) -> RouteRequest:
    """The request, to be routed by this key."""
    seen = replace(request, prompt_tokens=len(key.tokens), tokens=key.tokens, blocks=key.blocks, text=key.text)
    return replace(request, key=seen)
