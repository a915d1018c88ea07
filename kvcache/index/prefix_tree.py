"""The blocks of a fleet as a prefix tree: runs of blocks that no branch interrupts are one node.

A *node* is a longest run of blocks each of which is the only continuation of the one before; below it there is either
nothing (a leaf) or a branch point: two continuations or more. A node's level is the number of branch points above it.
Whatever begins differently (another first block, another tenant's salt) is another tree of the forest; the root above
all of them holds nothing and isn't a branch point.

Computed from a snapshot of `kvcache.index.block_table` in whole columns; 50,000 blocks take some ten milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixwatch.kvcache.index.block_table import TableSnapshot

Ints = npt.NDArray[np.int64]

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Columns of nodes, parents before children.

    A block that no worker holds any more, but that something cached continues, has its place in the tree and no part in
    any count. *Copied* tokens count as often as workers hold them.
    """

    version: int
    """The table's, when this was taken."""
    first_hash: npt.NDArray[np.uint64]
    """Chain hash of each node's first block."""
    salted: npt.NDArray[np.bool_]
    """Whether its blocks were stored under a salt."""
    parent: Ints
    """A node, or `NO_PARENT`."""
    children: Ints
    level: Ints
    start_tokens: Ints
    """Before the node's first block, whether or not they are still cached."""
    length_tokens: Ints
    """From the node's first block to its last, whether or not they are still cached."""
    blocks: Ints
    """Distinct blocks cached of the node itself."""
    tokens: Ints
    """Distinct tokens cached of the node itself."""
    copied_tokens: Ints
    tokens_below: Ints
    """As `tokens`, with everything below the node."""
    copied_tokens_below: Ints
    held_node: Ints
    """A (node, worker) pair each: nodes in ascending order."""
    held_worker: Ints
    held_blocks: Ints
    """How many of the node's blocks that worker holds."""
    workers: tuple[str, ...]
    replicas_of_block: Ints
    """Of every distinct block that is cached."""
    named: Mapping[int, int]
    """The nodes that hold the blocks which were asked for, by chain hash."""

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def height(self) -> int:
        """Branch points on the longest path."""
        return int(self.level.max(initial=0))

    def workers_of(self, node: int) -> Iterator[tuple[str, int]]:
        """Workers that hold blocks of this node itself, and how many."""
        first, end = np.searchsorted(self.held_node, [node, node + 1])
        for k in range(first, end):
            yield self.workers[self.held_worker[k]], int(self.held_blocks[k])

    def replicas(self) -> Ints:
        """Workers that hold blocks of each node itself."""
        return np.bincount(self.held_node, minlength=len(self))

    def largest(
        self, most: int, within: int = NO_PARENT, levels: int | None = None, by: Ints | None = None
    ) -> list[int]:
        """At most `most` nodes, those with most copied tokens below; parents always come with, and before, children.

        Only those at and below the node `within`, and at most `levels` levels below it. `by` is another measure
        that no child has more of than its parent.
        """
        chosen = np.arange(len(self)) if within == NO_PARENT else self._subtree(within)
        if levels is not None:
            chosen = chosen[self.level[chosen] <= levels + (0 if within == NO_PARENT else self.level[within])]
        measure = self.copied_tokens_below if by is None else by
        order = np.argsort(-measure[chosen], kind="stable")[:most]
        return [int(node) for node in chosen[order]]

    def _subtree(self, node: int) -> Ints:
        inside = np.zeros(len(self), dtype=bool)
        inside[node] = True
        for span in _spans(self.level):
            inside[span] |= inside[self.parent[span]]
        return np.flatnonzero(inside)

    def with_all_below(self, own: Ints) -> Ints:
        """By node, what it has itself and what all nodes below it have."""
        return _up(_spans(self.level), self.parent, own)

    def levels_of_leaves(self) -> Ints:
        return self.level.compress(self.children == 0)

    def fan_outs(self) -> Ints:
        """Continuations of each branch point."""
        return self.children.compress(self.children > 1)

    def hottest(self, most: int) -> list[int]:
        """Nodes above the fleet's branch points, those with most copied tokens below first: what prompts share."""
        shared = np.flatnonzero(self.children > 1)
        order = np.argsort(-self.copied_tokens_below[shared], kind="stable")[:most]
        return [int(node) for node in shared[order]]


