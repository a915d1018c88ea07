"""A fleet that grows and shrinks in virtual time: what it costs, and that nothing is lost on the way."""

from __future__ import annotations

import pytest

from benchmarks.scaled_fleet import Look, Pace, ScaledFleet
from benchmarks.simulated import session_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.router.policies import make_policy

ENGINE = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1e-4), capacity_blocks=5000)


class Planned:
    """Two workers, four from 100 s on, three from 300 s on."""

    def desired(self, look: Look) -> int:
        return 2 if look.now_s < 100 else 4 if look.now_s < 300 else 3

    def leaving(self, look: Look) -> str:
        return min(look.loads)


def test_workers_cost_from_when_they_are_asked_for_until_their_last_work_is_done() -> None:
    requests = session_requests(20, 5, think_seconds=5.0)
    fleet = ScaledFleet(
        lambda: [make_policy("score")], ENGINE, Moves(), Planned(), workers=2, most=4, pace=Pace(5.0, 10.0, 60.0)
    )
    result = fleet.run_day(requests)

    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}
    assert fleet.sizes == [(0.0, 2), (100.0, 4), (300.0, 3)]
    ends_s = requests[-1].arrival_s
    assert fleet.worker_seconds == pytest.approx(3 * ends_s - 2 * 100 + 300, abs=10.0)
    joined = [r.scheduled_s for r in result.records if r.worker in ("worker-2", "worker-3")]
    assert min(joined, default=160.0) >= 160.0
    assert not [r for r in result.records if r.worker == "worker-0" and r.scheduled_s > 300.0]


class Undecided:
    """Four workers, six from 10 s on, three from 20 s on, while two are still starting."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def desired(self, look: Look) -> int:
        return 6 if look.now_s < 20 else 3

    def leaving(self, look: Look) -> str:
        self.asked.append((look.asked, len(look.loads)))
        return min(look.loads)


def test_workers_that_are_starting_still_count_while_others_leave() -> None:
    requests = session_requests(10, 3, think_seconds=5.0)
    scaler = Undecided()
    fleet = ScaledFleet(
        lambda: [make_policy("score")], ENGINE, Moves(), scaler, workers=4, most=6, pace=Pace(5.0, 10.0, 60.0)
    )
    fleet.run_day(requests)
    assert scaler.asked[:3] == [(6, 4), (5, 3), (4, 2)]
    assert fleet.sizes[:3] == [(0.0, 4), (10.0, 6), (20.0, 3)]
