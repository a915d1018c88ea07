from __future__ import annotations

import numpy as np
import pytest

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.kvcache.blocks import Hashes
from prefixwatch.router.policy import NO_TOKENS, RouteRequest
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.snapshot_view import SnapshotView
from prefixwatch.simulator.traffic.trace import SimulatedRequest


def request(*blocks: int) -> RouteRequest:
    hashes: Hashes = np.array(blocks, dtype=np.uint64)
    return RouteRequest("r", 16 * len(blocks), NO_TOKENS, hashes, 16)


def test_a_change_shows_from_the_next_poll_on() -> None:
    view = SnapshotView()
    view.advance(5.0)
    view.store("w", [1, 2])
    view.advance(5.09)
    assert view.depths(request(1, 2)) == {}
    view.advance(5.1)
    assert view.depths(request(1, 2)) == {"w": 2}
    view.remove("w", [2])
    view.advance(5.22)
    assert view.depths(request(1, 2)) == {"w": 2}  # the second poll comes 130 ms after the first
    view.advance(5.231)
    assert view.depths(request(1, 2)) == {"w": 1}
    assert view.block_count("w") == 1


def test_what_came_and_went_between_two_polls_was_never_there() -> None:
    view = SnapshotView()
    view.store("w", [1])
    view.remove("w", [1])
    view.advance(1.0)
    assert view.block_count("w") == 0


def test_workers_are_polled_apart_and_forgotten_alone() -> None:
    view = SnapshotView()
    view.store("a", [1])
    view.advance(0.05)
    view.store("b", [1])
    view.advance(0.1)
    assert view.depths(request(1)) == {"a": 1}
    view.advance(0.16)
    assert view.depths(request(1)) == {"a": 1, "b": 1}
    view.worker_removed("a")
    assert view.depths(request(1)) == {"b": 1}


@pytest.mark.parametrize(("view", "predicted_second"), [("events", 64), ("snapshots", 0)])
def test_a_request_right_behind_another_is_misjudged_by_an_old_snapshot(view: str, predicted_second: int) -> None:
    """The design gap of FlexLB: a prompt computed 50 ms ago is unknown until the next report."""
    blocks: Hashes = np.arange(1, 5, dtype=np.uint64)
    first, second, third = (
        SimulatedRequest(id=str(at_s), arrival_s=at_s, blocks=blocks, prompt_tokens=65, output_tokens=1)
        for at_s in (0.0, 0.06, 4.0)
    )
    engine = EngineConfig(step_time=profile(DEFAULT_PROFILE).step_time, block_size=16, capacity_blocks=100)
    run = simulate_requests(
        [first, second, third],
        policy="llmd_precise",
        workers=1,
        engine=engine,
        arrivals="trace",
        view=view,
    )
    assert [record.predicted_tokens for record in run.records] == [0, predicted_second, 64]
    assert [record.cached_tokens for record in run.records] == [0, 64, 64]