def prefix_tree(snapshot: TableSnapshot, fingerprints: Iterable[int] = ()) -> PrefixTree:
    """The tree of these blocks; `fingerprints` are chain hashes of blocks to be found in it."""
    rows = snapshot.blocks
    used = np.flatnonzero(rows["children"] >= 0)
    parent = rows["parent"].astype(np.int64)
    above = parent[used]
    is_head = np.zeros(len(rows), dtype=bool)
    is_head[used] = (above < 0) | (rows["children"][above] > 1)
    head = _climb(used, parent, is_head)
    heads = used[is_head[used]]
    level = _levels(heads, parent, head)
    heads = heads[np.argsort(level[heads], kind="stable")]
    count = len(heads)
    node_of_row = np.full(len(rows), NO_PARENT)
    node_of_row[heads] = np.arange(count)
    node_of_row[used] = node_of_row[head[used]]
    own, size, replicas = node_of_row[used], rows["tokens"][used].astype(np.int64), rows["replicas"][used]
    node_parent = np.where(parent[heads] < 0, NO_PARENT, node_of_row[parent[heads]])
    tokens, copied = _total(own, size * (replicas > 0), count), _total(own, size * replicas, count)
    length = _total(own, size, count)
    spans = _spans(level[heads])
    return PrefixTree(
        version=snapshot.version,
        first_hash=rows["hash"][heads].copy(),
        salted=rows["hash"][heads] != rows["opening"][heads],
        parent=node_parent,
        children=np.bincount(node_parent[node_parent >= 0], minlength=count),
        level=level[heads],
        start_tokens=_down(spans, node_parent, length),
        length_tokens=length,
        blocks=_total(own, replicas > 0, count),
        tokens=tokens,
        copied_tokens=copied,
        tokens_below=_up(spans, node_parent, tokens),
        copied_tokens_below=_up(spans, node_parent, copied),
        **_holders(node_of_row, snapshot.rows_held),
        workers=tuple(snapshot.held),
        replicas_of_block=replicas[replicas > 0].astype(np.int64),
        named=_named(fingerprints, used, rows["hash"][used], node_of_row),
    )


def _total(node: Ints, weights: npt.NDArray[Any], count: int) -> Ints:
    return np.bincount(node, weights=weights, minlength=count).astype(np.int64)


def _named(
    fingerprints: Iterable[int], used: Ints, hashes: npt.NDArray[np.uint64], node_of_row: Ints
) -> dict[int, int]:
    wanted = np.fromiter(fingerprints, dtype=np.uint64)
    if not len(wanted) or not len(hashes):
        return {}
    order = np.argsort(hashes)
    place = np.minimum(np.searchsorted(hashes[order], wanted), len(hashes) - 1)
    at = order[place]
    there = hashes[at] == wanted
    return dict(zip(wanted[there].tolist(), node_of_row[used[at[there]]].tolist(), strict=True))


def _climb(used: Ints, parent: Ints, is_head: npt.NDArray[np.bool_]) -> Ints:
    """Each row's head: the first row of its run. Steps double, so a run of n blocks takes log2(n) of them."""
    head = np.arange(len(parent))
    inside = used[~is_head[used]]
    head[inside] = parent[inside]
    while len(inside):
        further = head[head[inside]]
        moved = further != head[inside]
        head[inside] = further
        inside = inside[moved]
    return head


def _levels(heads: Ints, parent: Ints, head: Ints) -> Ints:
    """By row, for heads: how many heads there are above. Steps double as in `_climb`."""
    level = np.zeros(len(parent), dtype=np.int64)
    up = np.arange(len(parent))
    active = heads[parent[heads] >= 0]
    up[active] = head[parent[active]]
    level[active] = 1
    while len(active):
        level_above, up_above = level[up[active]], up[up[active]]
        moved = up_above != up[active]
        level[active] += level_above
        up[active] = up_above
        active = active[moved]
    return level


def _spans(level: Ints) -> list[slice]:
    """Where each level but the topmost lies; nodes are in the order of their levels."""
    edges = np.searchsorted(level, np.arange(1, int(level.max(initial=0)) + 2)).tolist()
    return [slice(first, end) for first, end in pairwise(edges)]


def _down(spans: Sequence[slice], parent: Ints, length: Ints) -> Ints:
    """By node, the sum over the nodes above it."""
    start = np.zeros(len(parent), dtype=np.int64)
    for span in spans:
        start[span] = start[parent[span]] + length[parent[span]]
    return start


def _up(spans: Sequence[slice], parent: Ints, own: Ints) -> Ints:
    """By node, the sum over itself and the nodes below it."""
    below = own.copy()
    for span in reversed(spans):
        np.add.at(below, parent[span], below[span])
    return below


def _holders(node_of_row: Ints, rows_held: Mapping[str, npt.NDArray[np.int32]]) -> dict[str, Ints]:
    nodes, workers, counts = [], [], []
    for position, rows in enumerate(rows_held.values()):
        found, count = np.unique(node_of_row[rows], return_counts=True)
        nodes.append(found)
        counts.append(count)
        workers.append(np.full(len(found), position))
    if not nodes:
        return {name: np.zeros(0, dtype=np.int64) for name in ("held_node", "held_worker", "held_blocks")}
    node = np.concatenate(nodes)
    order = np.argsort(node, kind="stable")
    return {
        "held_node": node[order],
        "held_worker": np.concatenate(workers)[order],
        "held_blocks": np.concatenate(counts)[order],
    }
