"""What remembering tenants' prompts costs a router, beside hashing them, and how much memory it takes.

    python -m benchmarks.tenant_memory [--tenants N] [--json]

Prompts of 32,768 tokens, 16 per block. *New*: nobody sent it before. *Again*: its tenant did. *Branch*: it leaves what
was sent after 16,384 tokens. *Full*: the memory must give up as much, and has long done so. The baseline, in the same
run on the same prompts, is the hash chain that routing needs anyway; beside it, hashing under a key
(`router.cache_view.hash_key`). CPU time, median of five rounds. Aim: 20 µs per request. Memory: tenants that each send
three prompts of 4,000 tokens, against the memory's bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from prefixwatch.kvcache.blocks import Hashes, Tokens, block_hashes
from prefixwatch.kvcache.index.keyed_blocks import BlockKey, names
from prefixwatch.kvcache.isolation_findings import IsolationWatch
from prefixwatch.kvcache.tenant_memory import TenantMemory

_TOKENS, _BLOCK, _PROMPTS, _ROUNDS = 32_768, 16, 100, 5
_BOUND_BLOCKS = 1_048_576


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time per request, and memory."""

    microseconds: dict[str, float]
    """By what is measured; the first is the baseline."""
    tenants: int
    remembered_blocks: int
    bound_blocks: int
    bytes_per_block: float


def measured(tenants: int) -> Cost:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 1 << 17, _TOKENS, dtype=np.uint32) for _ in range(_PROMPTS)]
    hashed = [block_hashes(prompt, _BLOCK) for prompt in prompts]
    branches = [np.concatenate([prompt[: _TOKENS // 2], prompt[::-1][: _TOKENS // 2]]) for prompt in prompts]
    turns = [np.concatenate([prompt[2048:], prompt[:2048]]) for prompt in prompts]
    turn_hashes = [block_hashes(turn, _BLOCK) for turn in turns]
    begun = [(turn[:-2048], blocks[: -2048 // _BLOCK]) for turn, blocks in zip(turns, turn_hashes, strict=True)]
    branch_hashes = [block_hashes(prompt, _BLOCK) for prompt in branches]
    key = BlockKey("a secret of the router's own index")
    root = key.root()
    rounds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        memory, watch = TenantMemory(_BOUND_BLOCKS, 100), IsolationWatch()
        filled = _filled(rng)

        def remember(number: int, tokens: Tokens, blocks: Hashes, memory: TenantMemory = memory) -> None:
            sent = memory.sent(f"t{number % 3}", tokens, blocks, _BLOCK)
            assert sent is not None
            memory.answered(sent, 10, 0)

        def replace(number: int, tokens: Tokens, blocks: Hashes, memory: TenantMemory = filled) -> None:
            remember(number, tokens, blocks, memory)

        def observe(number: int, tokens: Tokens, blocks: Hashes, watch: IsolationWatch = watch) -> None:
            watch.sent(f"r{number}", f"t{number % 3}", number % 3, tokens)

        def under_key(number: int, tokens: Tokens, blocks: Hashes) -> None:
            names(key.states(tokens, _BLOCK, root))

        rounds["hashing"].append(_microseconds(lambda n, tokens, blocks: block_hashes(tokens, _BLOCK), prompts, hashed))
        rounds["hashing under a key"].append(
            _microseconds(lambda n, tokens, blocks: names(key.states(tokens, _BLOCK, root)), prompts, hashed)
        )
        rounds["memory, new prompt"].append(_microseconds(remember, prompts, hashed))
        rounds["memory, prompt again"].append(_microseconds(remember, prompts, hashed))
        rounds["memory, branch"].append(_microseconds(remember, branches, branch_hashes))
        rounds["memory, new and full"].append(_microseconds(replace, prompts, hashed))
        for number, (tokens, blocks) in enumerate(begun):
            replace(number, tokens, blocks)
        rounds["memory, turn and full"].append(_microseconds(replace, turns, turn_hashes))
        rounds["isolation findings"].append(_microseconds(observe, prompts, hashed))
    remembered, size = _memory(tenants, rng)
    medians = {name: statistics.median(each) for name, each in rounds.items()}
    return Cost(medians, tenants, remembered, _BOUND_BLOCKS, size / remembered)


def _filled(rng: np.random.Generator) -> TenantMemory:
    """A memory that has as many blocks as it may, of prompts of this length, and gave up three times as many."""
    memory, nothing, blocks = TenantMemory(_BOUND_BLOCKS, 100), np.zeros(0, dtype=np.uint32), _TOKENS // _BLOCK
    for number in range(4 * _BOUND_BLOCKS // blocks):
        memory.sent(f"t{number % 3}", nothing, rng.integers(1, 2**64, blocks, dtype=np.uint64), _BLOCK)
    return memory


def _microseconds(do: Callable[[int, Tokens, Hashes], object], prompts: list[Tokens], hashed: list[Hashes]) -> float:
    begun = time.process_time()
    for number, (tokens, blocks) in enumerate(zip(prompts, hashed, strict=True)):
        do(number, tokens, blocks)
    return (time.process_time() - begun) / len(prompts) * 1e6


def _memory(tenants: int, rng: np.random.Generator) -> tuple[int, int]:
    """Blocks remembered, and bytes allocated for them."""
    tracemalloc.start()
    memory = TenantMemory(_BOUND_BLOCKS, tenants)
    nothing = np.zeros(0, dtype=np.uint32)
    for _ in range(3):
        for number in range(tenants):
            memory.sent(f"t{number}", nothing, rng.integers(1, 2**64, 250, dtype=np.uint64), _BLOCK)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return memory.blocks, size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cost = measured(options.tenants)
    if options.json:
        print(json.dumps(asdict(cost), indent=2))
        return
    baseline = cost.microseconds["hashing"]
    print(f"prompts of {_TOKENS:,} tokens, us per request, and relative to hashing them")
    for name, value in cost.microseconds.items():
        print(f"{name:>22} | {value:6.1f} | {value / baseline:5.2f}")
    print(
        f"{cost.tenants:,} tenants: {cost.remembered_blocks:,} of at most {cost.bound_blocks:,} blocks remembered, "
        f"{cost.bytes_per_block:.0f} bytes each, filters and ends included"
    )


if __name__ == "__main__":
    main()
