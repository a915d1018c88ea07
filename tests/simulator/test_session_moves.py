"""Sessions moved in virtual time: blocks really arrive, and the log shows what it cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig, EngineModel
from prefixwatch.engines.model.sequence import SimRequest
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.request_log.records import RequestRecord, table_of
from prefixwatch.loadgen.request_log.session_moves import MoveEffect, move_effects
from prefixwatch.loadgen.scenario.fleet_section import Event, EventPlan, PlannedEvent, event_plan
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.simulator.fleet_events import simulate_events
from prefixwatch.simulator.sessions.moving_fleet import simulate_moves
from prefixwatch.simulator.traffic.trace import SimulatedRequest

ENGINE = EngineConfig(StepTime(base_s=0.005, per_prefill_token_s=1e-4), capacity_blocks=20_000)
TURNS, SESSIONS, PERIOD = 6, 40, 10.0
MOVES = Moves(link_gbit_per_second=100, link_latency_seconds=0.001, kv_bytes_per_token=100_000)


def chats() -> list[SimulatedRequest]:
    """Sessions side by side, each with a turn of 640 tokens more every ten seconds."""
    starts = np.random.default_rng(1).uniform(0, PERIOD, SESSIONS)
    found = []
    for k, request in enumerate(session_requests(SESSIONS, TURNS, system_blocks=0, turn_blocks=40, output_tokens=4)):
        session, turn = divmod(k, TURNS)
        found.append(replace(request, arrival_s=float(starts[session]) + turn * PERIOD, turn=turn))
    return sorted(found, key=lambda request: request.arrival_s)


def run(
    moves: Moves, action: str = "drain", view: str = "history", at: float = 35.0
) -> tuple[list[RequestRecord], MoveEffect]:
    plan = event_plan([Event.model_validate({"at": at, action: "engine-1"})], 4)
    result = simulate_moves(chats(), plan, moves, policy="score", engines=[ENGINE] * 4, view=view)
    [effect] = move_effects(table_of(result.records), ["score"], plan)
    return result.records, effect


def first_turns(records: list[RequestRecord], kind: str) -> list[RequestRecord]:
    return [record for record in records if record.move == kind]


@pytest.mark.parametrize("view", ["history", "events"])
def test_a_soft_move_carries_the_blocks_to_the_destination(view: str) -> None:
    records, effect = run(MOVES, view=view)

    assert effect.moved == effect.soft > 0
    for record in first_turns(records, "soft"):
        assert record.reason == "moved_soft"
        assert record.cached_tokens == record.planned_prompt_tokens - 640
        assert record.prefill_s == pytest.approx(0.005 + 640e-4, rel=0.2)
        assert record.move_hard_s is not None
        assert record.move_soft_s is not None
        assert record.move_soft_s <= record.move_hard_s


def test_without_a_link_the_same_sessions_compute_their_prompts_again() -> None:
    records, effect = run(MOVES.model_copy(update={"soft": False}))
    _, soft = run(MOVES)

    assert effect.moved == effect.hard == soft.moved
    assert effect.why == {"no_connector": effect.hard}
    assert {record.cached_tokens for record in first_turns(records, "hard")} == {0}
    assert effect.next_turns["hard"].ttft_p50_ms > 3 * soft.next_turns["soft"].ttft_p50_ms  # type: ignore[operator]
    assert soft.next_turns["soft"].ttft_p50_ms == pytest.approx(soft.next_turns["undisturbed"].ttft_p50_ms, rel=0.25)


def test_a_slow_link_makes_the_drain_longer_and_leaves_some_sessions_to_compute() -> None:
    _, fast = run(MOVES)
    _, slow = run(MOVES.model_copy(update={"link_gbit_per_second": 1}))
    assert slow.hard > 0
    assert slow.why["prefill_sooner"] == slow.hard
    assert fast.seconds_to_drain is not None
    assert slow.seconds_to_drain is not None
    assert slow.seconds_to_drain > 5 * fast.seconds_to_drain


def test_the_sessions_of_a_killed_worker_are_moved_hard_for_their_blocks_are_lost() -> None:
    _, effect = run(MOVES, "kill")
    assert effect.why == {"source_dead": effect.moved}
    assert effect.seconds_to_drain is None


def test_a_turn_that_comes_before_its_blocks_waits_for_them_and_the_parts_of_its_miss_add_up() -> None:
    undisturbed = simulate_moves(chats(), event_plan([], 4), MOVES, policy="score", engines=[ENGINE] * 4)
    due = next(r for r in undisturbed.records if r.turn == 4 and r.worker == "worker-1").scheduled_s
    records, _ = run(MOVES.model_copy(update={"link_latency_seconds": 0.1}), at=due - 0.05)

    for record in records:
        assert record.ttft_s is not None
        parts = record.queue_s, record.prefill_s, record.migrate_s
        assert sum(part for part in parts if part is not None) == pytest.approx(record.ttft_s, abs=1e-9)
    [waiting] = [record for record in records if record.migrate_s]
    assert waiting.scheduled_s == due
    assert waiting.migrate_s == pytest.approx(0.05 + waiting.cached_tokens * 100_000 * 8 / 100e9)  # type: ignore[operator]


def test_without_events_nothing_differs_from_the_ordinary_fleet_but_nobody_pays_for_a_move() -> None:
    plan = event_plan([], 4)
    moved = simulate_moves(chats(), plan, MOVES, policy="session", engines=[ENGINE] * 4)
    plain = simulate_events(chats(), plan, policy="session", engines=[ENGINE] * 4)
    assert [r.worker for r in moved.records] == [r.worker for r in plain.records]
    assert [r.first_token_s for r in moved.records] == [r.first_token_s for r in plain.records]


def test_received_blocks_are_cached_evict_what_is_idle_and_never_what_is_in_use() -> None:
    model = EngineModel(replace(ENGINE, capacity_blocks=4))
    assert model.receive([1, 2, 3]) == ([1, 2, 3], [])
    assert model.receive([1, 7, 8]) == ([7, 8], [3])
    assert model.hit_depth([1, 7, 8]) == 3
    model.submit(SimRequest("r", [1, 7, 8], 48, 1, 0.0))
    model.begin_step(0.0)
    assert model.receive([20, 21]) == ([], [])


def test_no_turn_waits_for_blocks_that_go_to_a_worker_which_died_meanwhile() -> None:
    engines = [replace(ENGINE, step_time=StepTime(base_s=0.005, per_prefill_token_s=1e-3))] * 3
    moves = MOVES.model_copy(update={"link_latency_seconds": 0.5})
    few = [request for request in chats() if int(request.session.removeprefix("session-")) < 9]

    def served(*events: dict[str, object]) -> list[RequestRecord]:
        plan = event_plan([Event.model_validate(event) for event in events], 3)
        return simulate_moves(few, plan, moves, policy="score", engines=engines).records

    turn = next(record for record in served() if record.turn == 4 and record.worker == "worker-1")
    drain = {"at": turn.scheduled_s - 0.3, "drain": "engine-1"}
    moved = served(drain)[turn.index]
    assert moved.move == "soft"
    assert moved.migrate_s == pytest.approx(0.2, abs=0.1)

    lost = served(drain, {"at": turn.scheduled_s - 0.1, "kill": moved.worker.replace("worker", "engine")})[turn.index]
    assert (lost.move_trigger, lost.migrate_s) == ("death", 0.0)


def test_blocks_that_a_killed_worker_had_not_sent_are_lost() -> None:
    engines = [replace(ENGINE, step_time=StepTime(base_s=0.005, per_prefill_token_s=1e-3))] * 3
    moves = MOVES.model_copy(update={"link_latency_seconds": 0.5})
    few = [request for request in chats() if int(request.session.removeprefix("session-")) < 9]
    turn = next(
        record
        for record in simulate_moves(few, event_plan([], 3), moves, policy="score", engines=engines).records
        if record.turn == 4 and record.worker == "worker-1"
    )
    plan = event_plan([Event.model_validate({"at": turn.scheduled_s - 0.3, "drain": "engine-1"})], 3)

    def served(plan: EventPlan) -> RequestRecord:
        return simulate_moves(few, plan, moves, policy="score", engines=engines).records[turn.index]

    moved = served(plan)
    assert (moved.move, moved.cached_tokens) == ("soft", turn.cached_tokens)

    killed = PlannedEvent(turn.scheduled_s - 0.1, "kill", 1)
    lost = served(replace(plan, events=(*plan.events, killed)))
    assert (lost.worker, lost.migrate_s, lost.cached_tokens) == (moved.worker, 0.0, 0)
