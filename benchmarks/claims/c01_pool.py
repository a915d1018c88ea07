"""C1: one pool of KV for all nodes finds more than the same memory cut into pieces."""

from __future__ import annotations

from typing import Any

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.figures import hit_percent
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.simulator.caches.fleet import simulate_caches
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.traffic.trace import TRACE_BLOCK_TOKENS, read_trace

NODES = 10
NODE_BLOCKS = 3_000_000 // TRACE_BLOCK_TOKENS
GPU_BLOCKS = 600
PREFILL_TOKENS_PER_SECOND = 8_000
ENGINE = EngineConfig(
    StepTime(base_s=0.02, per_prefill_token_s=1 / PREFILL_TOKENS_PER_SECOND),
    block_size=TRACE_BLOCK_TOKENS,
    capacity_blocks=GPU_BLOCKS,
    max_num_batched_tokens=8192,
)
NETWORK: dict[str, Any] = {"link_gbit_per_second": 800.0, "latency_ms": 5.0, "kv_bytes_per_token": 327_680}
LOCAL: dict[str, Any] = {"architecture": "tiers", "cpu_blocks": NODE_BLOCKS, "remote_blocks": 0, **NETWORK}
POOL: dict[str, Any] = {"architecture": "shared", "remote_blocks": NODES * NODE_BLOCKS, **NETWORK}


def _run(setting: Setting) -> Finding:
    figures, checks = [], []
    for name in ("conversation",) if setting.quick else ("conversation", "synthetic"):
        gains = {}
        for policy in ("round_robin", "cache_aware"):
            local, pool = (_replay(setting, name, policy, cache) for cache in (LOCAL, POOL))
            gains[policy] = hit_percent(pool) / hit_percent(local) - 1
            less = 1 - _prefill_s(pool) / _prefill_s(local)
            figures.append(
                f"{name}, {policy}: hits {hit_percent(local):.1f} → {hit_percent(pool):.1f} % "
                f"({100 * gains[policy]:+.0f} %), prefill time −{100 * less:.0f} %"
            )
            if policy == "round_robin":
                checks.append(Check(f"{name}: spread evenly, prefill time falls by at least a tenth", less > 0.1))
        checks += [
            Check(f"{name}: spread evenly, the pool finds at least half as much again", gains["round_robin"] > 0.5),
            Check(f"{name}: a router that follows the caches gains less", gains["cache_aware"] < gains["round_robin"]),
        ]
    return Finding(
        figures="; ".join(figures),
        checks=tuple(checks),
        seeds="policy 0",
        remark="How much is gained depends on how requests are placed, which the source doesn't say.",
    )


def _replay(setting: Setting, name: str, policy: str, cache: dict[str, Any]) -> SimulationResult:
    requests = read_trace(setting.trace(name), 3000 if setting.quick else None).requests
    engines = [ENGINE] * NODES
    return simulate_caches(requests, Cache.model_validate(cache), policy=policy, engines=engines, view="events")


def _prefill_s(result: SimulationResult) -> float:
    """Time to compute what wasn't reused."""
    return sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in result.records) / PREFILL_TOKENS_PER_SECOND


CLAIM = Claim(
    id="C1",
    claimed="A pool of KV over all nodes finds more than the same memory node by node",
    source="Mooncake (FAST'25); the figures are secondhand",
    published="10 nodes of 3M tokens: hits up to +136 %, prefill time up to −48 %",
    reproduced=f"{NODES} engines of {GPU_BLOCKS} blocks in the GPU and {NODE_BLOCKS:,} in CPU memory each, against a "
    "pool of ten times that; prefill 8,000 tokens/s, 800 Gbit/s, KV of 327,680 bytes a token (70B); whole traces",
    run=_run,
    traces=("conversation", "synthetic"),
)
