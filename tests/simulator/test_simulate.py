from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import SharedPrefixWorkload, session_requests, shared_prefix_requests, simulate_trace
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest

TRACES = Path(__file__).parents[3] / "shared" / "data" / "mooncake"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public Mooncake traces are not in {TRACES}")

CONVERSATION = TRACES / "conversation_trace.jsonl"
FOUR: Any = {"workers": 4, "capacity_blocks": 12_500}

PREFILL_TOKENS_PER_SECOND = 12_000.0
ENGINE = EngineConfig(
    StepTime(base_s=0.01, per_prefill_token_s=1 / PREFILL_TOKENS_PER_SECOND), block_size=16, capacity_blocks=20_000
)
SHARED = shared_prefix_requests(
    SharedPrefixWorkload(requests=600, rate_per_second=20, groups=20, shared_blocks=64, unique_blocks=8), seed=1
)


def run(policy: str, requests: list[SimulatedRequest] = SHARED, **arguments: Any) -> SimulationResult:
    return simulate_requests(requests, policy=policy, **{"workers": 4, "engine": ENGINE, **arguments})


def ttft_s(result: SimulationResult, quantile: float) -> float:
    times = sorted(record.ttft_s for record in result.records if record.ttft_s is not None)
    return times[int(quantile * (len(times) - 1))]


def test_one_request_alone_has_the_times_the_engine_model_gives() -> None:
    (request,) = shared_prefix_requests(SharedPrefixWorkload(requests=1, shared_blocks=2, unique_blocks=1), seed=1)
    for arrivals in ("serial", "trace"):
        (record,) = run("round_robin", [request], workers=1, arrivals=arrivals).records
        assert record.outcome is Outcome.COMPLETED
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (48, 0, 16)
        assert record.ttft_s == pytest.approx(0.01 + 48 / PREFILL_TOKENS_PER_SECOND)
        assert record.tpot_s == pytest.approx(0.01)


def test_a_full_hit_reuses_all_but_the_block_of_the_last_token() -> None:
    (request,) = shared_prefix_requests(SharedPrefixWorkload(requests=1, shared_blocks=2, unique_blocks=1), seed=1)
    again = SimulatedRequest("again", request.arrival_s + 9, 48, 16, request.blocks, request.tokens)
    result = run("round_robin", [request, again], workers=1)
    assert [record.cached_tokens for record in result.records] == [0, 32]
    assert [record.planned_shared_tokens for record in result.records] == [0, 48]
    assert result.block_hit_ratio == 3 / 6


@pytest.mark.parametrize("arrivals", ["serial", "trace"])
@pytest.mark.parametrize("view", ["history", "events"])
def test_equal_seeds_give_equal_runs_and_everything_completes(arrivals: str, view: str) -> None:
    first, second = (run("score", seed=3, arrivals=arrivals, view=view) for _ in range(2))
    assert first == second
    assert {record.outcome for record in first.records} == {Outcome.COMPLETED}
    assert sum(worker.requests for worker in first.workers) == len(SHARED)


def test_cache_aware_policies_beat_round_robin_on_shared_prefixes() -> None:
    blind = run("round_robin")
    assert blind.token_hit_ratio is not None
    for policy in ("cache_aware", "score"):
        aware = run(policy)
        assert aware.token_hit_ratio is not None
        assert aware.token_hit_ratio > blind.token_hit_ratio + 0.05
        assert ttft_s(aware, 0.95) < ttft_s(blind, 0.95)


def test_nothing_is_gained_without_shared_prefixes() -> None:
    unique = shared_prefix_requests(
        SharedPrefixWorkload(requests=400, rate_per_second=12, shared_blocks=0, unique_blocks=72), seed=2
    )
    blind, aware = run("round_robin", unique), run("cache_aware", unique)
    assert blind.token_hit_ratio == aware.token_hit_ratio == 0
    assert ttft_s(aware, 0.5) == pytest.approx(ttft_s(blind, 0.5), rel=0.1)


def test_predicted_tokens_are_delivered_when_the_view_is_the_engines_own() -> None:
    spread_out = session_requests(8, 6)
    result = run("cache_aware", spread_out, arrivals="serial", view="events", policy_options={"index": "events"})
    for record in result.records:
        assert record.cached_tokens == record.predicted_tokens


CACHE_ONLY = {"index": "events", "balance_rel_threshold": 1e9}
"""cache_aware without its load gate: the longest prefix wins whatever the load."""


