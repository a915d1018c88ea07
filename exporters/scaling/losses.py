"""What the fleet would lose with each worker: prefixes that only it holds, and who would take them over. Pure.

A prefix that another worker holds too is not lost. One that requests found cached of late, and nobody else holds, must
be computed once more:

    lost hit tokens = Σ its tokens       GPU seconds = lost hit tokens · seconds per token · GPUs per worker

Prefixes are the openings at the top of the prefix tree, with everything below them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefixwatch.exporters.caches.prefix_traffic import NodeTraffic
from prefixwatch.kvcache.index.prefix_tree import NO_PARENT, PrefixTree

TRAFFIC, CACHED = "traffic", "cached"


@dataclass(frozen=True, slots=True)
class PrefixLoss:
    """One opening at a worker: what of it only this worker holds, and where its requests would go."""

    root: int
    """Its node in the tree."""
    held_tokens: int
    lost_tokens: int
    holders: tuple[str, ...]
    """Other workers that hold some of it, the one with most first."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What would be lost with one worker."""

    worker: str
    cached_tokens: int
    lost_hit_tokens: int
    basis: str
    """`traffic`: of prefixes that requests found cached in the last minutes. `cached`: of all; traffic is unknown."""
    prefixes: Sequence[PrefixLoss]
    """Those that it holds most of first."""

    def gpu_seconds(self, seconds_per_token: float | None, gpus_per_worker: float) -> float | None:
        """To compute it again; None where the time of a token isn't known."""
        return None if seconds_per_token is None else self.lost_hit_tokens * seconds_per_token * gpus_per_worker


def losses(tree: PrefixTree, traffic: NodeTraffic | None, most_prefixes: int = 10) -> dict[str, Loss]:
    """By worker of the tree; data-parallel ranks of one worker (`name/rank`) count together."""
    caches = [name.partition("/")[0] for name in tree.workers]
    size = tree.tokens / np.maximum(tree.blocks, 1)
    tokens = (tree.held_blocks * size[tree.held_node]).astype(np.int64)
    wanted = np.ones(len(tree), dtype=bool) if traffic is None else traffic.reused > 0
    root = _roots(tree)
    held: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    lost: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    holders_of: defaultdict[int, set[str]] = defaultdict(set)
    pairs = list(zip(tree.held_node.tolist(), tree.held_worker.tolist(), tokens.tolist(), strict=True))
    for node, worker, _ in pairs:
        holders_of[node].add(caches[worker])
    for node, worker, count in pairs:
        name, top = caches[worker], int(root[node])
        held[name][top] += count
        if wanted[node] and len(holders_of[node]) == 1:
            lost[name][top] += count
    basis = CACHED if traffic is None else TRAFFIC
    return {
        name: Loss(
            name,
            sum(own.values()),
            sum(lost[name].values()),
            basis,
            [
                PrefixLoss(top, count, lost[name].get(top, 0), _others(held, name, top))
                for top, count in sorted(own.items(), key=lambda item: -item[1])[:most_prefixes]
            ],
        )
        for name, own in held.items()
    }


def absorber(prefix: PrefixLoss, loads: Mapping[str, float]) -> str | None:
    """Who gets the requests: the one that holds most of it, else the least loaded; None where nobody is left."""
    present = [name for name in prefix.holders if name in loads]
    return present[0] if present else min(loads, key=loads.__getitem__, default=None)


def _others(held: Mapping[str, Mapping[int, int]], name: str, top: int) -> tuple[str, ...]:
    found = [(own[top], other) for other, own in held.items() if other != name and top in own]
    return tuple(other for _, other in sorted(found, key=lambda item: (-item[0], item[1])))


def _roots(tree: PrefixTree) -> list[int]:
    """The top of each node's own tree; parents come before their children."""
    root: list[int] = []
    for node, parent in enumerate(tree.parent.tolist()):
        root.append(node if parent == NO_PARENT else root[parent])
    return root
