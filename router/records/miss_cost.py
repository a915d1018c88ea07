"""What a miss costs, in three parts: Cost_miss = prefill + queue + migrate. They add up to the time to first token.

Engines don't say in their answers how long a request waited. So its prefill is what first tokens show that its uncached
tokens take, at most the time to first token; what a moved session's blocks take on their way is known from the price;
the rest is the queue. The line is that of the worker, or of all workers until this one has shown enough. A request that
was retried, or whose blocks were sent, teaches nothing; of one that a prefill worker had first nothing is known.
"""

from __future__ import annotations

from typing import NamedTuple

from prefixwatch.router.degradation.prediction import TtftLine
from prefixwatch.router.exchange.exchange import Exchange
from prefixwatch.router.placement.dispatch import Placement

_WORKERS = 10_000


class MissCost(NamedTuple):
    """Seconds; all None where one isn't known."""

    prefill_seconds: float | None = None
    queue_seconds: float | None = None
    migrate_seconds: float | None = None


UNKNOWN_COST = MissCost()


class MissCosts:
    """Learns from the first tokens of finished requests."""

    def __init__(self) -> None:
        self._all = TtftLine()
        self._of: dict[str, TtftLine] = {}

    def expected_prefill_seconds(self, placement: Placement) -> float | None:
        """What the prompt's tokens that aren't expected in the cache will take; None where that isn't known."""
        if placement.predicted_tokens is None or not placement.request.prompt_tokens:
            return None
        return self._seconds(placement.worker, placement.request.prompt_tokens - placement.predicted_tokens)

    def ended(self, exchange: Exchange) -> MissCost:
        """The cost of a request that is over, judged by those before it."""
        usage, placement, ttft = exchange.answer.usage, exchange.placement, exchange.ttft_seconds
        uncached = usage.uncached_tokens
        if placement is None or ttft is None or uncached is None or exchange.computed_elsewhere:
            return UNKNOWN_COST
        expected = self._seconds(placement.worker, uncached)
        if not exchange.retries and not placement.decision.sends_blocks:
            self._learn(placement.worker, placement.backlog_tokens + uncached, ttft)
        if expected is None:
            return UNKNOWN_COST
        prefill = min(ttft, expected)
        move = placement.decision.move
        sent = None if move is None else move.transfer_seconds
        migrate = min(ttft - prefill, sent or 0.0)
        return MissCost(prefill, ttft - prefill - migrate, migrate)

    def _seconds(self, worker: str, tokens: int) -> float | None:
        own = self._of.get(worker)
        seconds = None if own is None else own.seconds(tokens)
        return self._all.seconds(tokens) if seconds is None else seconds

    def _learn(self, worker: str, tokens: int, seconds: float) -> None:
        if worker not in self._of and len(self._of) < _WORKERS:
            self._of[worker] = TtftLine()
        for line in (self._all, self._of.get(worker)):
            if line is not None:
                line.add(tokens, seconds)
