"""The prompt as the policy sees it where `routing_key` is set: without what changes from request to request.

Two requests that differ in a time stamp alone go to the same worker then. The engine still computes what was sent, so
only the choice of the worker changes: predictions, records and the body stay those of the prompt itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.kvcache.blocks import Hashes, Tokens
from prefixwatch.kvcache.prompts.mending import ChatPrompt, mended


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """What takes the place of a prompt's own in the policy's eyes."""

    tokens: Tokens
    blocks: Hashes
    text: str


def mended_chat(messages: Any, tools: Any, kinds: Sequence[str]) -> tuple[list[Any], Any] | None:
    """A chat without these kinds of differences; None for one of an unknown shape. What is given stays as it is."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    changed = mended(ChatPrompt(tuple(messages), tools), kinds)
    return [dict(message) for message in changed.messages], changed.tools


def mended_text(prompt: Any, kinds: Sequence[str]) -> str | None:
    """The same of a completion's prompt, by the kinds that apply to texts of users; None for one of token ids."""
    if not isinstance(prompt, str):
        return None
    (message,) = mended(ChatPrompt(({"role": "user", "content": prompt},)), kinds).messages
    return str(message["content"])
