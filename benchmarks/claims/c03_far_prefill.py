"""C3: a far cluster of fast GPUs computes the long prompts, behind a link that is limited (Prefill-as-a-Service)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.claims.claim import Check, Claim, Finding, Setting
from benchmarks.claims.figures import ttft_s
from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.simulator.disaggregation.fleet import DisaggregatedResult, simulate_disaggregated
from prefixwatch.simulator.disaggregation.policies import DisaggregationOptions
from prefixwatch.simulator.traffic.trace import SimulatedRequest

ENGINES, FAR = 9, 3
SIDES, QUICK_SIDES = range(2, 8), range(6, 7)
"""Prefill engines of the near fleet that are tried."""
REQUESTS = 600
NEAR = EngineConfig(profile("l40s-llama-8b").step_time, capacity_blocks=10_928)
FAST = EngineConfig(profile("h100-llama-8b").step_time, capacity_blocks=27_062)
LINK, SLOW_LINK = 95_000.0, 10_000.0
"""KV tokens a second: 100 and 10.5 Gbit/s at 131,072 bytes each."""
SATURATED, MODERATE = 60.0, 9.0
"""Requests a second."""


def traffic(rate: float) -> list[SimulatedRequest]:
    """Two requests in three add little to one of 12 openings of 1,000 tokens, one in three adds 6,000 tokens."""
    short = SharedPrefixWorkload(
        requests=REQUESTS * 2 // 3,
        rate_per_second=rate * 2 / 3,
        groups=12,
        shared_blocks=62,
        unique_blocks=18,
        output_tokens=96,
    )
    long = replace(short, requests=REQUESTS // 3, rate_per_second=rate / 3, unique_blocks=375)
    found = shared_prefix_requests(short, seed=0)
    found += [replace(each, id=f"long-{each.id}") for each in shared_prefix_requests(long, seed=1)]
    return sorted(found, key=lambda request: request.arrival_s)


def split(rate: float, prefill_workers: int) -> DisaggregatedResult:
    """All engines near and alike; every prompt is computed on the one side and answered on the other."""
    return simulate_disaggregated(
        traffic(rate),
        prefill_workers=prefill_workers,
        decode_workers=ENGINES - prefill_workers,
        prefill_policy="cache_aware",
        decode_policy="least_load",
        engine=NEAR,
    )


def far(rate: float, link: float) -> DisaggregatedResult:
    """A third of the engines are fast and far, and compute the prompts with 2,048 uncached tokens and more."""
    return simulate_disaggregated(
        traffic(rate),
        prefill_workers=FAR,
        decode_workers=ENGINES - FAR,
        prefill_policy="least_load",
        decode_policy="cache_aware",
        engine=NEAR,
        prefill_engine=FAST,
        options=DisaggregationOptions(conditional=True, local_below_ratio=1.0, link_tokens_per_second=link),
    )


def served_per_second(records: Sequence[RequestRecord]) -> float:
    """Requests from the first arrival to the last end."""
    return len(records) / (max(r.end_s for r in records if r.end_s is not None) - records[0].scheduled_s)


def _run(setting: Setting) -> Finding:
    sides = QUICK_SIDES if setting.quick else SIDES
    best = max(sides, key=lambda each: served_per_second(split(SATURATED, each).records))
    near = served_per_second(split(SATURATED, best).records)
    fast, slow = (served_per_second(far(SATURATED, link).records) for link in (LINK, SLOW_LINK))
    near_s, far_s = ttft_s(split(MODERATE, best).records, 90), ttft_s(far(MODERATE, LINK).records, 90)
    return Finding(
        figures=f"requests/s {near:.1f} ({best} of {ENGINES} prefill) → {fast:.1f} (+{100 * (fast / near - 1):.0f} %), "
        f"TTFT P90 {near_s:.2f} → {far_s:.2f} s (−{100 * (1 - far_s / near_s):.0f} %) at {MODERATE:g} requests/s; "
        f"a link of a tenth: {slow:.1f} requests/s",
        checks=(
            Check("throughput rises by at least a quarter", fast > 1.25 * near),
            Check("TTFT P90 falls by at least a third", far_s < 2 / 3 * near_s),
            Check("a link of a tenth takes the gain away", slow < near),
        ),
        seeds="traffic 0 and 1, policies 0",
        remark="Equal numbers of GPUs, as at the source, and not equal cost: at a price of three L40S for an H100 "
        "nothing is gained (docs/topology.md). The split of the near fleet is the best of 2 to 7 prefill engines.",
    )


CLAIM = Claim(
    id="C3",
    claimed="Fast GPUs far away, for long uncached prompts alone, serve more than as many near ones",
    source="Prefill-as-a-Service (2026); the figures are secondhand",
    published="throughput +54 %, TTFT P90 −64 % against a homogeneous split fleet",
    reproduced=f"{ENGINES} L40S as a split fleet, against {ENGINES - FAR} L40S and {FAR} H100 behind one link of "
    f"{LINK:,.0f} KV tokens/s, which compute prompts of 2,048 uncached tokens and more; a third of the prompts have "
    "6,000 tokens of their own",
    run=_run,
)
