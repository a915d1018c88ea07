"""The two steps of the degradation chain that change what is sent: a smaller model, and asynchronous prefill.

A client accepts each by the header `Prefer` (RFC 7240). `Prefer: smaller-model` allows the answer of the model that
`degradation.smaller_models` names; the answer then has `Preference-Applied: smaller-model`. `Prefer: respond-async`
allows a 202 with the address to poll: the prompt is computed in the background at one worker, and the client sends the
request again, with the header `x-prefixwatch-prefill: ID`, once the poll says `ready`. That request goes to the same
worker, and its TTFT counts from when it was first asked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from prefixwatch.router.degradation.chain import Step
from prefixwatch.router.degradation.config import DegradationConfig
from prefixwatch.router.degradation.policy import DegradingPolicy
from prefixwatch.router.exchange.endpoints import READ
from prefixwatch.router.exchange.exchange import Exchange, Outcome
from prefixwatch.router.exchange.prompt import Prompt
from prefixwatch.router.placement.dispatch import Dispatcher
from prefixwatch.router.policy import NoWorkers, RouteRequest
from prefixwatch.router.serving.upstream import UpstreamFault, opened

PREFILL_HEADER = "x-prefixwatch-prefill"
PREFILLS = "/router/prefills"
SMALLER_MODEL, RESPOND_ASYNC = "smaller-model", "respond-async"
_POLL_SECONDS = "1"


@dataclass(slots=True)
class Prefill:
    """One asynchronous prefill."""

    tenant: str
    arrived_at: float
    status: str = "preparing"
    """Then `ready` or `failed`."""
    worker: str = ""
    ended_at: float | None = None


class Degraded:
    """Takes the steps that are in effect for a request's class, where its client accepts them."""

    def __init__(
        self,
        policy: DegradingPolicy,
        dispatcher: Dispatcher,
        session: aiohttp.ClientSession,
        *,
        url: Callable[[str, str], URL],
        waited: Callable[[str, float | None], None],
        timeout_seconds: float,
    ) -> None:
        """`waited` is called with the outcome of each prefill, and its seconds if it became ready."""
        self._policy = policy
        self._config: DegradationConfig = policy.config
        self._dispatcher = dispatcher
        self._session = session
        self._url = url
        self._waited = waited
        self._timeout_seconds = timeout_seconds
        self._prefills: dict[str, Prefill] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Give up what is in preparation."""
        for task in self._tasks:
            task.cancel()

    def resume(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """A request that was prefilled before goes where its prompt is, and has waited since it was first asked."""
        key = headers.get(PREFILL_HEADER, "")
        prefill = self._prefills.get(key)
        if prefill is not None and prefill.status == "ready" and prefill.tenant == exchange.tenant:
            del self._prefills[key]
            exchange.arrived_at, exchange.prefilled_by = prefill.arrived_at, prefill.worker

    def for_smaller_model(self, exchange: Exchange, prompt: Prompt, prefer: frozenset[str]) -> Prompt:
        """The request as it is sent: to the smaller model where that step is in effect and the client accepts it."""
        smaller = self._config.smaller_models.get(prompt.model)
        taken = self._policy.taken(exchange.request_class, Step.SMALLER_MODEL)
        if smaller is None or not taken or SMALLER_MODEL not in prefer:
            return prompt
        exchange.preference_applied = SMALLER_MODEL
        fields: dict[str, Any] = msgspec.json.decode(prompt.body)
        return replace(prompt, body=msgspec.json.encode({**fields, "model": smaller}), model=smaller)

    def accepted(
        self, exchange: Exchange, prompt: Prompt, request: RouteRequest, headers: CIMultiDict[str]
    ) -> web.Response | None:
        """The 202 for a miss whose client accepts it; None where the request is served at once."""
        if (
            exchange.prefilled_by
            or exchange.path not in READ
            or not self._policy.taken(exchange.request_class, Step.ASYNC_PREFILL)
            or not self._policy.is_miss(request, self._dispatcher.depths(request))
        ):
            return None
        self._forget_old()
        if len(self._prefills) >= self._config.async_pending:
            self._waited("full", None)
            return None
        key = secrets.token_urlsafe(16)
        prefill = self._prefills[key] = Prefill(exchange.tenant, exchange.arrived_at)
        task = asyncio.create_task(self._prefill(prefill, exchange, request, prompt, headers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.deferred = True
        exchange.preference_applied = RESPOND_ASYNC
        return self._shown(key, prefill, status=202)

    def poll(self, key: str) -> web.Response:
        """202 while in preparation, 200 afterwards, 404 for what isn't known (any more)."""
        self._forget_old()
        prefill = self._prefills.get(key)
        if prefill is None:
            return web.json_response({"status": "unknown", "do": "send the request again"}, status=404)
        return self._shown(key, prefill, status=202 if prefill.ended_at is None else 200)

    def answered(self, exchange: Exchange) -> None:
        """Learn whether an answer was completed: what a client that leaves or gets an error makes of it."""
        if exchange.ended_at is None or exchange.outcome is Outcome.REJECTED or not exchange.asks_for_an_answer:
            return
        own = self._policy.own(exchange.request_class)
        answers = own.smaller_completed if exchange.preference_applied == SMALLER_MODEL else own.completed
        answers.add(exchange.ended_at, float(exchange.outcome is Outcome.COMPLETED))

    def _shown(self, key: str, prefill: Prefill, status: int) -> web.Response:
        address = f"{PREFILLS}/{key}"
        headers = {"Location": address}
        document = {"status": prefill.status, "poll": address}
        if status == 202:
            headers |= {"Retry-After": _POLL_SECONDS, "Preference-Applied": RESPOND_ASYNC}
        elif prefill.status == "ready":
            document["do"] = f"send the request again with the header {PREFILL_HEADER}: {key}"
        else:
            document["do"] = "send the request again"
        return web.json_response(document, status=status, headers=headers)

    async def _prefill(
        self, prefill: Prefill, exchange: Exchange, request: RouteRequest, prompt: Prompt, headers: CIMultiDict[str]
    ) -> None:
        try:
            prefill.worker = await self._computed(exchange.path, request, prompt, headers)
            prefill.status = "ready"
        except (NoWorkers, UpstreamFault, TimeoutError):
            prefill.status = "failed"
        prefill.ended_at = perf_counter()
        waited = prefill.ended_at - prefill.arrived_at
        self._policy.own(exchange.request_class).waits.add(prefill.ended_at, waited)
        self._waited(prefill.status, waited if prefill.status == "ready" else None)

    async def _computed(self, path: str, request: RouteRequest, prompt: Prompt, headers: CIMultiDict[str]) -> str:
        """Have the prompt computed, with one token of answer; return the worker. Raises what an attempt raises."""
        placement = self._dispatcher.place(request)
        try:
            async with opened(
                self._session,
                self._url(placement.worker, path),
                headers,
                one_token_body(prompt.body),
                timeout_seconds=self._timeout_seconds,
            ) as opening:
                if opening.response.status != 200:
                    raise NoWorkers
                self._dispatcher.first_token(placement)
                return placement.worker
        finally:
            self._dispatcher.end(placement)

    def _forget_old(self) -> None:
        oldest = perf_counter() - self._config.async_kept_seconds
        for key in [
            key for key, each in self._prefills.items() if each.ended_at is not None and each.ended_at < oldest
        ]:
            del self._prefills[key]


def preferences(headers: CIMultiDict[str] | Any) -> frozenset[str]:
    """The names in a request's `Prefer` headers."""
    parts = ",".join(headers.getall("Prefer", ())).split(",")
    return frozenset(part.split(";")[0].strip().lower() for part in parts)


def one_token_body(body: bytes) -> bytes:
    """The same prompt with an answer of one token, not streamed."""
    fields: dict[str, Any] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    for name in ("stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "logprobs", "top_logprobs"):
        fields.pop(name, None)
    return msgspec.json.encode({**fields, "stream": False, "max_tokens": 1})
