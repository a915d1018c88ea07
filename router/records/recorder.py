"""From a finished exchange to its record: what the exporter learns of a request, and what stays here."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import time

from prefixwatch.kvcache.isolation_findings import Finding, IsolationWatch
from prefixwatch.kvcache.prompts.media import readable_tokens
from prefixwatch.kvcache.request_record import Pseudonyms, RequestRecord, mark_depths
from prefixwatch.kvcache.tenant_memory import TenantMemory
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.exchange.exchange import GROUP, Exchange
from prefixwatch.router.policy import NO_TOKENS
from prefixwatch.router.records.miss_cost import MissCosts
from prefixwatch.router.records.request_log import RequestLog
from prefixwatch.router.tenant_config import IsolationConfig

_CLASS_CHARACTERS, _MODEL_CHARACTERS, _ID_CHARACTERS = 64, 128, 64
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
        self._places = {worker.name: worker.place for worker in config.workers}
        self._pseudonyms = Pseudonyms(config.request_records.hash_secret)
        self._names_blocks = config.cache_view.hash_key is None
        """Hashes under a key of the router's own can't be compared with anybody else's."""
        self._memory = _memory(config.isolation, self._known)
        self._watch = IsolationWatch(config.isolation.tenants)
        self._cold_since_start = cold_since_start
        self.costs = MissCosts()

    def placed(self, exchange: Exchange) -> None:
        """The request is being sent, for the first time. No effect once it is over."""
        prompt, memory = exchange.prompt, self._memory
        if memory is None or prompt is None or exchange.ended_at is not None:
            return
        if prompt.tokens is None or prompt.batch or len(prompt.blocks) < len(prompt.tokens) // self._block_size:
            memory.sent_unread(exchange.owner)
            tokens = NO_TOKENS
        else:
            exchange.sent = memory.sent(exchange.owner, prompt.tokens, prompt.blocks, self._block_size)
            tokens = prompt.tokens
        if exchange.asks_for_an_answer:
            request = _shown(exchange.id, _ID_CHARACTERS)
            exchange.opening, exchange.finding = self._watch.sent(request, exchange.owner, prompt.salt_root, tokens)

    def ended(self, exchange: Exchange) -> None:
        """Write the record of a request that is over, whatever became of it."""
        prompt, placement, usage = exchange.prompt, exchange.placement, exchange.answer.usage
        ids = None if prompt is None or prompt.batch else prompt.tokens
        tokens = None if ids is None else len(ids)
        own_tokens = self._own_tokens(exchange)
        finding = self._finding(exchange, own_tokens)
        cost = self.costs.ended(exchange)
        move = placement.decision.move if placement else None
        self.log.add(
            RequestRecord(
                ended_unix_seconds=time(),
                outcome=exchange.outcome.value,
                worker=placement.worker if placement else "",
                **(self._places.get(placement.worker, {}) if placement else {}),
                model=_shown(prompt.model, _MODEL_CHARACTERS) if prompt else "",
                tenant=self._pseudonyms.tenant(exchange.tenant, self._known),
                trust_group=exchange.trust_group,
                session=self._pseudonyms.session(exchange.session),
                user=self._pseudonyms.user(exchange.user),
                request_class=_shown(exchange.request_class, _CLASS_CHARACTERS),
                policy=self._policy,
                reason=placement.reason if placement else "",
                retries=exchange.retries,
                salted=prompt.salted if prompt else None,
                prompt_tokens=tokens if usage.prompt_tokens is None else usage.prompt_tokens,
                counted_tokens=None if usage.prompt_tokens is None else tokens,
                cached_tokens=usage.cached_tokens,
                predicted_tokens=placement.predicted_tokens if placement else None,
                held_tokens=placement.held_tokens if placement else None,
                held_by=placement.held_by if placement else "",
                reusable_tokens=reusable_tokens(exchange),
                own_tokens=own_tokens,
                finding=finding.kind.value if finding else "",
                finding_tenant=self._other(finding.other_tenant) if finding else "",
                finding_requests=finding.evidence if finding else (),
                opening_sent_by=exchange.opening.sent_by if exchange.opening else "",
                block_size=self._block_size,
                prompt_block=self._block(exchange, tokens),
                reused_block=self._block(exchange, usage.cached_tokens),
                marks=self._marks(exchange, tokens),
                output_tokens=usage.output_tokens,
                decision_seconds=exchange.decision_seconds,
                ttft_seconds=exchange.ttft_seconds,
                e2e_seconds=None if exchange.ended_at is None else exchange.ended_at - exchange.arrived_at,
                tpot_seconds=exchange.tpot_seconds,
                miss_prefill_seconds=cost.prefill_seconds,
                miss_queue_seconds=cost.queue_seconds,
                miss_migrate_seconds=cost.migrate_seconds,
                move=move.kind if move else "",
                move_why=move.why if move else "",
                move_trigger=move.trigger if move else "",
                move_soft_seconds=move.soft_seconds if move else None,
                move_hard_seconds=move.hard_seconds if move else None,
                trace_id=exchange.trace_id,
                request=_shown(exchange.id, _ID_CHARACTERS),
            )
        )

    def _finding(self, exchange: Exchange, own_tokens: int | None) -> Finding | None:
        """What the reuse of its prompt shows, or else its salt."""
        cached = exchange.answer.usage.cached_tokens
        reuse = None
        if exchange.opening is not None:
            reuse = self._watch.answered(exchange.opening, cached, own_tokens, self._block_size)
        return reuse or exchange.finding

    def _other(self, owner: str) -> str:
        """Another tenant or trust group, as records name it."""
        if owner.startswith(GROUP):
            return f"group {owner.removeprefix(GROUP)}"
        return self._pseudonyms.tenant(owner, self._known)

    def _block(self, exchange: Exchange, tokens: int | None) -> int | None:
        """The last full block of the prompt's first `tokens`; None where its blocks aren't known, or none is full."""
        prompt = exchange.prompt
        blocks = prompt.blocks if prompt is not None and not prompt.batch and self._names_blocks else ()
        full = min((tokens or 0) // self._block_size, len(blocks))
        return int(blocks[full - 1]) if full else None

    def _marks(self, exchange: Exchange, tokens: int | None) -> tuple[int, ...]:
        """Hashes by which another router's records can be compared; none where tenants aren't remembered."""
        if exchange.sent is None or exchange.prompt is None or not self._names_blocks:
            return ()
        blocks = exchange.prompt.blocks
        full = min((tokens or 0) // self._block_size, len(blocks))
        return tuple(int(blocks[depth - 1]) & 0xFFFFFFFF for depth in mark_depths(full))

    def _own_tokens(self, exchange: Exchange) -> int | None:
        """What the tenant had sent; None at a worker whose cache may hold what was sent before this router's life, and
        where the engine counts other prompt tokens than the router, whose blocks then aren't the engine's."""
        sent, placement, usage = exchange.sent, exchange.placement, exchange.answer.usage
        if sent is None or placement is None or self._memory is None:
            return None
        own_tokens = self._memory.answered(sent, usage.output_tokens, usage.cached_tokens)
        if readable_tokens(sent.tokens) < len(sent.tokens):
            return None  # the engine counts the tokens of images, which nobody knows here
        if usage.prompt_tokens is not None and usage.prompt_tokens != len(sent.tokens):
            self._memory.sent_unread(exchange.owner)
            return None
        explained = usage.cached_tokens is not None and own_tokens is not None and usage.cached_tokens <= own_tokens
        return own_tokens if explained or self._cold_since_start(placement.worker) else None


def reusable_tokens(exchange: Exchange) -> int | None:
    """The opening of the prompt that could have been reused; None when nobody looked."""
    sent, placement = exchange.sent, exchange.placement
    known = (
        None if sent is None else sent.depth * sent.block_size,
        None if placement is None else placement.held_tokens,
    )
    return max((tokens for tokens in known if tokens is not None), default=None)


def _shown(text: str, characters: int) -> str:
    """What a client wrote, no longer than this, and without what JSON can't hold: bytes that are no UTF-8."""
    return text[:characters].encode("utf-8", "replace").decode()


def trace_id_of(traceparent: str) -> str:
    """The trace id in a W3C `traceparent` header; empty when it isn't one."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    return found[1] if found else ""


def _memory(config: IsolationConfig, known: frozenset[str]) -> TenantMemory | None:
    return TenantMemory(config.blocks, config.tenants, known) if config.remember else None
