"""Reuse across tenants: certain, exposed, and suspected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.requests.ledger import RequestLedger
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.request_record import RequestRecord
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
        "violations": {}, "audited_requests": 0, "not_audited_requests": 2, "audited_ratio": 0.0,
        "not_audited": {
            "own_unknown": {
                "requests": 1, "why": "the router doesn't know all that the tenant had sent to this worker's cache",
            },
            "no_cached_tokens": {"requests": 1, "why": "the engine reported no cached tokens"},
        },
        "findings": {}, "latest_findings": [],
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


def cold(ttft_seconds: float, sent_by: str = "another_tenant", **fields: Any) -> RequestRecord:
    return done(**{"ttft_seconds": ttft_seconds, "own_tokens": 0, "opening_sent_by": sent_by, **fields})


def timed(tests: int, fast: float, **fields: Any) -> list[RequestRecord]:
    """Before each prompt that another tenant had sent, ten that nobody had."""
    return [
        one
        for _ in range(tests)
        for one in (*(cold(0.5 + k / 100, "nobody", worker="w1") for k in range(10)), cold(fast, worker="w1", **fields))
    ]


def test_prompts_cold_for_their_tenant_but_fast_are_one_finding_when_the_evidence_suffices() -> None:
    """The fastest of 11 pays threefold on average; the first alarm takes 200."""
    ledger = ledger_of(timed(9, 0.05, tenant="b"))
    assert violations(ledger)["fast_cold_prompt"] == 1
    assert figures(ledger)["isolation_findings_total"]["statistical", "fast_cold_prompt", "unknown"] == 1
    (shown,) = ledger.document(100.0)["isolation"]["latest_findings"]
    assert (shown["kind"], shown["certainty"], shown["tenant"]) == ("fast_cold_prompt", "statistical", "b")


@pytest.mark.parametrize(
    "records",
    [
        timed(1, 0.05),  # one fast prompt proves nothing
        timed(40, 0.6),  # as slow as the others
        timed(40, 0.05, own_tokens=512),  # the tenant itself had sent it
        timed(40, 0.05, cached_tokens=512),  # a reported reuse is judged by its tokens
        timed(40, 0.05, retries=1),
    ],
)
def test_nothing_is_too_fast_without_evidence(records: list[RequestRecord]) -> None:
    assert violations(ledger_of(records)).get("fast_cold_prompt", 0) == 0


def test_first_tokens_count_once_it_is_certain_that_the_tenant_is_cold() -> None:
    records = timed(40, 0.05)
    assert violations(ledger_of(records, prove=lambda _: "other_router")).get("fast_cold_prompt") is None
    verdicts = ["pending"] * 40
    waiting = ledger_of(records, prove=lambda _: verdicts[0])
    assert violations(waiting).get("fast_cold_prompt") is None
    verdicts[0] = ""
    assert violations(waiting)["fast_cold_prompt"] >= 3


@pytest.mark.parametrize("kind", ["cross_tenant_hit", "salt_ignored", "salt_reused", "tenant_without_salt"])
@pytest.mark.parametrize(("verdict", "certainty"), [("", "certain"), ("other_router", "unproven")])
def test_a_reuse_is_counted_by_what_caused_it_with_its_evidence(kind: str, verdict: str, certainty: str) -> None:
    finding = {"finding": kind, "finding_tenant": "acme", "finding_requests": ("r2", "r1")}
    ledger = ledger_of(
        [done(tenant="bolt", salted=True, cached_tokens=512, own_tokens=0, **finding)], prove=lambda _: verdict
    )
    document = ledger.document(100.0)["isolation"]
    counted = {k: v for k, v in figures(ledger)["isolation_findings_total"].items() if v}
    assert counted == {(certainty, kind, "unknown"): 1}
    if verdict:
        assert document["latest_findings"] == []
    else:
        assert document["latest_findings"] == [
            {
                "kind": kind, "certainty": "certain", "model": "m", "tenant": "bolt", "other_tenant": "acme",
                "tier": "unknown", "requests": 1, "worker": "w0",
                "ended_unix_seconds": 1_700_000_000.0, "evidence": ["r2", "r1"],
            }
        ]  # fmt: skip


@pytest.mark.parametrize("kind", ["salt_reused", "tenant_without_salt", "salt_per_request"])
def test_what_salts_show_by_themselves_is_a_finding_of_the_configuration(kind: str) -> None:
    records = [
        done(tenant="bolt", salted=True, own_tokens=0, finding=kind, finding_requests=(f"r{k}",)) for k in (1, 2)
    ]
    ledger = ledger_of(records)
    counted = {k: v for k, v in figures(ledger)["isolation_findings_total"].items() if v}
    assert counted == {("configuration", kind, "unknown"): 2}
    assert violations(ledger)["cross_tenant_hit"] == 0
    (shown,) = ledger.document(100.0)["isolation"]["latest_findings"]
    assert (shown["requests"], shown["evidence"]) == (2, ["r2"])


def test_a_finding_that_was_judged_and_not_made_is_0_and_one_that_was_not_judged_is_absent() -> None:
    unknown = figures(ledger_of([done(cached_tokens=512)]))
    assert "isolation_findings_total" not in unknown
    salts_only = figures(ledger_of([done(tenant="a", salted=True, cached_tokens=None)]))["isolation_findings_total"]
    assert salts_only == {
        ("configuration", kind, "unknown"): 0 for kind in ("salt_reused", "tenant_without_salt", "salt_per_request")
    }


def test_the_latest_findings_are_bounded_and_certain_ones_stay() -> None:
    leak = done(tenant="a", cached_tokens=512, own_tokens=0, finding="salt_ignored")
    many = [done(tenant=f"t{k}", salted=False, own_tokens=0, finding="tenant_without_salt") for k in range(100)]
    shown = ledger_of([leak, *many]).document(100.0)["isolation"]["latest_findings"]
    assert len(shown) == 32
    assert (shown[0]["tenant"], shown[-1]["kind"]) == ("t99", "salt_ignored")


def test_a_routers_identity_files_are_exported_by_file_and_absent_where_there_are_none(
    make_target: Callable[..., Target],
) -> None:
    bare = 'prefixwatch_router_in_flight{worker="a"} 1\n'
    files = (
        'prefixwatch_router_identity_files_usable{file="secrets"} 0\n'
        'prefixwatch_router_identity_files_usable{file="jwks"} 1\n'
    )
    page = render([make_target("r", bare + files, bare + files)], "", [])[0].decode()
    assert 'prefixwatch_router_identity_files_usable{file="secrets",target="r"} 0.0' in page
    assert 'prefixwatch_router_identity_files_usable{file="jwks",target="r"} 1.0' in page
    assert "identity_files_usable{" not in render([make_target("r", bare, bare)], "", [])[0].decode()
