"""Which of a prompt's tokens are system prompt, tools, examples, documents or turns: the plan put them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefixwatch.loadgen.plan.prompts import Conversation, PromptWriter, Tools
from prefixwatch.loadgen.plan.request import TEMPLATE, PromptPart
from prefixwatch.loadgen.plan.sessions import DrawnRequest, Part

_CLASS_OF_KEY = {
    "prefix": "system",
    "tool": "tools",
    "shot": "examples",
    "profile": "profile",
    "document": "documents",
    "user": "turns",
    "answer": "turns",
    "prime": "turns",
    "front": "changing",
}
"""By the first word of the key that names a text."""


def prompt_parts(
    drawn: DrawnRequest, conversation: Conversation, tools: Tools, writer: PromptWriter
) -> tuple[PromptPart, ...]:
    """The prompt from its first token to its last, neighbours of one class joined."""
    texts: list[Sequence[Part]] = [parts for _, parts in drawn.said]
    texts = [drawn.opening, *texts] if writer.system_role else [(*drawn.opening, *texts[0]), *texts[1:]]
    texts += [(part,) for _, part in drawn.tools]
    return _joined(
        part
        for number, tokens in writer.layout(conversation, tools)
        for part in ([PromptPart(TEMPLATE, tokens)] if number is None else _classified(texts[number]))
    )


def _classified(parts: Sequence[Part]) -> list[PromptPart]:
    return [PromptPart(_CLASS_OF_KEY[str(part.key[0])], part.tokens) for part in parts]


def _joined(parts: Iterable[PromptPart]) -> tuple[PromptPart, ...]:
    joined: list[PromptPart] = []
    for part in parts:
        if joined and joined[-1].block_class == part.block_class:
            joined[-1] = PromptPart(part.block_class, joined[-1].tokens + part.tokens)
        elif part.tokens:
            joined.append(part)
    return tuple(joined)
