"""KV beyond the GPUs: a shared store, pulls from other workers, tiers; failures, restarts, and what adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.kvcache.transfer_link import Wire, arrival
from prefixwatch.loadgen.request_log.cache_moves import CacheFigures, LoggedRun, cache_figures, restart_windows
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.loadgen.scenario.fleet_section import Event, EventPlan, event_plan
from prefixwatch.simulator.caches.block_store import BlockStore
from prefixwatch.simulator.caches.fleet import simulate_caches
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest, infinite_cache_tokens

STEP = StepTime(base_s=0.01, per_prefill_token_s=1e-4)
ENGINE = EngineConfig(STEP, capacity_blocks=20_000)
BYTES = 1000
LINK: dict[str, Any] = {"link_gbit_per_second": 1.0, "latency_ms": 2.0, "kv_bytes_per_token": BYTES}
PULL_S = 0.002 + 64 * BYTES * 8 / 1e9
"""Of 64 tokens over that link."""
MOVING = ("shared", "transfer", "tiers")


def chats(sessions: int = 12, turns: int = 5, **more: Any) -> list[SimulatedRequest]:
    return session_requests(sessions, turns, **{"think_seconds": 1.0, "output_tokens": 4, **more})


def run(
    requests: list[SimulatedRequest],
    architecture: str,
    *,
    workers: int = 2,
    engine: EngineConfig = ENGINE,
    policy: str = "round_robin",
    events: EventPlan | None = None,
    seed: int = 0,
    **cache: Any,
) -> SimulationResult:
    wanted = Cache.model_validate({"architecture": architecture, **LINK, **cache})
    return simulate_caches(
        requests, wanted, policy=policy, engines=[engine] * workers, events=events, seed=seed, view="events"
    )


def figures(result: SimulationResult, events: EventPlan | None = None) -> dict[str, CacheFigures]:
    found = cache_figures({result.policy: [LoggedRun(result.records, result.cache_log)]}, events)
    return {own.window: own for own in found}


def crowd(count: int, seed: int) -> list[SimulatedRequest]:
    """Chats side by side in no order, so that requests queue and caches overflow."""
    starts = np.random.default_rng(seed).uniform(0, 3, count * 4)
    requests = [replace(r, arrival_s=float(s)) for r, s in zip(chats(count, 4), starts, strict=True)]
    return sorted(requests, key=lambda request: request.arrival_s)


def test_a_worker_that_never_saw_the_prompt_pulls_it_from_the_store() -> None:
    requests = session_requests(1, 2, system_blocks=4, turn_blocks=0, think_seconds=1.0)
    requests = [replace(request, prompt_tokens=80) for request in requests]
    result = run(requests, "shared")
    first, second = result.records
    assert (first.worker, second.worker) == ("worker-0", "worker-1")
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    own = figures(result)["run"]
    assert {tier: found.hit_tokens for tier, found in own.tiers.items()} == {"gpu": 0, "store": 64}
    assert (own.logical_hit_tokens, own.physical_hit_tokens, own.pulls) == (64, 0, 1)
    assert own.tiers["store"].pulled_bytes == own.tiers["store"].written_bytes == 64 * BYTES
    assert second.ttft_s == pytest.approx(PULL_S + STEP.prefill_s(80, 64))


def test_peers_send_what_they_hold_and_compression_shrinks_it() -> None:
    requests = [replace(r, prompt_tokens=80) for r in session_requests(1, 2, turn_blocks=0, think_seconds=1.0)]
    result = run(requests, "transfer", compression=4.0)
    own = figures(result)["run"]
    assert own.tiers["peer"].hit_tokens == 64
    assert own.tiers["peer"].pulled_bytes == 64 * BYTES // 4
    assert result.records[1].ttft_s == pytest.approx(0.002 + (PULL_S - 0.002) / 4 + STEP.prefill_s(80, 64))


def test_where_a_pull_takes_longer_than_the_prefill_it_is_computed_and_said_so() -> None:
    requests = [replace(r, prompt_tokens=80) for r in session_requests(1, 2, turn_blocks=0, think_seconds=1.0)]
    result = run(requests, "transfer", latency_ms=50.0)
    own = figures(result)["run"]
    assert (own.pulls, own.declined_tokens, own.recomputed_tokens, own.logical_hit_tokens) == (0, 64, 64, 0)
    assert result.records == run_sticky(requests).records


def run_sticky(requests: list[SimulatedRequest]) -> SimulationResult:
    return simulate_requests(requests, policy="round_robin", workers=2, engine=ENGINE, view="events")


def test_blocks_go_down_the_tiers_and_come_back_at_their_rate() -> None:
    """A GPU of 24 blocks, a CPU of 8: each chat of 20 blocks pushes out the one before."""
    requests = session_requests(2, 1, system_blocks=0, turn_blocks=20, think_seconds=1.0, output_tokens=2)
    requests += [replace(requests[0], id="again", arrival_s=10.0)]
    tiers: dict[str, Any] = {"gpu_blocks": 24, "cpu_blocks": 8, "disk_blocks": 0, "remote_blocks": None}
    own = figures(run(requests, "tiers", workers=1, cpu_gbit_per_second=None, **tiers))["run"]
    assert own.logical_hit_tokens == 19 * 16  # all except the block of the last token
    assert own.tiers["cpu"].hit_tokens == 8 * 16
    assert own.tiers["remote"].pulled_bytes == own.tiers["remote"].hit_tokens * BYTES
    with_disk = figures(run(requests, "tiers", workers=1, **{**tiers, "disk_blocks": 64}))["run"]
    assert with_disk.tiers["disk"].hit_tokens == own.tiers["remote"].hit_tokens
    assert with_disk.tiers["remote"].written_bytes == 0


def test_a_failed_pull_is_waited_for_computed_and_counted() -> None:
    requests = [replace(r, prompt_tokens=80) for r in session_requests(1, 2, turn_blocks=0, think_seconds=1.0)]
    result = run(requests, "shared", failure_ratio=1.0)
    own = figures(result)["run"]
    assert (own.failed_pulls, own.pulls, own.failed_tokens, own.logical_hit_tokens) == (1, 1, 64, 0)
    assert own.tiers["store"].pulled_bytes == 64 * BYTES
    assert result.records[1].ttft_s == pytest.approx(PULL_S + STEP.prefill_s(80))


def test_the_share_of_pulls_that_fails_is_the_one_asked_for_and_depends_on_the_seed() -> None:
    requests = chats(80, 5)
    counts = [figures(run(requests, "shared", failure_ratio=0.3, seed=0, **{})) for _ in range(2)]
    assert counts[0] == counts[1]
    own = counts[0]["run"]
    assert own.failed_pulls / own.pulls == pytest.approx(0.3, abs=0.08)
    wanted = Cache.model_validate({"architecture": "shared", **LINK, "failure_ratio": 0.3, "seed": 1})
    other = simulate_caches(requests, wanted, policy="round_robin", engines=[ENGINE] * 2, view="events")
    assert [m.failed for m in other.cache_log.moves] != [  # type: ignore[union-attr]
        m.failed
        for m in run(requests, "shared", failure_ratio=0.3).cache_log.moves  # type: ignore[union-attr]
    ]


def test_pulls_queue_for_the_stores_link() -> None:
    """Two pulls of 64 tokens at once: the second comes after twice the time on the wire."""
    store, ends = Wire(1.0), [Wire(10.0), Wire(10.0)]
    size = 64 * BYTES
    assert arrival((store, ends[0]), size, 1.0, 0.002, book=True) == pytest.approx(1.0 + PULL_S)
    assert arrival((store, ends[1]), size, 1.0, 0.002) == pytest.approx(1.0 + PULL_S + size * 8 / 1e9)
    assert arrival((Wire(None),), size, 1.0, 0.002) == 1.002


def test_a_store_forgets_the_longest_unused_and_keeps_heads() -> None:
    store = BlockStore(3)
    assert store.put([1, 2, 3]) == []
    store.touch([2])
    assert store.put([4]) == [3]
    assert store.put([5]) == [1]
    assert 2 in store
    assert BlockStore(0).put([1, 2]) == [1, 2]


EVENTS = event_plan([Event(at=100.0, kill="engine-1"), Event(at=120.0, start="engine-1")], 2)


def test_a_restarted_worker_finds_what_is_kept_elsewhere_and_nothing_of_its_own() -> None:
    """Chats in turn, more than the GPUs hold; the second worker is killed at 100 s and back at 120 s."""
    in_turn = sorted(chats(40, 5, system_blocks=0), key=lambda request: int(request.id[-1]))
    requests = [replace(request, arrival_s=float(k)) for k, request in enumerate(in_turn)]
    assert restart_windows(EVENTS) == {"before": (40.0, 100.0), "after": (120.0, 180.0)}

    def first_back(architecture: str, **more: Any) -> int | None:
        result = run(requests, architecture, policy="session", events=EVENTS, latency_ms=0.0, gpu_blocks=64, **more)
        assert figures(result, EVENTS)["before"].logical_hit_tokens > 0
        later = [r for r in result.records if r.worker == "worker-1" and r.scheduled_s >= 120]
        return later[0].cached_tokens

    assert first_back("tiers", cpu_blocks=10_000) == 0
    assert first_back("tiers", cpu_blocks=0, disk_blocks=10_000) == 192  # its first three turns
    assert first_back("tiers", cpu_blocks=0, remote_blocks=10_000) == 192
    assert first_back("shared") == 192
    assert first_back("transfer") == 0  # nobody else has it


def test_what_never_left_the_gpu_is_lost_with_it_and_blocks_behind_it_are_out_of_reach() -> None:
    """Tiers are filled as blocks leave the GPU: a system prompt that all use never does."""
    in_turn = sorted(chats(40, 5), key=lambda request: int(request.id[-1]))
    requests = [replace(request, arrival_s=float(k)) for k, request in enumerate(in_turn)]
    cache: dict[str, Any] = {"gpu_blocks": 64, "cpu_blocks": 0, "disk_blocks": 10_000}
    result = run(requests, "tiers", policy="session", events=EVENTS, **cache)
    first, second = [r for r in result.records if r.worker == "worker-1" and r.scheduled_s >= 120][:2]
    assert (first.cached_tokens, second.cached_tokens) == (0, 64 + 192)


def test_a_source_that_dies_fails_the_pull() -> None:
    requests = [replace(r, prompt_tokens=80) for r in session_requests(1, 2, turn_blocks=0, think_seconds=1.0)]
    plan = event_plan([Event(at=1.001, kill="engine-0"), Event(at=5.0, start="engine-0")], 2)
    result = run(requests, "transfer", events=plan)
    own = figures(result)["run"]
    assert (own.failed_pulls, own.failed_tokens) == (1, 64)
    assert result.records[1].cached_tokens == 0


def test_equal_inputs_give_equal_results() -> None:
    requests = crowd(12, 3)
    for architecture in MOVING:
        assert run(requests, architecture, gpu_blocks=40) == run(requests, architecture, gpu_blocks=40)


def test_with_nothing_within_reach_it_is_the_ordinary_fleet() -> None:
    requests = crowd(12, 3)
    nothing: dict[str, Any] = {"cpu_blocks": 0, "disk_blocks": 0, "remote_blocks": 0}
    for architecture in ("shared", "tiers"):
        assert run(requests, architecture, **nothing).records == run_sticky(requests).records


@pytest.mark.parametrize("architecture", MOVING)
def test_an_unlimited_fleet_reuses_all_that_any_request_left(architecture: str) -> None:
    """One request after another, links that take no time: what an infinite cache would give."""
    requests = chats()
    links: dict[str, Any] = {"link_gbit_per_second": None, "latency_ms": 0.0}
    if architecture == "tiers":  # what is in the other worker's GPU is out of reach
        requests = [replace(request, id=f"{k}") for k, request in enumerate(requests)]
        result = run(requests, architecture, workers=1, gpu_blocks=26, cpu_blocks=None, **links)
    else:
        result = run(requests, architecture, **links)
    reusable = infinite_cache_tokens(requests, 16)
    assert [record.cached_tokens for record in result.records] == reusable


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(MOVING),
    st.integers(0, 1000),
    st.fixed_dictionaries(
        {
            "gpu_blocks": st.sampled_from([24, 40, 200]),
            "failure_ratio": st.sampled_from([0.0, 0.4]),
            "link_gbit_per_second": st.sampled_from([0.01, 1.0, None]),
        }
    ),
    st.sampled_from(["round_robin", "score", "mooncake", "dynamo_kv"]),
)
def test_tokens_add_up_and_no_time_is_negative(
    architecture: str, seed: int, cache: dict[str, Any], policy: str
) -> None:
    """hits by tier + what was computed all the same = what was within reach; hits = what the engine reports."""
    requests = crowd(10, seed)
    tiers: dict[str, Any] = {"cpu_blocks": 30, "disk_blocks": 30, "remote_blocks": 60}
    result = run(requests, architecture, policy=policy, **tiers, **cache)
    assert result.cache_log is not None
    assert len(result.cache_log.moves) == len(requests)
    for move in result.cache_log.moves:
        record = result.records[move.index]
        assert sum(move.hit_tokens.values()) == record.cached_tokens
        parts = [*move.hit_tokens.values(), move.declined_tokens, move.failed_tokens, move.lost_tokens]
        assert min(parts) >= 0
        assert sum(parts) == move.reusable_tokens <= record.planned_shared_tokens
        assert record.first_token_s is not None
        assert record.first_token_s > record.scheduled_s + (move.pull_s or 0.0)
        assert (move.pull_s or 0.0) >= 0
        assert move.failed_tokens == 0 or move.failed
    counters = [worker.counters for worker in result.workers]
    external = sum(n for move in result.cache_log.moves for tier, n in move.hit_tokens.items() if tier != "gpu")
    assert sum(own.external_hit_tokens for own in counters) == external
    assert sum(own.hit_tokens for own in counters) == sum(record.cached_tokens or 0 for record in result.records)


def test_the_measured_break_even_is_the_models_where_prefill_is_affine() -> None:
    """latency 2 ms, 100 − 8 µs a token: 21.7 tokens; the first block beyond is 32."""
    requests = [r for k in range(6) for r in chats(6, 5, system_blocks=k, turn_blocks=3 + k, seed=k, think_seconds=0.5)]
    requests = [replace(r, id=f"{k}", arrival_s=float(k)) for k, r in enumerate(requests)]
    own = figures(run(requests, "shared", workers=3))["run"]
    tier = own.tiers["store"]
    assert tier.break_even_model_tokens == 32
    assert tier.break_even_measured_tokens == pytest.approx(0.002 / (1e-4 - 8e-6), rel=0.02)
