"""How much of a row of prompts a cache of any size would have reused: one pass for all sizes.

Least-recently-used caches nest: what fits into one block less is always held by the larger one. So each block's *stack
distance*, the number of other blocks touched since it was last, says from which capacity on it is still there (Mattson
et al., IBM Systems Journal 9, 1970). A prefix cache reuses a block only if it holds all blocks before it too; what a
block needs is therefore the largest need among the blocks up to it. A prompt's blocks are touched from its end to its
start, as engines free them, so that the end is evicted first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixwatch.kvcache.blocks import Hashes, Tokens

Ints = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class ReuseProfile:
    """What prompts, in their order, reuse under any capacity."""

    reused_blocks: Ints
    """Leading blocks of each prompt that earlier ones had: what a cache without limit reuses."""
    needed_blocks: Ints
    """Capacity, in blocks, from which on each block that is reused at all is; ascending."""
    total_blocks: int

    def hit_blocks(self, capacity_blocks: int | None = None) -> int:
        """Blocks reused by a cache of this size; None: without limit."""
        if capacity_blocks is None:
            return len(self.needed_blocks)
        return int(np.searchsorted(self.needed_blocks, capacity_blocks, side="right"))

    def hit_ratio(self, capacity_blocks: int | None = None) -> float | None:
        """The same, as a share of all blocks; None of no block."""
        return self.hit_blocks(capacity_blocks) / self.total_blocks if self.total_blocks else None

    def capacity_for(self, share: float) -> int | None:
        """Smallest capacity that reuses this share of what a cache without limit does; None if that is nothing."""
        count = len(self.needed_blocks)
        return int(self.needed_blocks[min(count, max(1, int(np.ceil(share * count)))) - 1]) if count else None


def reuse_profile(prompts: Sequence[Hashes]) -> ReuseProfile:
    """The profile of prompts given by their chain hashes, in the order in which they come."""
    lengths = np.array([len(blocks) for blocks in prompts], dtype=np.int64)
    total = int(lengths.sum())
    if not total:
        return ReuseProfile(np.zeros(len(prompts), dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
    touched = np.concatenate([blocks[::-1] for blocks in prompts])
    before = _previous(touched)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    need = _needs(before, starts)
    reused: list[int] = []
    needed: list[Ints] = []
    end = 0
    for length in lengths.tolist():
        own = need[end : end + length][::-1]  # in the prompt's own order again
        end += length
        new = own == _NEVER
        depth = int(new.argmax()) if new.any() else length
        reused.append(depth)
        needed.append(np.maximum.accumulate(own[:depth]))
    return ReuseProfile(np.array(reused, dtype=np.int64), np.sort(np.concatenate(needed)), total)


def _previous(touched: Hashes) -> Ints:
    """For each touch the one before of the same block, -1 for a first one."""
    order = np.argsort(touched, kind="stable")
    same = touched[order][1:] == touched[order][:-1]
    before = np.full(len(touched), -1, dtype=np.int64)
    before[order[1:][same]] = order[:-1][same]
    return before


def _needs(before: Ints, starts: Ints) -> Ints:
    """Capacity that each touch needs to find its block, counted when its prompt arrives; `_NEVER` for a first touch.

    Of the touches before t, all up to p = before[t] have a `before` below p, and of those in between exactly the first
    touches since p have one. So the blocks touched since p are the earlier touches whose `before` is at most p, less
    p + 1; those of the prompt itself, which is looked up whole before it is touched, don't count.
    """
    count = len(before)
    earlier = _earlier_at_most(before)
    of_own_prompt = _earlier_at_most(before + starts * (count + 2)) - starts
    need = earlier - of_own_prompt - (before + 1) + 1
    return np.where(before < 0, _NEVER, need)


def _earlier_at_most(values: Ints) -> Ints:
    """For each value how many of those before it are at most as large; bottom-up merging, a level at a time."""
    count = len(values)
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.int64)  # ties: the earlier is less
    found = np.zeros(count, dtype=np.int64)
    position = np.arange(count, dtype=np.int64)
    width = 1
    while width < count:
        pair, right = position // (2 * width), (position // width) % 2 == 1
        keys = pair * count + ranks
        left_keys = np.sort(keys[~right])
        starts = np.searchsorted(left_keys, pair[right] * count)
        found[right] += np.searchsorted(left_keys, keys[right]) - starts
        width *= 2
    return found


class SeenOpenings:
    """What an infinite cache could reuse of each prompt, from the prompts alone and before any is sent.

    Prompts so far are kept in lexicographic order: the longest common opening is with a neighbour.
    """

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
