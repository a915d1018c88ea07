"""Simulated requests explain themselves as live ones do."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest

ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 8000), block_size=16, capacity_blocks=1000)


def a_request(number: int, arrival_s: float, blocks: range) -> SimulatedRequest:
    return SimulatedRequest(
        f"r{number}", arrival_s, 16 * len(blocks), 4, np.array([*blocks], dtype=np.uint64), session=f"s{number}"
    )


def test_a_request_says_what_its_policy_expected() -> None:
    requests = [a_request(0, 0.0, range(1, 101)), a_request(1, 5.0, range(1, 101))]
    first, second = simulate_requests(requests, policy="score", workers=2, engine=ENGINE, arrivals="trace").records
    assert (first.predicted_queue_s, first.predicted_prefill_s, first.prediction_cause) == (0, 0.2, "exact")
    assert (second.predicted_queue_s, second.predicted_prefill_s, second.prediction_cause) == (0, 0, "within_block")
    assert json.loads(second.scores)[second.worker] == max(json.loads(second.scores).values()) > 0


def test_a_burst_is_credited_with_what_is_still_to_be_computed() -> None:
    """Both wait while the engine is busy, and are prefilled in one step."""
    requests = [a_request(0, 0.0, range(1, 101)), *(a_request(k, 0.001 * k, range(200, 260)) for k in (1, 2))]
    *_, last = simulate_requests(requests, policy="cache_aware", workers=1, engine=ENGINE, arrivals="trace").records
    assert (last.predicted_tokens, last.cached_tokens, last.prediction_cause) == (960, 0, "concurrent_miss")


def test_a_history_that_outlives_the_engines_cache_is_found_out() -> None:
    small = EngineConfig(ENGINE.step_time, block_size=16, capacity_blocks=150)
    workload = SharedPrefixWorkload(
        requests=200, rate_per_second=20, shared_blocks=40, unique_blocks=10, output_tokens=200, block_size=16
    )
    run = simulate_requests(shared_prefix_requests(workload, seed=3), policy="score", workers=2, engine=small)
    causes = Counter(record.prediction_cause for record in run.records)
    assert causes["evicted_since"] > 0
    assert "" not in causes
