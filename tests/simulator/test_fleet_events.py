"""What happens to a fleet in virtual time, and what each policy loses by it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.request_log.event_effects import EventEffect, event_effects
from prefixwatch.loadgen.request_log.records import Outcome, table_of
from prefixwatch.loadgen.scenario.fleet_section import Event, event_plan
from prefixwatch.simulator.fleet_events import UNSEEN_SECONDS, simulate_events
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest

ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1e-4), capacity_blocks=20_000)
MANY, FEW = 400, 80
TURNS, SECONDS = 6, 60.0


@cache
def chats(sessions: int = FEW) -> list[SimulatedRequest]:
    """Sessions side by side, each with a turn every ten seconds."""
    starts = np.random.default_rng(1).uniform(0, SECONDS / TURNS, sessions)
    found = []
    for k, request in enumerate(session_requests(sessions, TURNS, system_blocks=0, turn_blocks=3, output_tokens=8)):
        session, turn = divmod(k, TURNS)
        found.append(replace(request, arrival_s=float(starts[session]) + turn * SECONDS / TURNS))
    return sorted(found, key=lambda request: request.arrival_s)


def run(
    policy: str, *events: dict[str, object], workers: int = 10, sessions: int = FEW, **more: Any
) -> SimulationResult:
    plan = event_plan([Event.model_validate(event) for event in events], workers)
    engines = [ENGINE] * workers
    return simulate_events(chats(sessions), plan, policy=policy, engines=engines, **more)


def effect(policy: str, event: dict[str, object], workers: int = 10, **more: Any) -> EventEffect:
    plan = event_plan([Event.model_validate(event)], workers)
    result = run(policy, event, workers=workers, **more)
    [found] = event_effects(table_of(result.records), [result.policy], plan)
    return found


def test_without_events_it_is_the_ordinary_fleet() -> None:
    assert run("score") == simulate_requests(chats(), policy="score", workers=10, engine=ENGINE)


@pytest.mark.parametrize("event", [{"at": 30, "kill": "engine-3"}, {"at": 30, "drain": "engine-3"}])
def test_a_ring_moves_the_sessions_of_the_worker_that_leaves_and_modulo_nearly_all(event: dict[str, object]) -> None:
    ring, modulo = (effect(policy, event, sessions=MANY) for policy in ("session", "session{placement=modulo}"))
    assert ring.fair_share == modulo.fair_share == 0.1
    assert ring.sessions == MANY
    assert ring.moved_share == pytest.approx(0.1, abs=0.02)
    assert modulo.moved_share is not None
    assert modulo.moved_share > 0.7


def test_a_ring_gives_joining_workers_their_share() -> None:
    ring = effect("session", {"at": 30, "add": 2}, sessions=MANY)
    assert ring.fair_share == pytest.approx(2 / 12)
    assert ring.moved_share == pytest.approx(2 / 12, abs=0.03)


def test_a_restarted_router_keeps_a_ring_and_forgets_a_tree_unless_engines_report_what_they_hold() -> None:
    event: dict[str, object] = {"at": 30, "restart": "router"}
    assert effect("session", event).moved_share == 0
    forgotten = effect("score", event, sessions=200).moved_share
    reported = effect("score", event, sessions=200, view="events").moved_share
    assert forgotten is not None
    assert reported is not None
    assert forgotten > 0.7
    assert reported == 0


def test_what_had_not_begun_to_stream_goes_to_another_worker() -> None:
    result = run("session", {"at": 30.0, "kill": "engine-3"}, {"at": 40.0, "start": "engine-3"})
    outcomes = {record.outcome for record in result.records}
    cut_off = [record for record in result.records if record.outcome is Outcome.CUT_OFF]
    assert outcomes <= {Outcome.COMPLETED, Outcome.CUT_OFF}
    assert all(record.first_token_s is not None and record.end_s == 30.0 for record in cut_off)
    assert not any(record.worker == "worker-3" and 30 <= record.scheduled_s < 40 for record in result.records)
    assert any(record.worker == "worker-3" and record.scheduled_s >= 40 for record in result.records)
    assert sum(worker.requests for worker in result.workers) == len(result.records)


def test_a_killed_workers_waiting_requests_are_retried() -> None:
    slow = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=0.05), capacity_blocks=20_000)
    plan = event_plan([Event(at=30.0, kill="engine-0")], 2)
    records = simulate_events(chats()[:60], plan, policy="round_robin", engines=[slow] * 2).records
    retried = [record for record in records if record.retries]
    assert retried
    assert {(record.worker, record.outcome) for record in retried} == {("worker-1", Outcome.COMPLETED)}


def test_a_drained_worker_ends_what_it_has() -> None:
    result = run("round_robin", {"at": 30.0, "drain": "engine-0"})
    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}
    assert max(record.scheduled_s for record in result.records if record.worker == "worker-0") < 30


def test_a_started_worker_is_cold() -> None:
    result = run("session", {"at": 20.0, "drain": "engine-3"}, {"at": 35.0, "start": "engine-3"})
    back = [r for r in result.records if r.worker == "worker-3" and r.scheduled_s >= 35]
    assert back[0].cached_tokens == 0
    assert back[-1].cached_tokens


def test_a_slow_worker_is_slow_for_as_long_as_the_event_says() -> None:
    event = {"at": 20.0, "slow": {"worker": "engine-0", "factor": 5.0, "seconds": 20.0}}
    records = [record for record in run("round_robin", event).records if record.worker == "worker-0"]
    tpot = {
        name: np.mean([r.tpot_s for r in records if low <= r.scheduled_s < high and r.tpot_s is not None])
        for name, low, high in (("before", 0, 19), ("during", 21, 39), ("after", 42, 70))
    }
    assert tpot["during"] > 4 * tpot["before"]
    assert tpot["after"] == pytest.approx(tpot["before"], rel=0.3)


def test_an_unreachable_worker_answers_nothing_is_avoided_once_noticed_and_keeps_its_cache() -> None:
    event = {"at": 20.0, "partition": {"worker": "engine-3", "seconds": 15.0}}
    records = [record for record in run("session", event).records if record.worker == "worker-3"]
    answers = [record.first_token_s for record in records if record.first_token_s is not None]
    assert len(answers) == len(records)
    assert not any(20.0 < answered < 35.0 for answered in answers)
    assert not any(20.0 + UNSEEN_SECONDS < record.scheduled_s < 35.0 for record in records)
    assert any(20.0 < record.scheduled_s <= 20.0 + UNSEEN_SECONDS for record in records)
    back = next(record for record in records if record.scheduled_s > 35.0)
    assert back.cached_tokens


@pytest.mark.parametrize("policy", ["oracle", "dynamo_kv", "score", "preble", "prefix_hash", "affinity"])
def test_every_kind_of_policy_lives_through_all_of_it(policy: str) -> None:
    result = run(
        policy,
        {"at": 10, "kill": "engine-0"},
        {"at": 15, "add": 2},
        {"at": 20, "start": "engine-0"},
        {"at": 25, "drain": "engine-1"},
        {"at": 30, "partition": {"worker": "engine-2", "seconds": 10}},
        {"at": 35, "restart": "router"},
        {"at": 45, "slow": {"worker": "engine-4", "factor": 2}},
        workers=4,
    )
    assert {record.outcome for record in result.records} <= {Outcome.COMPLETED, Outcome.CUT_OFF}
    placed = {(record.worker, record.scheduled_s) for record in result.records}
    assert not any(worker == "worker-0" and 10 <= at < 20 for worker, at in placed)
    assert not any(worker == "worker-1" and at >= 25 for worker, at in placed)
    assert not any(worker in ("worker-4", "worker-5") and at < 15 for worker, at in placed)
    assert len({worker for worker, _ in placed}) >= 4


def test_events_reach_snapshots_and_several_routers() -> None:
    result = run("score", {"at": 20, "kill": "engine-0"}, view="snapshots")
    assert {record.scheduled_s < 20 for record in result.records if record.worker == "worker-0"} == {True}
    several = run("score", {"at": 20, "kill": "engine-0"}, {"at": 30, "restart": "router"}, routers=3)
    assert {record.outcome for record in several.records} <= {Outcome.COMPLETED, Outcome.CUT_OFF}
