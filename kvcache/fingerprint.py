"""The fingerprint of a prompt's opening: the chain hash of the last block that it fills, whatever follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE, Tokens, block_hashes, namespace_root
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError

_CONTINUATIONS = ("Hello, can you help me?", "1234567890", "ärgerlich 漢字", "  zebra")
"""Texts that begin in different ways: a tokenizer may melt the opening's last characters with what follows."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`tokens` is how long the opening is, of which the first `blocks` blocks are the same in all prompts."""

    fingerprint: str
    """16 hex digits."""
    tokens: int
    blocks: int


def system_prompt_fingerprint(
    tokenizer: Tokenizer, system_prompt: str, block_size: int = DEFAULT_BLOCK_SIZE, salt: str | None = None
) -> Fingerprint:
    """Of all chats with this system prompt, as the model's chat template renders them. Raises TokenizerError."""

    def encode(text: str) -> Tokens:
        return tokenizer.encode_chat([{"role": "system", "content": system_prompt}, {"role": "user", "content": text}])

    return _fingerprint(encode, block_size, salt)


def text_fingerprint(
    tokenizer: Tokenizer, opening: str, block_size: int = DEFAULT_BLOCK_SIZE, salt: str | None = None
) -> Fingerprint:
    """Of all plain completions that begin with this text. Raises TokenizerError."""
    return _fingerprint(lambda text: tokenizer.encode(opening + text, add_special_tokens=True), block_size, salt)


def _fingerprint(encode: Callable[[str], Tokens], block_size: int, salt: str | None) -> Fingerprint:
    first, *others = map(encode, _CONTINUATIONS)
    shared = min(_common(first, other) for other in others)
    blocks = block_hashes(first[:shared], block_size, root=namespace_root(salt))
    if not len(blocks):
        raise TokenizerError(
            f"this opening has {shared} tokens, fewer than a block of {block_size}: only a longer one can be recognised"
        )
    return Fingerprint(f"{int(blocks[-1]):016x}", shared, len(blocks))


def _common(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
