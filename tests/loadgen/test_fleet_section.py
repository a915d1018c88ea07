"""`fleet` and `events` of a scenario: what they say, and how a wrong one is refused."""

from __future__ import annotations

import pytest

from prefixwatch.documents import DocumentError, parse
from prefixwatch.loadgen.scenario.model import Scenario

HEAD = """
name: churn
duration_seconds: 60
arrivals: {kind: poisson, rate_per_second: 5}
groups: {count: 3, shared_tokens: 64, unique_tokens: 16, output_tokens: 8}
"""


def scenario(more: str) -> Scenario:
    return parse(HEAD + more, Scenario, name="churn.yaml")


def test_workers_are_numbered_in_the_order_of_the_list() -> None:
    found = scenario("fleet: [{count: 2, zone: a}, {count: 1, zone: b, profile: h100-llama-8b}]")
    assert (found.workers, found.profiles, found.prefill_workers) == (3, "h100-llama-8b", None)


def test_a_split_fleet_counts_its_prefill_workers() -> None:
    assert scenario("fleet: [{count: 2, role: prefill}, {count: 3, role: decode}]").prefill_workers == 2


def test_events_become_steps_with_an_end_and_new_numbers() -> None:
    found = scenario(
        "engine: {workers: 3}\nevents: [{at: 30, slow: {worker: engine-2, factor: 3, seconds: 5}}, "
        "{at: 10, kill: engine-1}, {at: 20, add: 2}, {at: 33, drain: engine-4}, {at: 40, restart: router}]"
    )
    plan = found.event_plan()
    assert [(each.at_s, each.action, each.worker, each.title) for each in plan.events] == [
        (10, "kill", 1, "engine-1 killed"),
        (20, "start", 3, "2 workers added"),
        (20, "start", 4, ""),
        (30, "slow", 2, "engine-2 3 times slower"),
        (33, "drain", 4, "engine-4 drained"),
        (35, "slow", 2, ""),
        (40, "restart_router", 0, "router restarted"),
    ]
    assert (plan.workers, plan.all_workers) == (3, 5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("events: [{at: 5, kil: engine-1}]", "kil"),
        ("events: [{at: 5}]", "needs exactly one action and has none: give one of kill, start, add"),
        ("events: [{at: 5, kill: engine-0, add: 1}]", "has kill, add"),
        ("events: [{at: 60, kill: engine-0}]", "at 60 is not before the end, duration_seconds 60"),
        ("engine: {workers: 2}\nevents: [{at: 5, kill: engine-2}]", "no worker 'engine-2'.*engine-0 to engine-1"),
        ("engine: {workers: 2}\nevents: [{at: 5, kill: worker 1}]", "no worker 'worker 1'"),
        (
            "engine: {workers: 2}\nevents: [{at: 5, start: engine-1}]",
            "engine-1 runs already: take the event out, or put a kill or drain before it",
        ),
        ("engine: {workers: 2}\nevents: [{at: 5, kill: engine-1}, {at: 9, drain: engine-1}]", "isn't running"),
        ("engine: {workers: 1}\nevents: [{at: 5, kill: engine-0}]", "no worker is left: keep at least one"),
        ("events: [{at: 5, slow: {worker: engine-0, factor: 1}}]", "greater than 1"),
        ("engine: {workers: 2}\nfleet: [{count: 2}]", "fleet and engine.workers both say how many"),
        ("fleet: [{role: prefill}, {count: 2}]", "role prefill and with role decode, and no others"),
        ("fleet: [{role: prefill}, {role: decode}]\nevents: [{at: 5, kill: engine-0}]", "a split fleet can't have any"),
    ],
)
def test_what_can_not_happen_is_refused(more: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        scenario(more)
