"""The comparison announces a gain where there is one, and none where there can't be.

Cache-aware routing has nothing to find in traffic without shared prefixes; a gain announced there would be a fault of
the statistics (negative controls: llm-d's blog of 2025-09-03, "at low reuse no difference"; vllm-project/vllm#53395).
"""

from __future__ import annotations

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import profile
from prefixwatch.loadgen.grading.comparison import Comparison, compare_policies
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.summary import columns_by_policy
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.simulator.runs import simulate_requests

ENGINE = EngineConfig(step_time=profile("assumed-gpu").step_time, capacity_blocks=1000)
POLICIES = ("round_robin", "cache_aware")
BLOCKS = 120
"""Blocks a prompt: about 1,900 tokens."""


def compared(shared_blocks: int, trial: int) -> dict[str, Comparison]:
    """A bench in virtual time: three repeats of both policies on equal plans, 4 engines."""
    workload = SharedPrefixWorkload(
        requests=100, rate_per_second=4, shared_blocks=shared_blocks, unique_blocks=BLOCKS - shared_blocks
    )
    records: list[RequestRecord] = []
    for repeat in range(3):
        seed = 3 * trial + repeat
        requests = shared_prefix_requests(workload, seed)
        for policy in POLICIES:
            result = simulate_requests(
                requests, policy=policy, workers=4, engine=ENGINE, seed=seed, arrivals="trace", view="events"
            )
            for record in result.records:
                record.repeat = repeat
            records += result.records
    found = compare_policies(
        {name: Measured(own) for name, own in columns_by_policy(records, POLICIES).items()}, seed=trial
    )
    return {comparison.metric: comparison for comparison in found}


def test_shared_prefixes_give_a_significant_gain_every_time() -> None:
    for trial in range(5):
        found = compared(shared_blocks=110, trial=trial)["hit_tokens_mean"]
        assert found.significant
        assert found.difference is not None
        assert found.difference > 0


def test_without_shared_prefixes_no_gain_is_announced() -> None:
    """Of 20 benches with 6 metrics each, the family-wise 5 % leaves room for one false alarm or two."""
    alarms = 0
    for trial in range(20):
        comparison = compared(shared_blocks=0, trial=trial)
        assert comparison["hit_tokens_mean"].difference == 0
        alarms += any(found.significant for found in comparison.values())
    assert alarms <= 2
