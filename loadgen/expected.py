"""What an infinite cache could reuse of each prompt, from the prompts alone and before any is sent."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from kvcache.token_arrays import Tokens


class SeenOpenings:
    """Prompts so far, kept in lexicographic order: the longest common opening is with a neighbour in it."""

    def __init__(self) -> None:
        self._prompts: list[bytes] = []

    def add(self, tokens: Tokens) -> int:
        """Length in tokens of the longest opening that an earlier prompt also has; then remember this one."""
        prompt = tokens.astype(">u4").tobytes()  # big-endian: bytes then sort as the tokens do
        place = bisect_left(self._prompts, prompt)
        shared = max((_common_tokens(prompt, near) for near in self._prompts[max(0, place - 1) : place + 1]), default=0)
        self._prompts.insert(place, prompt)
        return shared


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Length of the opening that two prompts have in common."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _common_tokens(a: bytes, b: bytes) -> int:
    return common_tokens(np.frombuffer(a, dtype=">u4"), np.frombuffer(b, dtype=">u4"))
