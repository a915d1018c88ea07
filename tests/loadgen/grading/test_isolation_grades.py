"""Which reuse a grade counts as a violation of isolation between tenants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefixwatch.loadgen.grading.grade import grade
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.loadgen.reuse.limits import unexplained_reuse
from tests.loadgen.grading.test_grade import MakeRecord, only


def two_tenants(make_record: MakeRecord, *first_of_globex: dict[str, Any]) -> list[RequestRecord]:
    """Acme has sent an opening of 100 tokens several times; then come globex's first requests of the same group."""
    of_acme = [
        make_record(index=i, planned_shared_tokens=100 if i else 0, cached_tokens=96 if i else 0) for i in range(4)
    ]
    fresh = {"tenant": "globex", "planned_shared_tokens": 0}
    return [*of_acme, *(make_record(index=10 + k, **{**fresh, **each}) for k, each in enumerate(first_of_globex))]


def test_reuse_of_what_only_another_tenant_sent_is_a_violation(make_record: MakeRecord) -> None:
    """Certain only beyond a block: 16 may be rounding, 32 can't be."""
    reused = [{"cached_tokens": tokens} for tokens in (0, 16, 17, 96)]
    records = two_tenants(make_record, *reused)

    assert only(records).isolation_violations == 2
    assert grade(records, [], warm=True)["round_robin"].isolation_violations is None


def test_what_nobody_sent_is_not_another_tenants(make_record: MakeRecord) -> None:
    """vllm-project/vllm#43370 (N21): behind a prefill/decode split cached tokens are always prompt tokens − 1."""
    records = [replace(r, cached_tokens=159) for r in two_tenants(make_record, {}, {}, {})]
    columns = Columns.of(records)

    assert only(records).isolation_violations is None
    assert unexplained_reuse(columns).impossible.all()
    assert unexplained_reuse(columns).whole_prompt


def test_one_tenant_alone_can_not_leak(make_record: MakeRecord) -> None:
    records = [make_record(index=i, planned_shared_tokens=0, cached_tokens=64) for i in range(3)]

    assert only(records).isolation_violations == 0
    assert unexplained_reuse(Columns.of(records)).impossible.all()


def test_a_request_sent_before_its_turn_in_the_plan_may_be_reused(make_record: MakeRecord) -> None:
    """Users of a closed loop don't send in the order of the plan: the second request came first."""
    first = make_record(index=0, sent_s=5.0, first_token_s=5.1, planned_shared_tokens=0, cached_tokens=96)
    second = make_record(index=1, sent_s=1.0, planned_shared_tokens=100, cached_tokens=0)
    third = make_record(index=2, sent_s=6.0, first_token_s=6.1, planned_shared_tokens=100, cached_tokens=96)

    assert not unexplained_reuse(Columns.of([first, second, third])).impossible.any()
    earlier = replace(first, sent_s=0.5, first_token_s=0.6)
    assert unexplained_reuse(Columns.of([earlier, second, third])).impossible.tolist() == [
        True,
        False,
        False,
    ]


def overtaken(make_record: MakeRecord, **second: Any) -> list[RequestRecord]:
    """Globex's first request of acme's group, sent at 2 s, and its second one, on whose blocks the first one lands."""
    first = {"scheduled_s": 2.0, "sent_s": 2.0, "first_token_s": 2.3, "end_s": 2.5, "cached_tokens": 96}
    later = {"scheduled_s": 2.01, "sent_s": 2.01, "first_token_s": 2.1, "end_s": 2.4, "planned_shared_tokens": 100}
    return two_tenants(make_record, first, {**later, "cached_tokens": 0, **second})


@pytest.mark.parametrize(
    ("second", "violations"),
    [
        ({}, 0),  # sent 10 ms behind it, and the router was sooner with it
        ({"sent_s": 2.31, "first_token_s": 2.4}, 1),  # sent when the first one's prompt had been computed
        ({"tenant": "acme"}, 1),  # another tenant's explains nothing
        ({"group": "g2"}, 0),  # of an inner layer: all of its opening may be what the first one has, too
        ({"group": "g2", "planned_shared_tokens": 40}, 1),  # shares too little with others to explain it
    ],
)
def test_a_request_may_reuse_what_overtook_it(make_record: MakeRecord, second: dict[str, Any], violations: int) -> None:
    assert only(overtaken(make_record, **second)).isolation_violations == violations


def test_another_group_explains_what_its_first_request_shares_only(make_record: MakeRecord) -> None:
    """Its later ones share a whole opening with each other, and nothing with this group."""
    unknown = {"group": "g2", "planned_shared_tokens": 0, "sent_s": 2.02, "scheduled_s": 2.02, "first_token_s": 2.2}
    records = overtaken(make_record, **unknown)
    again = replace(records[-1], index=12, planned_shared_tokens=100)

    assert only([*records, again]).isolation_violations == 1


def test_a_request_that_was_sent_twice_is_not_judged(make_record: MakeRecord) -> None:
    """The first attempt may have left its own prompt in a cache that workers share."""
    for retries, violations in ((0, 1), (1, 0)):
        records = two_tenants(make_record, {"cached_tokens": 96, "retries": retries})
        assert only(records).isolation_violations == violations


def test_a_request_that_the_cool_down_may_have_overtaken_is_not_judged(make_record: MakeRecord) -> None:
    """Requests of the cool-down aren't graded, but fill the caches."""
    times = {"scheduled_s": 2.0, "sent_s": 2.0, "first_token_s": 2.3, "end_s": 2.5}
    records = two_tenants(make_record, {"cached_tokens": 96, **times})
    last = make_record(index=20, phase="cool_down", scheduled_s=2.1, sent_s=2.1)

    assert only(records).isolation_violations == 1
    assert only([*records, last]).isolation_violations == 0


def test_what_the_chat_template_puts_in_front_of_every_prompt_is_nobodys(make_record: MakeRecord) -> None:
    """Tools of a field stand behind a preamble of several blocks, which runs before have left in the caches."""
    reused = {"planned_shared_tokens": 0, "prompt_tokens": 160, "cached_tokens": 48}
    for template, violations in ((0, 1), (40, 0), (20, 1)):
        records = two_tenants(make_record, {**reused, "planned_template_tokens": template})
        assert only(records).isolation_violations == violations
