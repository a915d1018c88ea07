"""llm-d, approximate: a weighted sum of scorers over what this router sent where, block by block of text.

The prompt's bytes are cut into blocks of `block_bytes` (16 tokens of 4 characters), at most `max_blocks`; the short
last block counts too:

    h_0 = XXH64(model ‖ tenant)        h_k = XXH64(block_k ‖ h_{k−1} as LE8)

Each worker has an LRU of `lru_hashes` hashes, noted when the request leaves the router, heads first (so that heads
are evicted first). Match: walk until the first hash that nobody holds; a worker earns 1 for each hash that it
holds on the way, with or without those before it. `contiguous` stops a worker's count at its first gap.

    S_i = prefix_weight · matched_i / blocks + queue_weight · queue_i + kv_weight · (1 − KV usage_i)

with queue_i as in `llmd_precise`. Highest wins; ties uniformly random. A worker without a report counts as empty.

Defaults: block_bytes 64, max_blocks 256, lru_hashes 31250, contiguous false, prefix_weight 3, queue_weight 2,
kv_weight 2 (the optimized-baseline chart). The tenant stands where the source puts the cache salt. Where there is no
text (traces, prompts of token ids) the tokens' bytes stand for it, four a token: 16 tokens a block.

Known faults, kept: hashes without their predecessors are counted, which no engine can reuse; prompts that agree in
their first 16 KiB are one to it. Not modelled: sizing the LRU by the GPU blocks that a worker reports.

Source: llm-d `prefix-cache-scorer` (approximate) with the `queue` and `kv-cache-utilization` scorers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh64_intdigest

from prefixwatch.kvcache.blocks import as_tokens
from prefixwatch.router.policies.llmd.scorers import pick_max_score, weighted_scores
from prefixwatch.router.policies.shared.routed_hashes import RoutedHashes
from prefixwatch.router.policy import Decision, Fleet, Memory, Needs, Policy, RouteRequest, Worker, hit_reason

_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class LlmdApproxOptions:
    block_bytes: int = 64
    max_blocks: int = 256
    lru_hashes: int = 31_250
    contiguous: bool = False
    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0


class LlmdApprox(Policy):
    """Prefix by the router's own history, KV usage and queue length in a weighted sum."""

    name = "llmd_approx"
    source = "llm-d approximate prefix-cache profile"
    needs = Needs(text=True, engine_load=True)
    reasons = ("hit_deepest", "hit_sacrificed", "no_hit")
    Options = LlmdApproxOptions
    options: LlmdApproxOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self.sent = RoutedHashes()

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        chain = self._chain(request)
        matched = self._matched(chain, fleet.workers)
        scores = weighted_scores(
            fleet.workers,
            {name: count / len(chain) for name, count in matched.items()},
            prefix_weight=self.options.prefix_weight,
            queue_weight=self.options.queue_weight,
            kv_weight=self.options.kv_weight,
        )
        chosen = pick_max_score(scores, self.rng)
        most = max(matched.values(), default=0)
        reason = hit_reason(matched[chosen], most, "no_hit")
        tokens = matched[chosen] * self.options.block_bytes // _BYTES_PER_TOKEN
        return Decision(chosen, reason, min(tokens // request.block_size, len(request.blocks)), scores)

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.sent.store(worker, self._chain(request))
        self.sent.trim(worker, self.options.lru_hashes)

    def memory(self) -> Memory:
        return self.sent.memory()

    def on_worker_removed(self, worker: str) -> None:
        self.sent.forget(worker)

    def _chain(self, request: RouteRequest) -> list[int]:
        return text_chain(request, self.options.block_bytes, self.options.max_blocks)

    def _matched(self, chain: Sequence[int], workers: Sequence[Worker]) -> Counter[str]:
        """Hashes that each candidate is credited with."""
        candidates = {worker.name for worker in workers}
        matched: Counter[str] = Counter()
        for depth, value in enumerate(chain):
            holders = self.sent.holders(value)
            if not holders:
                break
            if self.options.contiguous:
                candidates = {name for name in candidates & holders if matched[name] == depth}
                matched.update(candidates)
            else:
                matched.update(candidates & holders)
        return matched


def text_chain(request: RouteRequest, block_bytes: int = 64, max_blocks: int = 256) -> list[int]:
    """The chained hashes of the prompt's text, or of its tokens' bytes where it has no text."""
    raw = request.text.encode("utf-8", "surrogatepass") or as_tokens(request.tokens).tobytes()
    chain, previous = [], xxh64_intdigest((request.model + request.tenant).encode("utf-8", "surrogatepass"))
    for start in range(0, min(len(raw), block_bytes * max_blocks), block_bytes):
        previous = xxh64_intdigest(raw[start : start + block_bytes] + previous.to_bytes(8, "little"))
        chain.append(previous)
    return chain
