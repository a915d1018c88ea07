"""A worker that accepts requests and never answers: what it costs, whatever its `/health` says."""

from __future__ import annotations

import heapq
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.router.config import HealthConfig, WorkerConfig
from prefixwatch.router.placement.cache_view import NoView
from prefixwatch.router.placement.dispatch import Dispatcher, Placement
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import NO_TOKENS, RouteRequest
from prefixwatch.router.serving.health import HealthMonitor


class Fleet:
    """Workers in virtual time, all healthy by their own account, behind a dispatcher that takes turns."""

    def __init__(self, *names: str, silence: float = 30.0) -> None:
        self.now = 0.0
        self.monitor = HealthMonitor(
            [WorkerConfig(name=name, url="http://engine") for name in names],
            HealthConfig(silent_seconds=silence),
            on_up=self._up,
            on_gone=lambda name: None,
            clock=lambda: self.now,
        )
        self.dispatcher = Dispatcher(
            make_policy("round_robin"),
            Ledger(),
            NoView(),
            self.monitor.is_up,
            clock=lambda: self.now,
            on_trial=self.monitor.on_trial,
        )
        self.probed()

    def _up(self, name: str) -> None:
        self.dispatcher.worker_up(name)

    def probed(self) -> None:
        for name in self.monitor.states:
            self.monitor.passed(name)

    def place(self, number: int = 0) -> Placement:
        return self.dispatcher.place(RouteRequest(f"r{number}", 0, NO_TOKENS, block_hashes(NO_TOKENS, 16), 16))


def test_on_trial_a_worker_gets_one_request_until_it_answers_one() -> None:
    fleet = Fleet("a", "b", silence=0.0)
    fleet.monitor.timed_out("a", fleet.now, "no answer")
    fleet.probed()
    assert sorted(fleet.place(k).worker for k in range(6)) == ["a", *["b"] * 5]
    fleet.monitor.heard("a")
    assert sorted(fleet.place(k).worker for k in range(6)) == [*["a"] * 3, *["b"] * 3]


def test_where_all_are_on_trial_requests_go_to_them_and_none_is_refused() -> None:
    fleet = Fleet("a", "b", silence=0.0)
    for name in "ab":
        fleet.monitor.timed_out(name, fleet.now, "no answer")
    fleet.probed()
    assert sorted(fleet.place(k).worker for k in range(6)) == [*["a"] * 3, *["b"] * 3]


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=60), st.floats(1, 40), st.floats(1, 60))
def test_a_worker_that_hangs_costs_one_request_per_silence_after_its_first_time_out(
    gaps: list[float], patience: float, silence: float
) -> None:
    """Requests come after these gaps; `a` answers none, `b` each at once. Both are healthy whenever they are asked."""
    fleet = Fleet("a", "b", silence=silence)
    waiting: list[tuple[float, int, float, Placement]] = []
    sent: list[float] = []
    timed_out: list[float] = []
    for number, gap in enumerate(gaps):
        comes = fleet.now + gap
        while waiting and waiting[0][0] <= comes:
            fleet.now, _, sent_at, placement = heapq.heappop(waiting)
            fleet.dispatcher.end(placement)
            fleet.monitor.timed_out("a", sent_at, "no answer")
            timed_out.append(fleet.now)
        fleet.now = comes
        fleet.probed()
        placement = fleet.place(number)
        if placement.worker == "a":
            sent.append(fleet.now)
            heapq.heappush(waiting, (fleet.now + patience, number, fleet.now, placement))
        else:
            fleet.monitor.heard("b")
            fleet.dispatcher.end(placement)
    later = [at for at in sent if timed_out and at >= timed_out[0]]
    assert all(after - before >= patience + silence - 1e-6 for before, after in pairwise(later))
