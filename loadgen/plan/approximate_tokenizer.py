"""Prompts of about the right length for a target whose tokenizer nobody has: one token per common English word.

Most tokenizers have each of the words as one token, so a prompt is a few per cent off, plus the chat template. What
rests on exact lengths is left out of the grade of such a run; lengths are those that the answers report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from prefixwatch.kvcache.blocks import Tokens, as_tokens
from prefixwatch.kvcache.prompts.words import words
from prefixwatch.loadgen.plan.prompts import Alphabet, PromptError, checked_alphabet

_PIECE = re.compile(r"\s?\w+|[^\w\s]")
_UNKNOWN_FROM = 1 << 20
"""Ids of words outside the alphabet, by their hash."""


class ApproximateTokenizer:
    """Counts a word as a token. See `loadgen.plan.prompts.ChatTokenizer`."""

    def __init__(self) -> None:
        self._ids = {f" {word}": place + 1 for place, word in enumerate(words())}

    def encode(self, text: str) -> Tokens:
        """Ids of the words and punctuation marks of a text."""
        return as_tokens([self._ids.get(piece) or _UNKNOWN_FROM + crc32(piece.encode()) % _UNKNOWN_FROM
                          for piece in _PIECE.findall(text)])  # fmt: skip

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> Tokens:
        """Ids of the texts of a conversation, each behind its role. Raises PromptError for tools as a field."""
        if tools:
            raise PromptError("--approximate-prompts can't count tools that are sent as a field: give --model-dir")
        texts = [f"<{message['role']}>{message['content']}" for message in messages]
        return self.encode("".join(texts) + "<assistant>")

    def alphabet(self) -> Alphabet:
        """The common words."""
        return checked_alphabet(list(self._ids), list(self._ids.values()), self.encode)
