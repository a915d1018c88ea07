"""Conversations replayed with the answers that the engine gives in this run.

Text that an engine generated comes back as other tokens than it was generated as (kubernetes-sigs/inference-perf#649,
LT02): what a turn reuses is what the turn before *sent*, and the generated part is new. How many tokens that costs
against a cache which knew the text's own tokens is counted as retokenization loss, so that nobody looks for a fault in
the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gevent.event import Event

from prefixwatch.kvcache.blocks import Tokens
from prefixwatch.kvcache.reuse import common_tokens
from prefixwatch.loadgen.client.answer_reader import Exchange
from prefixwatch.loadgen.plan.request import Plan, PlannedRequest

_STOP_LOOK_SECONDS = 0.2


class TokenIds(Protocol):
    """Token ids of a conversation that offers these tools."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], /, *, tools: Any = None) -> Tokens: ...


@dataclass(slots=True)
class _Turn:
    ended: Event
    answer: str = ""
    prompt: Tokens | None = None
    output_tokens: int | None = None


class GeneratedAnswers:
    """The answers of a run so far, by session. `encode` gives the token ids of a conversation."""

    def __init__(self, plan: Plan, encode: TokenIds) -> None:
        self._encode = encode
        self._turns = {(r.session, r.turn): _Turn(Event()) for r in plan.requests if r.phase == "measured"}
        self.lost_tokens = 0
        """Tokens that later turns had to compute again although the engine had generated that very text."""

    def wait_for_turn(self, request: PlannedRequest, stop: Event) -> bool:
        """Until the turn before has ended, or `stop` is set; whether there was anything to wait for."""
        before = self._turns.get((request.session, request.turn - 1))
        if before is None or before.ended.is_set():
            return False
        while not before.ended.wait(_STOP_LOOK_SECONDS):
            if stop.is_set():
                break
        return True

    def filled_in(self, request: PlannedRequest) -> PlannedRequest:
        """The request with this run's answers instead of the planned ones, and its lengths counted again."""
        turn = 0
        messages = []
        for message in request.messages:
            if message["role"] == "assistant":
                own = self._turns.get((request.session, turn))
                turn += 1
                if own is not None and own.answer:
                    messages.append({**message, "content": own.answer})
                    continue
            messages.append(message)
        tokens = self._encode(messages, tools=request.tools)
        self._turns[request.session, request.turn].prompt = tokens
        before = self._turns.get((request.session, request.turn - 1))
        shared = min(request.shared_tokens, len(tokens))
        if before is not None and before.prompt is not None:
            shared = common_tokens(before.prompt, tokens)
            if before.output_tokens is not None:
                self.lost_tokens += max(0, len(before.prompt) + before.output_tokens - shared)
        return replace(request, messages=messages, prompt_tokens=len(tokens), shared_tokens=shared)

    def note(self, request: PlannedRequest, exchange: Exchange) -> None:
        """A request has ended, one way or the other."""
        turn = self._turns[request.session, request.turn]
        turn.answer = exchange.text
        turn.output_tokens = exchange.usage.output_tokens
        turn.ended.set()
