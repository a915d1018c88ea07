"""What engines say of their load counts for a while only."""

from __future__ import annotations

import math
from time import perf_counter

import pytest

from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.placement.cache_view import NoView
from prefixwatch.router.placement.dispatch import Dispatcher
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import NO_TOKENS, Decision, Fleet, LoadReport, Needs, Policy, RouteRequest
from prefixwatch.router.serving.router import Router


class Witness(Policy):
    """Takes the first worker and notes which reports it was shown."""

    name = "witness"
    source = "test"
    needs = Needs(engine_load=True)
    reasons = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[LoadReport | None] = []

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        self.shown = [worker.report for worker in fleet.workers]
        return Decision(fleet.workers[0].name, "first")


def request() -> RouteRequest:
    return RouteRequest("r", 64, NO_TOKENS, block_hashes(NO_TOKENS, 16), 16)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fleet(policy: Policy, clock: Clock, max_age_seconds: float = 10.0) -> tuple[Ledger, Dispatcher]:
    ledger = Ledger()
    for name in "ab":
        ledger.join(name)
    dispatcher = Dispatcher(
        policy, ledger, NoView(), lambda name: True, clock=clock, report_max_age_seconds=max_age_seconds
    )
    return ledger, dispatcher


def test_a_report_too_old_is_no_report() -> None:
    witness, clock = Witness(), Clock()
    ledger, dispatcher = fleet(witness, clock)
    a, b = ledger.workers
    a.report, b.report = LoadReport(0.0, waiting=3), LoadReport(5.0, waiting=1)
    clock.now = 9.9
    dispatcher.place(request())
    assert witness.shown == [LoadReport(0.0, waiting=3), LoadReport(5.0, waiting=1)]
    clock.now = 10.0
    dispatcher.place(request())
    assert witness.shown == [None, LoadReport(5.0, waiting=1)]
    b.report = LoadReport(14.0, waiting=2)
    clock.now = 15.0
    dispatcher.place(request())
    assert witness.shown == [None, LoadReport(14.0, waiting=2)]


@pytest.mark.parametrize(("max_age_seconds", "at_silent_b"), [(10.0, 20), (math.inf, 40)])
def test_an_engine_that_fell_silent_while_idle_draws_all_traffic_only_if_it_is_believed(
    max_age_seconds: float, at_silent_b: int
) -> None:
    """smg-project/smg#1683: b's last word was that it is idle, a minute ago; a goes on reporting."""
    clock = Clock()
    ledger, dispatcher = fleet(make_policy("power_of_two", seed=1), clock, max_age_seconds)
    a, b = ledger.workers
    b.report = LoadReport(0.0, kv_usage_ratio=0.0)
    clock.now = 60.0
    a.report = LoadReport(60.0, kv_usage_ratio=0.1)
    assert [dispatcher.place(request()).worker for _ in range(40)].count("b") == at_silent_b


def test_the_live_router_takes_the_age_from_its_configuration() -> None:
    workers = [{"name": "a", "url": "http://127.0.0.1:1"}]
    config = RouterConfig.model_validate({"workers": workers, "health": {"report_max_age_seconds": 3}})
    witness = Witness()
    router = Router(config, witness, None)
    router.health.states["a"].up = True
    worker = router.ledger.join("a")
    for age_seconds, shown in ((2.0, True), (4.0, False)):
        worker.report = LoadReport(perf_counter() - age_seconds)
        router.dispatcher.place(request())
        assert (witness.shown[0] is not None) == shown
