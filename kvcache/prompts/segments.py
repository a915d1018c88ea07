"""Encoded pieces of chat texts, kept: a system prompt that a thousand requests share is tokenised once.

A tokenizer cuts a text at its special tokens before it does anything else, so what stands between two of them
is encoded the same whatever surrounds it. A text is therefore cut in front of each special token and each
piece, with its leading special token, is looked up on its own.

What is kept answers sooner, and that can be timed: at 1,000 tokens by a millisecond. So pieces of one namespace (a
cache salt) are never found by another.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

import numpy as np
from tokenizers import Tokenizer

from prefixwatch.kvcache.blocks import Tokens, as_tokens

_ENTRY_OVERHEAD_BYTES = 300
_PROBED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens that are found in a text before anything else, and those of them that it may be cut at."""

    pattern: re.Pattern[str]
    cut_before: frozenset[str]


class SegmentCache:
    """Least recently used pieces and their token ids, up to `capacity_bytes`. Safe to share between threads."""

    def __init__(self, encode: Callable[[str], Tokens], added: AddedTokens, capacity_bytes: int) -> None:
        self._encode = encode
        self._added = added
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._kept: OrderedDict[tuple[str, str], Tokens] = OrderedDict()
        self._lock = Lock()
        self.hits = 0
        self.misses = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def encode(self, text: str, namespace: str = "") -> Tokens:
        """Token ids of the text, from pieces that the same namespace had encoded where there are any."""
        pieces = [self._piece(namespace, piece) for piece in self.cut(text)]
        return np.concatenate(pieces) if pieces else as_tokens([])

    def cut(self, text: str) -> list[str]:
        """The text's pieces: each but perhaps the first begins with a special token."""
        matches = self._added.pattern.finditer(text)
        edges = [0, *(match.start() for match in matches if match.group() in self._added.cut_before), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if a < b]

    def _piece(self, namespace: str, piece: str) -> Tokens:
        key = namespace, piece
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self.hits += 1
                self._kept.move_to_end(key)
                return found
        ids = self._encode(piece)
        cost = _cost_bytes(piece, ids)
        with self._lock:
            self.misses += 1
            if key not in self._kept and cost <= self._capacity_bytes:
                self._kept[key] = ids
                self._used_bytes += cost
            while self._used_bytes > self._capacity_bytes:
                (_, oldest), its_ids = self._kept.popitem(last=False)
                self._used_bytes -= _cost_bytes(oldest, its_ids)
        return ids


def segment_cache(tokenizer: Tokenizer, encode: Callable[[str], Tokens], capacity_bytes: int) -> SegmentCache | None:
    """A cache for this tokenizer, or None where there is nothing to cut at or cutting isn't exact.

    It is tried on texts around the tokenizer's own added tokens before it is trusted.
    """
    added = _added_tokens(tokenizer)
    if not added.cut_before or capacity_bytes <= 0:
        return None
    probe = SegmentCache(encode, added, capacity_bytes)
    if any(not np.array_equal(encode(text), probe.encode(text)) for text in _samples(tokenizer)):
        return None
    return SegmentCache(encode, added, capacity_bytes)


def _added_tokens(tokenizer: Tokenizer) -> AddedTokens:
    """Matching as tokenizers do it: leftmost first, then longest.

    Not cut at, but matched so that they win where the tokenizer lets them win: tokens that swallow the space
    before them, or that need a word's edge. Tokens looked for after normalisation come later, inside a piece.
    """
    tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    first = [token for token in tokens if not token.normalized]
    longest_first = sorted((token.content for token in first), key=len, reverse=True)
    safe = (token.content for token in first if token.special and not (token.lstrip or token.single_word))
    return AddedTokens(re.compile("|".join(map(re.escape, longest_first))), frozenset(safe))


def _samples(tokenizer: Tokenizer) -> list[str]:
    """Texts that show whether cutting changes anything: spaces, line ends and words on both sides of tokens."""
    specials = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.content][:_PROBED_TOKENS]
    around = ("word", " word ", "\n", "  ", "1234", "é…漢字", "'s", "")
    samples = ["".join(specials), " ".join(specials), "plain words, no special token"]
    for token in specials:
        samples += [f"{before}{token}{after}" for before in around for after in around]
    return samples


def _cost_bytes(piece: str, ids: Tokens) -> int:
    return 4 * len(piece) + ids.nbytes + _ENTRY_OVERHEAD_BYTES
