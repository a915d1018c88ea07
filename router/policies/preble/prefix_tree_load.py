"""Preble's global prefix tree: which workers each stretch of prompt was sent to, and what it costs them.

Nodes are stretches of blocks (the source cuts at tokens), split where prompts part. A node is *large* when it is longer
than all before it; a request counts at the large node nearest to its leaf, for `WINDOW_SECONDS`. A worker's cost,
in seconds, is the sum over the counted nodes assigned to it of

    miss rate · requests · prefill_seconds(tokens, context) / workers of the node       (kept as prefill_seconds)
    + requests running there · output tokens                                            (kept as decode_tokens)

the miss rate being the share of the counted prompts' tokens that lay in their leaves. When the last request of a
node leaves the window the node belongs to no worker; nodes that no one came to for a window are dropped (the
source keeps them forever).

Source: WukLab/preble, `global_lru_cache.py` and `SlidingWindowHistogram`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MOST_BLOCKS = 4_000_000
WINDOW_SECONDS = 180.0


@dataclass(slots=True, eq=False)
class Count:
    """What the window knows of a large node."""

    node: Node
    requests: int = 0
    leaf_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Of the latest request."""
    first_tokens: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)
    """By worker: when a first token came, and after how many seconds."""

    @property
    def miss_ratio(self) -> float:
        return self.leaf_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True, eq=False)
class Node:
    """A stretch of blocks. `context_tokens` are those before it."""

    blocks: list[int]
    parent: Node | None
    context_tokens: int
    block_size: int
    used_at: float
    children: dict[int, Node] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)
    running: Counter[str] = field(default_factory=Counter)
    count: Count | None = None

    @property
    def tokens(self) -> int:
        return len(self.blocks) * self.block_size

    @property
    def large(self) -> bool:
        return self.tokens > self.context_tokens

    @property
    def chain(self) -> Iterator[Node]:
        """This node and those before it, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def counted_at(self) -> Node | None:
        """The large node that a request ending here counts at; None for a prompt of no whole block."""
        return next((node for node in self.chain if node.large), None)


@dataclass(slots=True)
class WorkerCost:
    """A worker's share of the window: all nodes, and those with at least two requests."""

    prefill_seconds: float = 0.0
    decode_tokens: float = 0.0
    shared_prefill_seconds: float = 0.0
    shared_decode_tokens: float = 0.0


