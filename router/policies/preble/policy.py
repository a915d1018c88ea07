"""Preble (E2): exploit a prefix where most of the prompt is known, else explore where the window's load is least.

The prompt is put into a tree of all prompts (`preble.prefix_tree_load`); its leaf is the part after the last branch.

1. Exploit, if the leaf is shorter than what lies before it: the workers of the nearest node, leaf upwards, that has
   any; of several the one with the least cost.
2. Explore otherwise: least cost of all workers. A prompt repeated word for word is its own leaf, so without a known
   opening it explores, as in the source.

    cost_i = window_i.prefill_seconds + window_i.decode_tokens · median TPOT_i      [s]; window 3 min
    + with `enable_eviction`: what is lost by making room for the leaf there, least used nodes first:
      Σ over large ones miss rate · requests · prefill time

   TPOT is the median of a worker's last 200, 0.15 s to begin with: from first token to end, over the request's output
   limit less one. Output length is that limit, 45 without one.
3. `enable_rebalancing`: from 50 requests a worker on, while the heaviest worker costs ≥ 1.5 × the lightest (only nodes
   with at least two requests counted), its cheapest large nodes move to the lightest, each with all that continues
   it, as long as that doesn't turn the two round. A lone node on the heaviest is copied to the lightest instead when
   its TTFT there, averaged over the second half of the window, is ≥ 2 × that of the first half. Then the same for
   the remaining workers. Skipped for a leaf 3 or more nodes below its large node.

Ties: the first minimum. Deterministic.

Defaults: enable_eviction off (as in the code; the paper has it) and takes memory as always full, enable_rebalancing on.

Fixed: the source's helper returns the position in the list of candidates, not the worker (F-18), so that exploiting
one of workers 2 and 3 went to 0 or 1. A worker that isn't a candidate is passed over.

Source: WukLab/preble, `global_scheduler_with_time.py`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.router.policies.preble.prefix_tree_load import (
    WINDOW_SECONDS,
    Node,
    PrefixTreeLoad,
    node_prefill_seconds,
    prefill_seconds,
)
from prefixwatch.router.policy import Decision, Fleet, Memory, Needs, Policy, RouteRequest

HIGH_LOAD_RATIO = 1.5
REBALANCE_AFTER_REQUESTS = 50
CHAIN_MAX = 3
OVERLOAD_RATIO = 2.0
INITIAL_TPOT_SECONDS, TPOT_SAMPLES = 0.15, 200
_BLOCK_BYTES = 60
"""A hash in a node's list, and its share of the node."""
DEFAULT_OUTPUT_TOKENS = 45


@dataclass(frozen=True, slots=True)
class PrebleOptions:
    enable_eviction: bool = False
    enable_rebalancing: bool = True


@dataclass(slots=True)
class _Running:
    leaf: Node
    worker: str
    admitted_at: float
    first_token_at: float | None = None


