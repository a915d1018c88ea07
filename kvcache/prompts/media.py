"""Content without tokens of its own: images, audio, video, files, and parts of an unknown type.

An engine replaces such a part by placeholder tokens, whose number only it knows, and hashes the part's content into the
blocks that hold them. Here a part becomes two ids that no tokenizer has, made from a hash of its content, at its place
in the prompt. So everything that compares or hashes token ids (blocks, histories, trees, recordings) sees prompts with
different pictures differ from there on, and prompts with the same pictures agree.

What an engine caches behind the first such part can't be known exactly: `readable_tokens` says how far a prompt is.
A part counts as the same content if its JSON is the same: one picture under two URLs counts as two.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.blocks import SEED, Tokens, as_tokens

MEDIA_TOKEN = 2**31
"""Ids from here on stand for content; vocabularies are far smaller."""
TOKENS_PER_PART = 2

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the key that holds it."""

_NONCE = secrets.token_hex(8)
_MARK = re.compile(f"media{_NONCE}x([0-9a-f]{{16}})x")
_encode = msgspec.json.Encoder(order="deterministic").encode


def mark_of(part: Any) -> str:
    """A text that stands for a content part while a template renders it. Clients can't write one: it has a nonce."""
    return f"media{_NONCE}x{xxh3_64_intdigest(_encode(part), SEED):016x}x"


def is_text(piece: str) -> bool:
    """Whether a piece of a message is its text, not a mark."""
    return _MARK.fullmatch(piece) is None


def cut(text: str) -> list[str | Tokens]:
    """A rendered prompt as texts and, where a part was marked, the ids that stand for it."""
    pieces = _MARK.split(text)
    return [_ids(int(piece, 16)) if position % 2 else piece for position, piece in enumerate(pieces)]


def without_marks(text: str) -> str:
    """A rendered prompt as a person would read it."""
    return _MARK.sub("", text)


def readable_tokens(tokens: Tokens) -> int:
    """Tokens before the first part whose tokens only the engine knows; all of them where there is none."""
    media = tokens >= MEDIA_TOKEN
    return int(media.argmax()) if media.any() else len(tokens)


def has_media(messages: Iterable[Any]) -> bool:
    """Whether a conversation has parts that aren't text."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and str(part.get("type", "text")) not in TEXT_PARTS for part in parts)


def _ids(digest: int) -> Tokens:
    """60 bits of the digest, in a first and a second id that can't be taken for one another."""
    low, high = digest % 2**30, digest >> 30 & 2**30 - 1
    return as_tokens([MEDIA_TOKEN + low, MEDIA_TOKEN + 2**30 + high])
