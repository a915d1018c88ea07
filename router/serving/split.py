"""Prefill and decode apart: a prefill worker computes a long prompt before the worker that answers gets the request.

The prefill worker is asked for one token. Its engine's connector leaves the prompt's KV in a store; the answering
worker's engine finds it there by the prompt's tokens. Whatever goes wrong, the answering worker computes the prompt
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from enum import StrEnum
from time import perf_counter

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from prefixwatch.router.config import SplitConfig
from prefixwatch.router.exchange.prompt import Prompt
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.serving.degraded import one_token_body
from prefixwatch.router.serving.upstream import UpstreamFault, opened


class Prefilled(StrEnum):
    """Where a prompt was computed."""

    LOCAL = "local"
    """By the worker that answers: too little of it was uncached."""
    REMOTE = "remote"
    NO_WORKER = "no_worker"
    """By the worker that answers: no prefill worker was healthy."""
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
        is_up: Callable[[str], bool],
    ) -> None:
        """`url` is that of a worker's path."""
        self._config = config
        self._prefill_workers = prefill_workers
        self._ledger = ledger
        self._session = session
        self._url = url
        self._is_up = is_up

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
        worker = self._least_loaded(serving)
        if worker is None:
            return Prefilled.NO_WORKER, ""
        ticket = self._ledger.admit(worker, uncached_tokens, perf_counter())
        try:
            async with opened(
                self._session,
                self._url(worker, path),
                headers,
                one_token_body(prompt.body),
                timeout_seconds=self._config.timeout_seconds,
            ) as opening:
                return (Prefilled.REMOTE if opening.response.status == 200 else Prefilled.FAILED), worker
        except (UpstreamFault, TimeoutError):
            return Prefilled.FAILED, worker
        finally:
            self._ledger.end(ticket)

    def _least_loaded(self, serving: Container[str] | None) -> str | None:
        """The prefill worker with the fewest prompt tokens to compute, then the fewest requests."""
        able = [
            worker
            for worker in self._ledger.workers
            if worker.name in self._prefill_workers
            and self._is_up(worker.name)
            and (serving is None or worker.name in serving)
        ]
        best = min(able, key=lambda worker: (worker.prefill_tokens, worker.in_flight, worker.name), default=None)
        return None if best is None else best.name
