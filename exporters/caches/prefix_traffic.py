"""Which parts of the prefix tree requests ran through, and how far down they found it cached.

A request's record names two blocks: the last full one of its prompt and the last one that was reused
(`RequestRecord.prompt_block`, `.reused_block`). Counted by block here; the tree turns them into counts by node, for a
prompt runs through every node above its last block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from prometheus_client.core import Metric

from prefixwatch.exporters.requests.request import Request
from prefixwatch.kvcache.index.prefix_tree import PrefixTree

Ints = npt.NDArray[np.int64]

SPAN_SECONDS = 300.0
"""Traffic is that of one to two spans: the one that is running and the one before."""
MOST_BLOCKS = 50_000
"""Of one span and kind; blocks beyond it are not told apart and count as unplaced."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Requests by the block that they ended at, and by the block that their reuse ended at."""

    ended: Counter[int]
    reused: Counter[int]
    unread: int = 0
    """Requests whose blocks aren't known, or were too many to keep."""

    def __add__(self, other: BlockCounts) -> BlockCounts:
        return BlockCounts(self.ended + other.ended, self.reused + other.reused, self.unread + other.unread)

    @property
    def requests(self) -> int:
        return self.ended.total() + self.unread


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """The span that is running, and the one before."""

    number: int
    """Of the running span."""
    before: BlockCounts
    now: BlockCounts

    @property
    def both(self) -> BlockCounts:
        return self.before + self.now


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """By node of a tree: requests whose prompts ran through it, and those that found it (or its beginning) cached."""

    requests: Ints
    reused: Ints
    unplaced: int
    """Requests whose last block isn't in the tree now: evicted, of another block size, or unknown."""


class PrefixTraffic:
    """A part of the request ledger. Memory: some hundred bytes a distinct last block of two spans."""

    def __init__(self) -> None:
        self._before, self._now = _nothing(), _nothing()
        self._unread_before = self._unread_now = 0
        self._turned_at: float | None = None
        self._number = 0

    def record(self, request: Request) -> None:
        self._turn(request.at_seconds)
        record = request.record
        if not request.completed:
            return
        ended, reused = self._now
        if record.prompt_block is None or (len(ended) >= MOST_BLOCKS and record.prompt_block not in ended):
            self._unread_now += 1
            return
        ended[record.prompt_block] += 1
        if record.reused_block is not None and (len(reused) < MOST_BLOCKS or record.reused_block in reused):
            reused[record.reused_block] += 1

    def counts(self, now_seconds: float) -> SpanCounts:
        self._turn(now_seconds)
        before = BlockCounts(Counter(self._before[0]), Counter(self._before[1]), self._unread_before)
        now = BlockCounts(Counter(self._now[0]), Counter(self._now[1]), self._unread_now)
        return SpanCounts(self._number, before, now)

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        """None of its own: it goes into the prefix map."""
        yield from ()

    def _turn(self, now_seconds: float) -> None:
        if self._turned_at is None:
            self._turned_at = now_seconds
        spans = int((now_seconds - self._turned_at) // SPAN_SECONDS)
        if spans <= 0:
            return
        self._before, self._unread_before = (self._now, self._unread_now) if spans == 1 else (_nothing(), 0)
        self._now, self._unread_now = _nothing(), 0
        self._turned_at += spans * SPAN_SECONDS
        self._number += spans


def _nothing() -> tuple[Counter[int], Counter[int]]:
    return Counter(), Counter()


def node_traffic(tree: PrefixTree, counts: BlockCounts) -> NodeTraffic:
    """Bring counts by block into the tree; `tree.named` must hold the nodes of `counts`' blocks.

    A prompt whose last block is gone still ran through the block that its reuse ended at, so that one is used.
    """
    ended, reused = np.zeros(len(tree), dtype=np.int64), np.zeros(len(tree), dtype=np.int64)
    unplaced = counts.unread
    for block, requests in counts.reused.items():
        if (node := tree.named.get(block)) is not None:
            reused[node] += requests
    for block, requests in counts.ended.items():
        if (node := tree.named.get(block)) is not None:
            ended[node] += requests
        else:
            unplaced += requests
    through, found = tree.with_all_below(ended), tree.with_all_below(reused)
    return NodeTraffic(np.maximum(through, found), found, unplaced)
