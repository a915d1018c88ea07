"""The three parts of a request's time to first token, queue, migrate and prefill, over random small fleets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.loadgen.scenario.fleet_section import Event, EventPlan, event_plan
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.simulator.caches.fleet import simulate_caches
from prefixwatch.simulator.disaggregation.fleet import simulate_disaggregated
from prefixwatch.simulator.disaggregation.policies import DisaggregationOptions
from prefixwatch.simulator.fleet_events import simulate_events
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.sessions.moving_fleet import simulate_moves
from prefixwatch.simulator.traffic.trace import SimulatedRequest

ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1e-4), capacity_blocks=200, max_num_seqs=4)
EVENTS = st.lists(
    st.tuples(st.floats(0.1, 4.0), st.sampled_from(["kill", "drain", "slow", "partition"])), max_size=2
)  # fmt: skip


def crowd(sessions: int, seed: int) -> list[SimulatedRequest]:
    """Chats side by side, so that requests queue and caches overflow."""
    rng = np.random.default_rng(seed)
    requests = session_requests(sessions, 4, system_blocks=8, turn_blocks=10, output_tokens=4)
    starts = rng.uniform(0, 3, len(requests))
    found = [replace(request, arrival_s=float(at)) for request, at in zip(requests, starts, strict=True)]
    return sorted(found, key=lambda request: request.arrival_s)


def planned(events: list[tuple[float, str]]) -> EventPlan:
    """The events of engines 0 and 1 of three."""
    found = []
    for k, (at, action) in enumerate(sorted(events)):
        more = {"slow": {"factor": 3.0}, "partition": {"seconds": 6.0}}.get(action)
        worker = f"engine-{k}"
        found.append(Event.model_validate({"at": at, action: worker if more is None else {"worker": worker, **more}}))
    return event_plan(found, 3)


def parts_add_up(result: SimulationResult) -> None:
    for record in result.records:
        if record.ttft_s is None:
            continue
        parts = record.queue_s, record.prefill_s, record.migrate_s
        assert all(part is not None and part >= 0 for part in parts)
        assert sum(part for part in parts if part is not None) == pytest.approx(record.ttft_s, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "architecture": st.sampled_from(["shared", "transfer", "tiers"]),
            "failure_ratio": st.sampled_from([0.0, 0.4]),
            "link_gbit_per_second": st.sampled_from([0.05, 1.0, None]),
        }
    ),
    st.integers(0, 1000),
    st.integers(1, 10),
    st.sampled_from(["round_robin", "score", "mooncake"]),
    EVENTS,
)
def test_the_parts_sum_to_the_time_to_first_token_whatever_is_pulled(
    section: dict[str, Any], seed: int, sessions: int, policy: str, events: list[tuple[float, str]]
) -> None:
    sizes = {"kv_bytes_per_token": 1000, "gpu_blocks": 60, "cpu_blocks": 60, "disk_blocks": 60, "remote_blocks": 200}
    cache = Cache.model_validate({"latency_ms": 2.0, **sizes, **section})
    result = simulate_caches(
        crowd(sessions, seed), cache, policy=policy, engines=[ENGINE] * 3, events=planned(events), view="events"
    )
    parts_add_up(result)
    assert result.cache_log is not None
    pulled = {move.index: move for move in result.cache_log.moves}
    for record in result.records:
        if record.ttft_s is not None and not record.retries:
            assert record.migrate_s == pytest.approx(pulled[record.index].pull_s or 0.0, abs=1e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 10), st.booleans(), st.none() | st.floats(1e3, 1e6))
def test_the_parts_sum_to_the_time_to_first_token_in_a_split_fleet(
    seed: int, sessions: int, conditional: bool, link: float | None
) -> None:
    options = DisaggregationOptions(conditional=conditional, local_below_tokens=400, link_tokens_per_second=link)
    result = simulate_disaggregated(
        crowd(sessions, seed),
        prefill_workers=1,
        decode_workers=2,
        prefill_policy="mooncake",
        decode_policy="round_robin",
        engine=ENGINE,
        options=options,
    )
    parts_add_up(result)
    for record in result.records:
        assert record.migrate_s == 0.0 or record.reason.startswith("remote:")


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 10), EVENTS, st.sampled_from([0.02, 1.0]))
@example(1, 10, [(0.5, "kill")], 1.0)  # some are sent again
def test_the_parts_sum_to_the_time_to_first_token_where_sessions_move_and_workers_die(
    seed: int, sessions: int, events: list[tuple[float, str]], rate: float
) -> None:
    requests, plan = crowd(sessions, seed), planned(events)
    moves = Moves(link_gbit_per_second=rate, kv_bytes_per_token=1000, overload_seconds=0.05)
    parts_add_up(simulate_moves(requests, plan, moves, policy="score", engines=[ENGINE] * 3))
    parts_add_up(simulate_events(requests, plan, policy="score", engines=[ENGINE] * 3))