class PrefixTreeLoad:
    """The tree, with every worker's cost kept up to date as it changes."""

    def __init__(self) -> None:
        self.root = Node([], None, 0, 0, 0.0)
        self.costs: dict[str, WorkerCost] = defaultdict(WorkerCost)
        self.counts: dict[Count, None] = {}
        self.blocks = 0
        """In all nodes."""
        self._entries: deque[tuple[float, Count, Node, int, int]] = deque()

    def insert(self, blocks: Sequence[int], block_size: int, now: float) -> Node:
        """The node that ends this prompt, made where it doesn't exist."""
        node, position = self.root, 0
        while position < len(blocks):
            child = node.children.get(blocks[position])
            if child is None:
                rest = list(blocks[position:])
                child = Node(rest, node, node.context_tokens + node.tokens, block_size, now)
                node.children[rest[0]] = child
                self.blocks += len(rest)
                return child
            common = _common(child.blocks, blocks, position)
            node = child if common == len(child.blocks) else self._split(child, common)
            node.used_at = now
            position += common
        return node

    def place(self, leaf: Node, worker: str, output_tokens: int, now: float) -> None:
        """A request for this leaf goes to this worker."""
        for node in leaf.chain:
            self._uncharge(node)
            node.workers.add(worker)
            node.running[worker] += 1
            self._charge(node)
        counted = leaf.counted_at
        if counted is not None:
            self._uncharge(counted)
            count = counted.count or Count(counted)
            counted.count = count
            self.counts[count] = None
            prompt_tokens = leaf.context_tokens + leaf.tokens
            count.requests += 1
            count.leaf_tokens += leaf.tokens
            count.prompt_tokens += prompt_tokens
            count.output_tokens = output_tokens
            self._entries.append((now, count, leaf, leaf.tokens, prompt_tokens))
            self._charge(counted)
        self.expire(now)

    def finish(self, leaf: Node, worker: str, now: float) -> None:
        """A request for this leaf has left this worker."""
        for node in leaf.chain:
            self._uncharge(node)
            node.running[worker] -= 1
            if node.running[worker] <= 0:
                del node.running[worker]
            self._charge(node)
        self._prune(leaf, now - WINDOW_SECONDS)

    def assign(self, node: Node, workers: set[str]) -> None:
        """From now on the node is at these workers."""
        self._uncharge(node)
        node.workers = workers
        self._charge(node)

    def assign_below(self, node: Node, worker: str) -> None:
        """The node and all that continues it are at this worker alone."""
        todo = [node]
        while todo:
            current = todo.pop()
            self.assign(current, {worker})
            todo.extend(current.children.values())

    def forget_worker(self, worker: str) -> None:
        """Nothing is at this worker any more; what was at no other is dropped."""
        for node in self.nodes():
            self._uncharge(node)
            node.workers.discard(worker)
            del node.running[worker]
            self._charge(node)
        for count in list(self.counts):
            count.first_tokens.pop(worker, None)
            if not count.node.workers:
                del self.counts[count]
                count.node.count = None
        self._entries = deque(entry for entry in self._entries if entry[1] in self.counts)
        for node in reversed(self.nodes()):
            if node.parent is not None and not (node.children or node.workers or node.running):
                del node.parent.children[node.blocks[0]]
                self.blocks -= len(node.blocks)
        self.costs.pop(worker, None)

    def nodes(self) -> list[Node]:
        """All nodes, each after its parent."""
        found = [self.root]
        for node in found:
            found.extend(node.children.values())
        return found

    def expire(self, now: float) -> None:
        """Let go of what has left the window, and earlier of the oldest while the tree exceeds MOST_BLOCKS."""
        while self._entries and (self._entries[0][0] < now - WINDOW_SECONDS or self.blocks > MOST_BLOCKS):
            _, count, leaf, leaf_tokens, prompt_tokens = self._entries.popleft()
            self._uncharge(count.node)
            count.requests -= 1
            count.leaf_tokens -= leaf_tokens
            count.prompt_tokens -= prompt_tokens
            if count.requests:
                self._charge(count.node)
            else:
                del self.counts[count]
                count.node.count = None
                count.node.workers = set()
            self._prune(leaf, math.inf if self.blocks > MOST_BLOCKS else now - WINDOW_SECONDS)

    def _prune(self, node: Node, before: float) -> None:
        """Drop a leaf that nobody came to since, and what is left bare above it."""
        while node.parent is not None:
            if node.parent.children.get(node.blocks[0]) is node:
                if node.children or node.running or node.count is not None or node.used_at >= before:
                    return
                del node.parent.children[node.blocks[0]]
                self.blocks -= len(node.blocks)
            node = node.parent

    def _split(self, child: Node, length: int) -> Node:
        """Cut a node after `length` blocks; returns the new upper part, which takes over where it is the large one."""
        assert child.parent is not None
        self._uncharge(child)
        upper = Node(child.blocks[:length], child.parent, child.context_tokens, child.block_size, child.used_at)
        upper.workers, upper.running = set(child.workers), Counter(child.running)
        child.parent.children[upper.blocks[0]] = upper
        child.blocks, child.parent = child.blocks[length:], upper
        child.context_tokens += upper.tokens
        upper.children[child.blocks[0]] = child
        if child.count is not None and upper.large and not child.large:
            upper.count, child.count = child.count, None
            upper.count.node = upper
        self._charge(upper)
        self._charge(child)
        return upper

    def _charge(self, node: Node, sign: int = 1) -> None:
        count = node.count
        if count is None or not node.workers:
            return
        prefill_seconds = sign * node_prefill_seconds(node)
        for worker in node.workers:
            decode_tokens = sign * node.running[worker] * count.output_tokens
            cost = self.costs[worker]
            cost.prefill_seconds += prefill_seconds
            cost.decode_tokens += decode_tokens
            if count.requests > 1:
                cost.shared_prefill_seconds += prefill_seconds
                cost.shared_decode_tokens += decode_tokens

    def _uncharge(self, node: Node) -> None:
        self._charge(node, -1)


def node_prefill_seconds(node: Node) -> float:
    """What one of its workers is charged for prefilling a counted node."""
    count = node.count
    if count is None or not node.workers:
        return 0.0
    seconds = prefill_seconds(node.tokens, node.context_tokens + node.tokens)
    return count.miss_ratio * count.requests * seconds / len(node.workers)


def prefill_seconds(tokens: int, context: int) -> float:
    """Preble's model of Mistral-7B on an A6000: `tokens` computed, `context` with all before them."""
    if tokens >= 384:
        linear_ms = 0.10842571 * tokens + 4.209777054806409
    elif tokens >= 192:
        linear_ms = -118 + 1.25 * tokens - 2.56e-3 * tokens**2
    else:
        linear_ms = 22.0
    attention_ms = 0.32
    if context > 1024:
        attention_ms = (1.86e-4 * context + 0.159) / (2 if tokens <= 1024 else 1)
    if tokens * context > 1024 * 1024:
        attention_ms += 1.13e-3 * tokens + 1.75e-3 * context + 2.19e-6 * tokens * context
    return (linear_ms + attention_ms) / 0.9 / 1000


def _common(stretch: Sequence[int], blocks: Sequence[int], position: int) -> int:
    """Blocks of the stretch that the prompt has from this position on."""
    for length, (ours, theirs) in enumerate(zip(stretch, blocks[position : position + len(stretch)], strict=False)):
        if ours != theirs:
            return length
    return min(len(stretch), len(blocks) - position)