class Preble(Policy):
    """Exploit long known prefixes, explore otherwise, rebalance hot ones."""

    name = "preble"
    source = "WukLab/preble E2 (global_scheduler_with_time)"
    needs = Needs(tokens=True, cache_view=True)  # the view isn't asked, but blocks are made only for those who look
    reasons = ("exploit", "explore")
    deterministic = True
    Options = PrebleOptions
    options: PrebleOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._tree = PrefixTreeLoad()
        self._running: dict[RouteRequest, _Running] = {}
        self._tpot: dict[str, deque[float]] = {}
        self._placed: dict[str, int] = {}
        self._inserted: tuple[RouteRequest | None, Node] = (None, self._tree.root)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        now = fleet.now_seconds
        self._tree.expire(now)
        names = [worker.name for worker in fleet.workers]
        for name in names:
            self._placed.setdefault(name, 0)
        leaf = self._leaf(request, now)
        holders = _holders(leaf, names) if leaf.tokens < leaf.context_tokens else []
        candidates = holders or names
        costs = self._costs(leaf, candidates)
        chosen = min(costs, key=costs.__getitem__)
        held = _held_blocks(leaf, chosen)
        uncached_tokens = max(0, request.prompt_tokens - held * request.block_size)
        return Decision(
            chosen,
            "exploit" if holders else "explore",
            held,
            costs,
            predicted_prefill_seconds=prefill_seconds(uncached_tokens, request.prompt_tokens),
        )

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        leaf = self._leaf(request, now_seconds)
        self.on_end(request, worker, now_seconds)  # a retry starts again
        self._running[request] = _Running(leaf, worker, now_seconds)
        self._tree.place(leaf, worker, request.max_output_tokens or DEFAULT_OUTPUT_TOKENS, now_seconds)
        self._placed[worker] = self._placed.get(worker, 0) + 1
        counted = leaf.counted_at
        if self.options.enable_rebalancing and counted is not None and _steps(leaf, counted) < CHAIN_MAX:
            self._rebalance(now_seconds)

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        running = self._running.get(request)
        if running is None or running.worker != worker or running.first_token_at is not None:
            return
        running.first_token_at = now_seconds
        node = running.leaf.counted_at
        if node is not None and node.count is not None:
            times = node.count.first_tokens.setdefault(worker, deque())
            times.append((now_seconds, now_seconds - running.admitted_at))
            while times[0][0] < now_seconds - WINDOW_SECONDS:
                times.popleft()

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        running = self._running.get(request)
        if running is None or running.worker != worker:
            return
        del self._running[request]
        self._tree.finish(running.leaf, worker, now_seconds)
        steps = request.max_output_tokens - 1
        if running.first_token_at is not None and steps > 0:
            first = deque([INITIAL_TPOT_SECONDS], TPOT_SAMPLES)
            self._tpot.setdefault(worker, first).append((now_seconds - running.first_token_at) / steps)

    def memory(self) -> Memory:
        return Memory(self._tree.blocks, self._tree.blocks * _BLOCK_BYTES)

    def on_worker_removed(self, worker: str) -> None:
        self._running = {key: running for key, running in self._running.items() if running.worker != worker}
        self._tree.forget_worker(worker)
        self._tpot.pop(worker, None)
        self._placed.pop(worker, None)

    def _leaf(self, request: RouteRequest, now: float) -> Node:
        """The request's leaf; inserted once a decision."""
        if self._inserted[0] is not request:
            self._inserted = request, self._tree.insert(request.blocks.tolist(), request.block_size, now)
        return self._inserted[1]

    def _costs(self, leaf: Node, workers: Sequence[str]) -> dict[str, float]:
        costs = {}
        for worker in workers:
            load = self._tree.costs[worker]
            costs[worker] = load.prefill_seconds + load.decode_tokens * self._tpot_seconds(worker)
            if self.options.enable_eviction:
                costs[worker] += self._eviction_seconds(leaf, worker)
        return costs

    def _tpot_seconds(self, worker: str) -> float:
        samples = self._tpot.get(worker)
        return statistics.median(samples) if samples else INITIAL_TPOT_SECONDS

    def _eviction_seconds(self, leaf: Node, worker: str) -> float:
        """What is lost at a worker by making room for the leaf."""
        held = [n for n in self._tree.nodes() if n.parent is not None and n is not leaf and worker in n.workers]
        missing, lost_seconds = leaf.tokens, 0.0
        for node in sorted(held, key=lambda node: (node.running[worker], node.used_at, -node.context_tokens)):
            if missing <= 0:
                break
            missing -= node.tokens
            if node.large:
                count = node.count
                weight = count.miss_ratio * count.requests if count else float(node.running[worker])
                lost_seconds += weight * prefill_seconds(node.tokens, node.context_tokens + node.tokens)
        return lost_seconds

    def _rebalance(self, now: float) -> None:
        """Move or copy nodes from the heaviest to the lightest, then again among the rest."""
        if sum(self._placed.values()) < REBALANCE_AFTER_REQUESTS * len(self._placed):
            return
        costs = [(self._shared_cost(worker), worker) for worker in self._placed]
        costs.sort(key=lambda entry: -entry[0])
        while len(costs) > 1 and costs[0][0] >= HIGH_LOAD_RATIO * costs[-1][0]:
            (heavy_cost, heavy), (light_cost, light) = costs[0], costs[-1]
            nodes = sorted(self._movable(heavy), key=lambda entry: entry[0])
            if len(nodes) == 1:
                moved = self._replicate(*nodes[0], heavy, light, now)
            else:
                moved = self._steal(nodes, heavy_cost, light_cost, light)
            costs[-1] = light_cost + moved, light
            del costs[0]

    def _shared_cost(self, worker: str) -> float:
        load = self._tree.costs[worker]
        return load.shared_prefill_seconds + load.shared_decode_tokens * self._tpot_seconds(worker)

    def _movable(self, worker: str) -> list[tuple[float, Node]]:
        tpot = self._tpot_seconds(worker)
        return [
            (node_prefill_seconds(count.node) + count.node.running[worker] * count.output_tokens * tpot, count.node)
            for count in self._tree.counts
            if count.requests > 1 and count.node.large and worker in count.node.workers
        ]

    def _steal(self, nodes: Sequence[tuple[float, Node]], heavy_cost: float, light_cost: float, light: str) -> float:
        moved = 0.0
        for cost, node in nodes:
            if heavy_cost - moved - cost < light_cost + moved + cost:
                break
            moved += cost
            self._tree.assign_below(node, light)
            if heavy_cost - moved < HIGH_LOAD_RATIO * (light_cost + moved):
                break
        return moved

    def _replicate(self, cost: float, node: Node, heavy: str, light: str, now: float) -> float:
        assert node.count is not None
        if light in node.workers or not _overloaded(node.count.first_tokens.get(heavy, ()), now):
            return 0.0
        self._tree.assign(node, node.workers | {light})
        del node.count.first_tokens[heavy]
        return cost / 2


def _overloaded(first_tokens: Iterable[tuple[float, float]], now: float) -> bool:
    """Whether time to first token has doubled between the halves of the window."""
    halves: tuple[list[float], list[float]] = ([], [])
    for at, seconds in first_tokens:
        halves[at >= now - WINDOW_SECONDS / 2].append(seconds)
    if not halves[0] or not halves[1]:
        return False
    return statistics.fmean(halves[1]) >= OVERLOAD_RATIO * statistics.fmean(halves[0])


def _holders(leaf: Node, names: Sequence[str]) -> list[str]:
    """The candidates among the workers of the nearest node that has any candidate, in the fleet's order."""
    for node in leaf.chain:
        found = [name for name in names if name in node.workers]
        if found:
            return found
    return []


def _held_blocks(leaf: Node, worker: str) -> int:
    """Leading blocks of the prompt that were sent to this worker before."""
    for node in leaf.chain:
        if node.parent is not None and worker in node.workers:
            return (node.context_tokens + node.tokens) // node.block_size
    return 0


def _steps(leaf: Node, ancestor: Node) -> int:
    return next(steps for steps, node in enumerate(leaf.chain) if node is ancestor)
