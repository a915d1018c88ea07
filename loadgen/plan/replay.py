"""A recording → requests to send: its own texts, or texts of the right length whose equal parts are equal.

Mooncake's block ids become words that depend on the id alone (and the run's nonce), so prompts share exactly the blocks
whose ids they share; what the chat template adds stands before the first block and comes off the end of the last.
Lengths without ids become prompts that share nothing. Recorded texts are sent as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prefixwatch.documents import DocumentError
from prefixwatch.kvcache.blocks import Tokens
from prefixwatch.kvcache.prompts.tokenizer import TokenizerError
from prefixwatch.loadgen.plan.prompts import PromptWriter, Words
from prefixwatch.loadgen.plan.request import PlannedRequest
from prefixwatch.loadgen.recordings.request import RecordedRequest, Recording
from prefixwatch.loadgen.scenario.model import Scenario, Tenant
from prefixwatch.loadgen.scenario.section import without_controls

DEFAULT_OUTPUT_TOKENS = 128
"""For a recorded request that says nothing of its answer's length."""


class ReplayWriter:
    """Writes a recording's requests for one run."""

    def __init__(self, writer: PromptWriter, *, seed: int, nonce: str, texts: bool = True) -> None:
        self._writer = writer
        self._texts = texts
        self._key = (nonce, seed)
        alone = [("user", writer.alphabet.draw(1, "overhead"))]
        self._overhead = len(writer.tokens(alone)) - 1
        self._head = writer.template_tokens(alone)

    def requests(
        self, recording: Recording, *, speed: float, until_s: float, scenario: Scenario
    ) -> Iterator[tuple[PlannedRequest, Tokens]]:
        """Each request due before `until_s` and its token ids, all but what depends on the prompts before it.

        Raises DocumentError for a request that has no time, or that the model's chat template refuses.
        """
        tenants = {tenant.name: tenant for tenant in scenario.tenants}
        turns: dict[str, int] = {}
        for number, recorded in enumerate(recording.requests):
            if recorded.arrival_s is None:
                raise DocumentError(f"{recorded.where}: has no time: add timestamp, in Unix seconds or ISO 8601")
            if recorded.arrival_s / speed >= until_s:
                return
            messages, tokens = self._prompt(number, recorded, recording.block_tokens)
            session = without_controls(recorded.session) or f"r{number}"
            turns[session] = turns.get(session, -1) + 1
            name = without_controls(recorded.tenant) or "-"
            tenant = tenants.get(name, Tenant(name=name))
            yield (
                PlannedRequest(
                    index=0,
                    phase="measured",
                    scheduled_s=recorded.arrival_s / speed,
                    tenant=tenant.name,
                    session=session,
                    turn=turns[session],
                    group="-",
                    request_class=tenant.request_class or scenario.request_class,
                    messages=messages,
                    max_tokens=recorded.output_tokens or DEFAULT_OUTPUT_TOKENS,
                    prompt_tokens=0,
                    shared_tokens=0,
                    salt=recorded.salt or tenant.salt,
                    headers=dict(tenant.headers),
                    priority=tenant.priority,
                    tools=recorded.tools,
                    tool_choice=recorded.tool_choice,
                    delay_seconds=recorded.delay_s,
                    template_tokens=0 if recorded.messages is not None else self._head,
                ),
                tokens,
            )

    def _prompt(
        self, number: int, recorded: RecordedRequest, block_tokens: int | None
    ) -> tuple[list[dict[str, Any]], Tokens]:
        if recorded.messages is not None:
            messages = [dict(message) for message in recorded.messages]
            try:
                return messages, self._writer.encode(messages, tools=recorded.tools)
            except TokenizerError as error:
                raise DocumentError(f"{recorded.where}: the model's chat template refuses it: {error}") from error
        conversation = [("user", self._words(number, recorded, block_tokens))]
        return self._writer.messages(conversation) if self._texts else [], self._writer.tokens(conversation)

    def _words(self, number: int, recorded: RecordedRequest, block_tokens: int | None) -> Words:
        """As many as make the prompt as long as recorded; at least one."""
        assert recorded.prompt_tokens is not None
        count = max(1, recorded.prompt_tokens - self._overhead)
        draw = self._writer.alphabet.draw
        if recorded.block_ids is None or block_tokens is None:
            return draw(count, *self._key, "recorded", number)
        return np.concatenate([draw(block_tokens, *self._key, "block", block) for block in recorded.block_ids])[:count]