def test_weighing_load_against_cache_balances_the_fleet_at_almost_no_hit_loss() -> None:
    """vllm-project/production-stack#1035 (RT01), Zipf(1.1) over 20 groups, 4096 shared + 1024 unique tokens.

    At a rate that keeps the worker with the popular groups busy: 2.35 becomes 1.60, hits fall by 0.3 points.
    """
    workload = SharedPrefixWorkload(
        requests=1500, rate_per_second=34, shared_blocks=8, unique_blocks=2, output_tokens=60, block_size=512
    )
    engine = EngineConfig(ENGINE.step_time, block_size=512, capacity_blocks=1000)
    requests = shared_prefix_requests(workload, seed=7)
    only = run("cache_aware", requests, engine=engine, policy_options=CACHE_ONLY)
    weighed = run("score", requests, engine=engine)
    assert only.token_hit_ratio is not None
    assert weighed.token_hit_ratio is not None
    assert only.in_flight_max_over_mean is not None
    assert weighed.in_flight_max_over_mean is not None
    assert weighed.in_flight_max_over_mean < 0.75 * only.in_flight_max_over_mean
    assert weighed.token_hit_ratio > only.token_hit_ratio - 0.01
    assert ttft_s(weighed, 0.95) < 0.9 * ttft_s(only, 0.95)


def test_paced_sessions_do_not_end_up_on_one_worker() -> None:
    """AMD-AGI/Infera#103 (RT04): two workers, sessions whose requests follow one another, nothing in flight."""
    paced = session_requests(56, 8, system_blocks=1, think_seconds=0.5)
    assert run("cache_aware", paced, workers=2, arrivals="serial", policy_options=CACHE_ONLY).busiest_share == 1
    assert run("score", paced, workers=2, arrivals="serial").busiest_share < 0.65


def test_a_request_that_fits_no_engine_fails_and_leaves_nothing_behind() -> None:
    tiny = EngineConfig(ENGINE.step_time, block_size=16, capacity_blocks=4)
    for arrivals in ("serial", "trace"):
        result = run("cache_aware", SHARED[:3], engine=tiny, arrivals=arrivals)
        assert {(record.outcome, record.status) for record in result.records} == {(Outcome.FAILED, 400)}
        assert "KV blocks" in result.records[0].error
        assert result.block_hit_ratio is None


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown policy 'fastest'"):
        run("fastest")
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        run("round_robin", workers=0)
    with pytest.raises(ValueError, match="speed must be above 0"):
        simulate_trace("trace.jsonl", speed=0)


@needs_traces
@pytest.mark.parametrize(
    ("trace", "capacity_blocks", "percent"),
    [
        ("conversation", None, 36.64),
        ("conversation", 1_000, 4.45),
        ("conversation", 5_000, 11.18),
        ("conversation", 10_000, 21.16),
        ("conversation", 50_000, 35.46),
        ("synthetic", None, 63.96),
        ("synthetic", 1_000, 8.41),
        ("synthetic", 5_000, 27.93),
        ("synthetic", 10_000, 42.39),
        ("synthetic", 50_000, 63.96),
    ],
)
def test_block_hit_rates_of_the_public_traces(trace: str, capacity_blocks: int | None, percent: float) -> None:
    result = simulate_trace(TRACES / f"{trace}_trace.jsonl", capacity_blocks=capacity_blocks)
    assert result.block_hit_ratio is not None
    assert 100 * result.block_hit_ratio == pytest.approx(percent, abs=0.01)


@needs_traces
def test_a_common_first_block_gathers_the_fleet_on_one_worker_unless_load_counts() -> None:
    """RT40: every request of the conversation trace starts with the same block."""
    only, *weighed = (
        simulate_trace(CONVERSATION, policy=policy, policy_options=options, **FOUR, limit=1500, speed=0.3)
        for policy, options in (("cache_aware", CACHE_ONLY), ("cache_aware", None), ("score", None))
    )
    assert only.busiest_share > 0.9
    for result in weighed:
        assert result.busiest_share < 0.3
        assert ttft_s(result, 0.5) < 0.1 * ttft_s(only, 0.5)


@needs_traces
def test_balance_with_affinity_doubles_round_robins_hits() -> None:
    """Mooncake conversation trace, four workers: 17 % for round robin, about twice that with the cache in view."""
    blind = simulate_trace(CONVERSATION, **FOUR, arrivals="serial").block_hit_ratio
    aware = simulate_trace(CONVERSATION, **FOUR, arrivals="serial", policy="score").block_hit_ratio
    assert blind == pytest.approx(0.1725, abs=0.001)
    assert blind is not None
    assert aware is not None
    assert aware > 1.9 * blind
