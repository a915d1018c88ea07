"""Prefill and decode apart: a prefill worker computes a long prompt before the worker that answers gets the request.

The prefill worker is asked for one token. Its engine's connector leaves the prompt's KV in a store; the answering
worker's engine finds it there by the prompt's tokens. Whatever goes wrong, the answering worker computes the prompt
itself.

A prefill worker that fails is out until it is healthy, as any worker is (`router.serving.health`). When it lets a
prompt time out and answered none meanwhile, the others that wait there go on at once, and later it gets one at a time
until it answers one: its `/health` may be fine while its prompts hang. So a worker that hangs costs time until the
first time-out, and then one time-out per `health.silent_seconds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from enum import StrEnum
from time import perf_counter

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from prefixwatch.router.config import SplitConfig
from prefixwatch.router.exchange.prompt import Prompt
from prefixwatch.router.placement.ledger import Ledger, Ticket
from prefixwatch.router.serving.degraded import one_token_body
from prefixwatch.router.serving.health import Fault, HealthMonitor
from prefixwatch.router.serving.upstream import UpstreamFault, opened


class Prefilled(StrEnum):
    """Where a prompt was computed."""

    LOCAL = "local"
    """By the worker that answers: too little of it was uncached."""
    REMOTE = "remote"
    NO_WORKER = "no_worker"
    """By the worker that answers: no prefill worker was healthy, or one on trial had a prompt already."""
    FAILED = "failed"
    """By the worker that answers, after the prefill worker failed or took too long."""


class Split:
    """Sends prompts to prefill workers."""

    def __init__(
        self,
        config: SplitConfig,
        prefill_workers: Container[str],
        ledger: Ledger,
        session: aiohttp.ClientSession,
        *,
        url: Callable[[str, str], URL],
        health: HealthMonitor,
    ) -> None:
        """`url` is that of a worker's path."""
        self._config = config
        self._prefill_workers = prefill_workers
        self._ledger = ledger
        self._session = session
        self._url = url
        self._health = health
        self._waiting: dict[str, set[asyncio.Timeout]] = {}
        """By worker, what ends the wait of each prompt there."""

    async def prefill(
        self,
        path: str,
        prompt: Prompt,
        headers: CIMultiDict[str],
        uncached_tokens: int,
        serving: Container[str] | None,
    ) -> tuple[Prefilled, str]:
        """Have the prompt computed where that is worth it; says where, and by which prefill worker ("": by none).

        `serving` are the workers of the request's model; None: all.
        """
        if uncached_tokens < self._config.prefill_from_tokens:
            return Prefilled.LOCAL, ""
        worker = self.least_loaded(serving)
        if worker is None:
            return Prefilled.NO_WORKER, ""
        ticket = self._ledger.admit(worker, uncached_tokens, perf_counter())
        sent_at = self._health.clock()
        waiting = self._waiting.setdefault(worker, set())
        given_up = asyncio.timeout(None)
        try:
            async with given_up:
                waiting.add(given_up)
                try:
                    return await self._asked(ticket, path, prompt, headers), worker
                finally:
                    waiting.discard(given_up)
        except UpstreamFault as fault:
            self._health.failed(worker, fault.fault, str(fault))
        except TimeoutError:
            if not given_up.expired():
                self._timed_out(worker, sent_at)
        finally:
            self._ledger.end(ticket)
        return Prefilled.FAILED, worker

    def _timed_out(self, worker: str, sent_at: float) -> None:
        """A prompt that was sent then wasn't computed in time. Where the worker hangs, those behind it wait in vain."""
        self._health.timed_out(worker, sent_at, f"no prefill within {self._config.timeout_seconds:g} s")
        if worker in self._health.on_trial:
            for waiting in self._waiting.pop(worker, ()):
                waiting.reschedule(0.0)

    async def _asked(self, ticket: Ticket, path: str, prompt: Prompt, headers: CIMultiDict[str]) -> Prefilled:
        """The prefill worker's answer. Raises UpstreamFault or TimeoutError where there is none, and it is to blame."""
        worker = ticket.worker.name
        async with opened(
            self._session,
            self._url(worker, path),
            headers,
            one_token_body(prompt.body),
            timeout_seconds=self._config.timeout_seconds,
        ) as opening:
            answer, now = opening.answer, perf_counter()
            self._health.heard(worker)
            if answer.status >= 500 and not await self._health.probe(worker, self._session):
                raise UpstreamFault(Fault.UNHEALTHY, f"{worker} failed and is not healthy")
            if answer.status != 200:
                return Prefilled.FAILED
            uncached = answer.usage.uncached_tokens
            self._ledger.learn(ticket, uncached_tokens=uncached, first_token_at=now, output_tokens=None, ended_at=now)
            return Prefilled.REMOTE

    def least_loaded(self, serving: Container[str] | None) -> str | None:
        """The prefill worker with the fewest prompt tokens to compute, then the fewest requests; None: none may take
        a prompt."""
        able = [
            worker
            for worker in self._ledger.workers
            if worker.name in self._prefill_workers
            and self._health.is_up(worker.name)
            and not (worker.in_flight and worker.name in self._health.on_trial)
            and (serving is None or worker.name in serving)
        ]
        best = min(able, key=lambda worker: (worker.prefill_tokens, worker.in_flight, worker.name), default=None)
        return None if best is None else best.name
