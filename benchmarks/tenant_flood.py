"""What a flood of one tenant costs another's prefix hits, with and without fair shares.

    python -m benchmarks.tenant_flood [--json]

One simulated engine's cache of 65,536 tokens (`engines.model.block_pool`, LRU as vLLM's), in virtual time. The victim
holds eight conversations over a system prompt of 2,000 tokens and asks every 2 s. The flood sends 20 unique prompts of
1,000 tokens per second. The baseline, in the same run, is the victim without a flood.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np

from prefixwatch.engines.model.block_pool import BlockPool
from prefixwatch.kvcache.blocks import Hashes, block_hashes
from prefixwatch.router.placement.fair_share import FairShare
from prefixwatch.router.tenant_config import FairnessConfig

_CACHE_TOKENS, _BLOCK, _SECONDS = 65_536, 16, 600
_FLOOD_PER_SECOND = 20


@dataclass(frozen=True, slots=True)
class Flood:
    """What the victim got, and what was refused."""

    prompt_tokens: int
    hit_tokens: int
    victim_refused: int
    flood_served: int
    flood_refused: int


def flooded(flood_per_second: int, fairness: FairnessConfig | None) -> Flood:
    rng = np.random.default_rng(1)
    pool = BlockPool(_CACHE_TOKENS // _BLOCK)
    fair = FairShare(fairness) if fairness is not None else None
    system = _tokens(rng, 2000)
    talks = [np.concatenate([system, _tokens(rng, 200)]) for _ in range(8)]
    counts = {"prompt": 0, "hit": 0, "victim": 0, "served": 0, "refused": 0}

    def ask(tenant: str, prompt: np.ndarray, now: float) -> int | None:
        if fair is not None and fair.wait_seconds(tenant, now):
            return None
        blocks = block_hashes(prompt, _BLOCK)
        hit = _use(pool, blocks) * _BLOCK
        if fair is not None:
            fair.wrote(tenant, len(prompt) - hit, now)
        return hit

    for second in range(_SECONDS):
        for k in range(flood_per_second):
            served = ask("flood", _tokens(rng, 1000), second + k / flood_per_second)
            counts["refused" if served is None else "served"] += 1
        if second % 2:
            number = second // 2 % len(talks)
            hit = ask("victim", talks[number], second + 0.99)
            if hit is None:
                counts["victim"] += 1
                continue
            counts["prompt"] += len(talks[number])
            counts["hit"] += hit
            talks[number] = np.concatenate([talks[number], _tokens(rng, 60)])[:4000]
    return Flood(counts["prompt"], counts["hit"], counts["victim"], counts["served"], counts["refused"])


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 17, count, dtype=np.uint32)


def _use(pool: BlockPool, blocks: Hashes) -> int:
    """Look up, compute the rest, and release; returns the blocks that were there."""
    names = blocks.tolist()
    depth = pool.match(names)
    pool.allocate(len(names) - depth, names[:depth])
    pool.commit(names[depth:])
    pool.release(names)
    return depth


def measured() -> dict[str, Flood]:
    fair = FairnessConfig(cache_tokens=_CACHE_TOKENS, share=0.5, window_seconds=20)
    return {
        "no flood": flooded(0, None),
        "flood": flooded(_FLOOD_PER_SECOND, None),
        "flood, fair shares": flooded(_FLOOD_PER_SECOND, fair),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    runs = measured()
    if parser.parse_args().json:
        rows = {name: {field: getattr(run, field) for field in run.__slots__} for name, run in runs.items()}
        print(json.dumps(rows, indent=2))
        return
    baseline = runs["no flood"].hit_tokens
    print(f"{'':>20} | victim's hit tokens | of its baseline | hit ratio | victim refused | flood served, refused")
    for name, run in runs.items():
        ratio = run.hit_tokens / run.prompt_tokens
        print(
            f"{name:>20} | {run.hit_tokens:19,} | {run.hit_tokens / baseline:15.0%} | {ratio:9.0%} "
            f"| {run.victim_refused:14} | {run.flood_served:,}, {run.flood_refused:,}"
        )


if __name__ == "__main__":
    main()
