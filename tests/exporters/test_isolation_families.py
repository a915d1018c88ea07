"""Reuse across tenants: certain, exposed, and suspected."""

from __future__ import annotations

import pytest

from exporters.requests.ledger import RequestLedger
from kvcache.request_record import RequestRecord
from tests.exporters.requests import done, figures, ledger_of


def violations(ledger: RequestLedger) -> dict[str, float]:
    counted = figures(ledger).get("isolation_violations_total", {})
    return {kind: count for (kind,), count in counted.items()}


@pytest.mark.parametrize(
    ("cached", "own", "found"),
    [
        (512, 0, 1),  # somebody else's whole opening
        (528, 512, 1),  # one block more than ever sent
        (527, 512, 0),  # within the block that the own opening ends in: engines may count its tokens
        (512, 512, 0),
        (0, 0, 0),
    ],
)
def test_a_block_beyond_what_the_tenant_ever_sent_is_certainly_anothers(cached: int, own: int, found: int) -> None:
    ledger = ledger_of([done(cached_tokens=cached, own_tokens=own)])
    assert violations(ledger) == {"cross_tenant_hit": found}
    assert figures(ledger)["isolation_audited_requests_total"] == {(): 1}


def test_what_is_not_remembered_is_neither_a_violation_nor_audited() -> None:
    ledger = ledger_of([done(cached_tokens=512), done(cached_tokens=None, own_tokens=0)])
    assert violations(ledger) == {}
    assert ledger.document(100.0)["isolation"] == {
        "violations": {}, "audited_requests": 0, "not_audited_requests": 1,
    }  # fmt: skip


def tenants_at(worker: str, *tenants: str, salted: bool = False) -> list[RequestRecord]:
    return [done(worker=worker, tenant=tenant, salted=salted) for tenant in tenants]


def test_unsalted_traffic_counts_where_tenants_share_an_engine() -> None:
    alone = ledger_of([*tenants_at("w0", "a", "a"), *tenants_at("w1", "b")])
    assert violations(alone) == {"unsalted_traffic": 0}
    shared = ledger_of(tenants_at("w0", "a", "b", "a"))
    assert violations(shared) == {"unsalted_traffic": 2}  # a's first was still alone


def test_unsalted_traffic_counts_wherever_salts_are_in_use() -> None:
    ledger = ledger_of([*tenants_at("w0", "a", salted=True), *tenants_at("w1", "b")])
    assert violations(ledger) == {"unsalted_traffic": 1}


def test_salted_tenants_and_the_anonymous_are_not_exposed_by_it() -> None:
    ledger = ledger_of([*tenants_at("w0", "a", "b", salted=True), done(worker="w0", salted=False)])
    assert violations(ledger) == {"unsalted_traffic": 0}


def hits_and_misses(count: int, hit_seconds: float = 0.05, miss_seconds: float = 0.5) -> list[RequestRecord]:
    hits = [done(cached_tokens=992, ttft_seconds=hit_seconds + k * 1e-4) for k in range(count)]
    misses = [done(ttft_seconds=miss_seconds + k * 1e-3, own_tokens=0) for k in range(count)]
    return [*hits, *misses]


def test_a_cold_prompt_as_fast_as_a_hit_is_suspicious() -> None:
    cold = done(ttft_seconds=0.05, own_tokens=0)
    ledger = ledger_of([*hits_and_misses(50), cold, done(ttft_seconds=0.3, own_tokens=0)])
    assert violations(ledger)["fast_cold_prompt"] == 1


@pytest.mark.parametrize(
    "reference",
    [
        hits_and_misses(49),
        hits_and_misses(50, hit_seconds=0.5),  # hits and misses aren't apart
        [],
    ],
)
def test_nothing_is_suspected_without_a_clear_reference(reference: list[RequestRecord]) -> None:
    ledger = ledger_of([*reference, done(ttft_seconds=0.05, own_tokens=0)])
    assert "fast_cold_prompt" not in violations(ledger)


def test_a_prompt_that_the_tenant_had_sent_may_be_fast() -> None:
    ledger = ledger_of([*hits_and_misses(50), done(ttft_seconds=0.01, own_tokens=512)])
    assert violations(ledger).get("fast_cold_prompt", 0) == 0
