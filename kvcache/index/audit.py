"""Is bisecting the block index right? A share of the lookups is done both ways, and disagreements are counted.

A worker that holds a block without all blocks before it has a *hole*: engines don't evict that way, but shared blocks,
sliding-window groups, moves to other tiers and lost events can leave one, and a bisection may then find too deep or too
shallow a prefix. An audited lookup answers what the exact walk found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from prefixwatch.kvcache.blocks import Hashes
from prefixwatch.kvcache.index.block_index import BlockIndex

DEFAULT_AUDIT_SHARE = 0.01

Lookup = Callable[[Hashes], dict[str, int]]
"""Leading blocks of a prompt by worker, as `BlockIndex.depths`."""


class IndexAudit:
    """Audits `share` of the lookups (0 … 1), drawn by `seed`. With `exact` every answer is the walk's."""

    def __init__(self, share: float = DEFAULT_AUDIT_SHARE, *, exact: bool = False, seed: int = 0) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"an audit's share of the lookups is 0 to 1, got {share}")
        self.share = share
        self.exact = exact
        self.audited_lookups = 0
        self.holes: Counter[str] = Counter()
        """Audited lookups, by worker, in which bisection and walk found different depths for it."""
        self._rng = random.Random(seed)

    def lookup(self, index: BlockIndex) -> Lookup:
        """How to look prompts up in this index; the index's own method where nothing is audited."""
        answer = index.depths_by_walk if self.exact else index.depths
        return partial(self._look, index, answer) if self.share else answer

    def _look(self, index: BlockIndex, answer: Lookup, blocks: Hashes) -> dict[str, int]:
        if self._rng.random() >= self.share:
            return answer(blocks)
        exact, bisected = index.depths_by_walk(blocks), index.depths(blocks)
        self.audited_lookups += 1
        if exact != bisected:
            self.holes.update(w for w in exact.keys() | bisected.keys() if exact.get(w) != bisected.get(w))
        return exact
