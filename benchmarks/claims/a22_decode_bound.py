"""A22: a high hit rate can be worth little (a negative control for "hit rate = value")."""

from __future__ import annotations

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.figures import output_tokens_per_second
from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests

CONCURRENCY = 64
PROMPT_BLOCKS = 37
SHARED_BLOCKS = 35
ENGINE = EngineConfig(
    profile("h100-blog").step_time, capacity_blocks=100_000, max_num_seqs=CONCURRENCY, max_num_batched_tokens=8192
)


def _run(setting: Setting) -> Finding:
    long, long_unique = _served(SHARED_BLOCKS, output_tokens=1024), _served(0, output_tokens=1024)
    short, short_unique = _served(SHARED_BLOCKS, output_tokens=16), _served(0, output_tokens=16)
    gain, short_gain = _gain(long, long_unique), _gain(short, short_unique)
    hits = long.token_hit_ratio or 0.0
    return Finding(
        figures=f"hits {100 * hits:.1f} % of tokens, throughput {100 * gain:+.1f} %; with 16 output tokens instead of "
        f"1,024 {100 * short_gain:+.0f} %",
        checks=(
            Check("over 90 % of prompt tokens reused", hits > 0.9),
            Check("and yet less than 10 % more output tokens a second", 0 < gain < 0.1),
            Check("where prefill rules, the same hits bring at least 5 times that", short_gain > 5 * gain),
        ),
        seeds="traffic 1",
    )


def _served(shared_blocks: int, output_tokens: int) -> SimulationResult:
    """256 requests at once on one engine that serves 64 at a time."""
    workload = SharedPrefixWorkload(
        requests=4 * CONCURRENCY,
        rate_per_second=1e6,
        groups=1,
        shared_blocks=shared_blocks,
        unique_blocks=PROMPT_BLOCKS - shared_blocks,
        output_tokens=output_tokens,
    )
    return simulate_requests(
        shared_prefix_requests(workload, seed=1), policy="round_robin", workers=1, engine=ENGINE, arrivals="trace"
    )


def _gain(cached: SimulationResult, unique: SimulationResult) -> float:
    return output_tokens_per_second(cached.records) / output_tokens_per_second(unique.records) - 1


CLAIM = Claim(
    id="A22",
    claimed="A high hit rate can bring little throughput",
    source="vllm-project/vllm#53395",
    published="94.59 % of tokens reused, throughput +5.7 to +6.2 % at concurrency 64",
    reproduced="one engine (profile h100-blog), concurrency 64, prompts of 592 tokens, outputs of 1,024; against equal "
    "traffic without a common prefix, the simulator having no switch for its cache",
    run=_run,
)
