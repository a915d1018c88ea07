"""The table of what events cost by policy (`benchmarks.event_costs`): from a request log and a summary."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.event_costs import EVENTS, effect_of, scenario, table
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.scenario.model import Scenario


def record(policy: str, due: float, ttft: float | None, cached: int | None) -> RequestRecord:
    return RequestRecord(
        id=f"{policy}-{due}",
        policy=policy,
        repeat=0,
        index=int(due),
        phase="measured",
        tenant="-",
        session="s",
        turn=0,
        group="g",
        request_class="interactive",
        scheduled_s=due,
        outcome=Outcome.FAILED if ttft is None else Outcome.COMPLETED,
        first_token_s=None if ttft is None else due + ttft,
        prompt_tokens=None if ttft is None else 100,
        cached_tokens=cached,
    )


LOG = [
    *(record("ring", due, 0.1, 80) for due in (6, 8, 10)),
    *(record("ring", due, 0.3, 20) for due in (20, 22)),
    record("ring", 24, None, None),
    *(record("tree", due, 0.2, None) for due in (7, 21)),
]


def event(policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "event": "1 worker added",
        "at_s": 20.0,
        "moved_share": 0.25 if policy == "ring" else None,
    }


def test_the_requests_due_from_the_event_on_are_after_it() -> None:
    found = effect_of([own for own in LOG if own.policy == "ring"], 20.0, before=5.0, after=23.0)
    assert found.hit_ratio == (0.8, 0.2)
    assert found.ttft_p50_ms == pytest.approx((100, 300))
    assert found.lost == 0


def test_a_row_per_event_and_policy_with_unknown_where_nothing_was_reported() -> None:
    reasons = ["tree: the client was late", "ring and tree were sent different plans"]
    for given, said in (([], ("valid", "valid")), (reasons[:1], ("valid", "invalid")), (reasons, ("invalid",) * 2)):
        summary = {
            "events": [event("ring"), event("tree")],
            "policies": {"ring": {}, "tree": {}},
            "validity": {"valid": not given, "reasons": given},
        }
        lines = table(LOG, summary).splitlines()
        assert lines[2:4] == [
            f"| 1 worker added | ring | 80 → 20 | 100 → 300 | 100 → 300 | 25 % | 1 | {said[0]} |",
            f"| 1 worker added | tree | unknown → unknown | 200 → 200 | 200 → 200 | unknown | 0 | {said[1]} |",
        ]
        assert lines[4:] == (["", "Invalid:", "", *(f"- {why}" for why in given)] if given else [])


@pytest.mark.parametrize("seconds", [60.0, 120.0, 600.0])
def test_its_scenario_is_one_that_a_bench_takes(seconds: float) -> None:
    plan = Scenario.model_validate(scenario(seconds)).event_plan()
    assert plan.workers == 1
    assert [own.at_s for own in plan.events] == [round(at * seconds / 120, 1) for at, _ in EVENTS]
