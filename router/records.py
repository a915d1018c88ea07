"""From a finished exchange to its record: what the exporter learns of a request, and what stays here."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import time

from kvcache.pseudonyms import Pseudonyms
from kvcache.request_record import RequestRecord
from router.config import IsolationConfig, RouterConfig
from router.exchange import Exchange
from router.isolation import TenantMemory
from router.request_log import RequestLog

_CLASS_CHARACTERS, _MODEL_CHARACTERS = 64, 128
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Recorder:
    """Remembers what tenants send, and writes a record when an exchange ends.

    `cold_since_start` says whether all that a worker caches came through this router.
    """

    def __init__(
        self, config: RouterConfig, policy: str, log: RequestLog, cold_since_start: Callable[[str], bool]
    ) -> None:
        self.log = log
        self._policy = policy
        self._block_size = config.block_size
        self._known = config.tenants.known
        self._pseudonyms = Pseudonyms(config.request_records.hash_secret)
        self._memory = _memory(config.isolation, self._known)
        self._cold_since_start = cold_since_start

    def placed(self, exchange: Exchange) -> None:
        """The request is being sent, for the first time. No effect once it is over."""
        prompt, memory = exchange.prompt, self._memory
        if memory is None or prompt is None or exchange.ended_at is not None:
            return
        if prompt.tokens is None or prompt.batch or len(prompt.blocks) < len(prompt.tokens) // self._block_size:
            memory.sent_unread(exchange.tenant)
        else:
            exchange.sent = memory.sent(exchange.tenant, prompt.tokens, prompt.blocks, self._block_size)

    def ended(self, exchange: Exchange) -> None:
        """Write the record of a request that is over, whatever became of it."""
        prompt, placement, watch = exchange.prompt, exchange.placement, exchange.watch
        tokens = None if prompt is None or prompt.tokens is None else len(prompt.tokens)
        self.log.add(
            RequestRecord(
                ended_unix_seconds=time(),
                outcome=exchange.outcome.value,
                worker=placement.worker if placement else "",
                model=_shown(prompt.model, _MODEL_CHARACTERS) if prompt else "",
                tenant=self._pseudonyms.tenant(exchange.tenant, self._known),
                session=self._pseudonyms.session(exchange.session),
                request_class=_shown(exchange.request_class, _CLASS_CHARACTERS),
                policy=self._policy,
                reason=placement.reason if placement else "",
                retries=exchange.retries,
                salted=prompt.salted if prompt else None,
                prompt_tokens=tokens if watch.prompt_tokens is None else watch.prompt_tokens,
                cached_tokens=watch.cached_tokens,
                predicted_tokens=placement.predicted_tokens if placement else None,
                held_tokens=placement.held_tokens if placement else None,
                held_by=placement.held_by if placement else "",
                own_tokens=self._own_tokens(exchange),
                block_size=self._block_size,
                prompt_block=self._block(exchange, tokens),
                reused_block=self._block(exchange, watch.cached_tokens),
                output_tokens=watch.output_tokens,
                decision_seconds=exchange.decision_seconds,
                ttft_seconds=exchange.ttft_seconds,
                e2e_seconds=None if exchange.ended_at is None else exchange.ended_at - exchange.arrived_at,
                tpot_seconds=exchange.tpot_seconds,
                trace_id=exchange.trace_id,
            )
        )

    def _block(self, exchange: Exchange, tokens: int | None) -> int | None:
        """The last full block of so many tokens of the prompt; None where its blocks aren't known, or none is full."""
        blocks = exchange.prompt.blocks if exchange.prompt is not None else ()
        full = min((tokens or 0) // self._block_size, len(blocks))
        return int(blocks[full - 1]) if full else None

    def _own_tokens(self, exchange: Exchange) -> int | None:
        """What the tenant had sent; None at a worker whose cache may hold what was sent before this router's life, and
        where the engine counts other prompt tokens than the router, whose blocks then aren't the engine's."""
        sent, placement, watch = exchange.sent, exchange.placement, exchange.watch
        if sent is None or placement is None or self._memory is None:
            return None
        own_tokens = self._memory.answered(sent, watch.output_tokens, watch.cached_tokens)
        if watch.prompt_tokens is not None and watch.prompt_tokens != len(sent.tokens):
            self._memory.sent_unread(exchange.tenant)
            return None
        explained = watch.cached_tokens is not None and own_tokens is not None and watch.cached_tokens <= own_tokens
        return own_tokens if explained or self._cold_since_start(placement.worker) else None


def _shown(text: str, characters: int) -> str:
    """What a client wrote, no longer than this, and without what JSON can't hold: bytes that are no UTF-8."""
    return text[:characters].encode("utf-8", "replace").decode()


def trace_id_of(traceparent: str) -> str:
    """The trace id in a W3C `traceparent` header; empty when it isn't one."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    return found[1] if found else ""


def _memory(config: IsolationConfig, known: frozenset[str]) -> TenantMemory | None:
    return TenantMemory(config.blocks_per_tenant, config.tenants, known) if config.remember else None
