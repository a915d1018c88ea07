"""Which tier served what another tenant had cached, by engines' counters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.isolation.serving_tiers import ServingTiers
from prefixwatch.exporters.requests.ledger import RequestLedger
from tests.exporters.requests import done, figures, ledger_of

ENDED = 1_700_000_000.0


def leak(**fields: Any) -> Any:
    """512 tokens reused, of which the tenant had sent 64."""
    return done(**{"tenant": "bolt", "salted": True, "cached_tokens": 512, "own_tokens": 64, **fields})


def tiers_after(
    *looks: tuple[float, dict[str, float]], clock: float = ENDED + 5, worker: str = "w0"
) -> tuple[ServingTiers, RequestLedger]:
    """A ledger with one leak; pages read so many seconds before or after the request ended."""
    tiers = ServingTiers(clock=lambda: clock)
    for at, tokens in looks:
        tiers.scraped(worker, ENDED + at, ENDED + at + 0.1, tokens)
    return tiers, ledger_of([leak()], tier_of=tiers.of)


def counted(ledger: RequestLedger) -> dict[str, float]:
    found = figures(ledger).get("isolation_findings_total", {})
    return {key[2]: value for key, value in found.items() if value}


@pytest.mark.parametrize(
    ("before", "after", "tier"),
    [
        ({"gpu": 1000, "remote": 0}, {"gpu": 1512, "remote": 0}, "gpu"),
        ({"gpu": 1000, "remote": 0}, {"gpu": 1000, "remote": 512}, "external"),
        ({"gpu": 1000, "cpu": 0, "disk": 7}, {"gpu": 1064, "cpu": 448, "disk": 7}, "external"),  # its own on the GPU
        ({"gpu": 1000, "remote": 0}, {"gpu": 9000, "remote": 9000}, "unknown"),  # others' hits hide it
        ({"gpu": 1000, "remote": 0}, {"gpu": 9000, "remote": 400}, "gpu"),  # at least 112 of them on the GPU
        ({"gpu": 1000, "remote": 0}, {"gpu": 9000, "remote": 440}, "unknown"),  # 72 on the GPU: no block beyond its own
        ({"gpu": 1000, "remote": 0}, {"gpu": 1100, "remote": 100}, "unknown"),  # these don't add up
        ({"gpu": 1000, "remote": 0}, {"gpu": 512, "remote": 0}, "unknown"),  # restarted
        ({"gpu": 1000}, {"gpu": 1512}, "unknown"),  # one tier alone isn't told apart from others
    ],
)
def test_counters_tell_the_tier_where_they_leave_no_other(
    before: dict[str, float], after: dict[str, float], tier: str
) -> None:
    _, ledger = tiers_after((-10, before), (3, after))
    assert counted(ledger) == {tier: 1}
    (shown,) = ledger.document(100.0)["isolation"]["latest_findings"]
    assert (shown["kind"], shown["tier"]) == ("cross_tenant_hit", tier)
    assert ledger.document(100.0)["isolation"]["certain_findings_by_tier"][tier] == 1


def test_a_finding_waits_for_the_page_that_tells_its_tier_and_not_for_ever() -> None:
    tiers, ledger = tiers_after((-10, {"gpu": 1000, "remote": 0}), (1, {"gpu": 1512, "remote": 0}))
    assert counted(ledger) == {}
    assert figures(ledger)["isolation_violations_total"]["cross_tenant_hit",] == 1, "it is a violation at once"
    tiers.scraped("w0", ENDED + 3, ENDED + 3.1, {"gpu": 1512, "remote": 0})
    assert counted(ledger) == {"gpu": 1}
    _, late = tiers_after((-10, {"gpu": 1000, "remote": 0}), clock=ENDED + 121)
    assert counted(late) == {"unknown": 1}


def test_without_counters_of_its_worker_or_a_page_before_it_the_tier_is_unknown() -> None:
    _, elsewhere = tiers_after((-10, {"gpu": 0, "remote": 0}), (3, {"gpu": 512, "remote": 0}), worker="w1")
    _, unseen = tiers_after((-1, {"gpu": 0, "remote": 0}), (3, {"gpu": 512, "remote": 0}))
    assert counted(elsewhere) == counted(unseen) == {"unknown": 1}
    tiers, _ = tiers_after((-10, {"gpu": 0, "remote": 0}), (3, {"gpu": 512, "remote": 0}))
    tiers.forget("w0")
    assert counted(ledger_of([leak()], tier_of=tiers.of)) == {"unknown": 1}


def test_every_tier_begins_at_0_once_a_reuse_could_be_judged() -> None:
    found = figures(ledger_of([done(own_tokens=0)]))["isolation_findings_total"]
    assert {key[2] for key in found if key[:2] == ("certain", "salt_ignored")} == {"gpu", "external", "unknown"}


_TOKENS = st.integers(0, 40).map(lambda blocks: 16 * blocks)


@given(own=_TOKENS, beyond=st.integers(1, 40), gpu=_TOKENS, noise=st.tuples(_TOKENS, _TOKENS))
def test_the_named_tier_is_never_the_wrong_one(own: int, beyond: int, gpu: int, noise: tuple[int, int]) -> None:
    """An engine serves the first `gpu` tokens from its GPU and the rest from outside, while others hit as they like."""
    cached = own + 16 * beyond
    gpu = min(gpu, cached)
    tiers = ServingTiers(clock=lambda: ENDED)
    tiers.scraped("w0", ENDED - 10, ENDED - 9, {"gpu": 7, "cpu": 5})
    tiers.scraped("w0", ENDED + 3, ENDED + 4, {"gpu": 7 + gpu + noise[0], "cpu": 5 + cached - gpu + noise[1]})
    ledger = ledger_of([leak(cached_tokens=cached, own_tokens=own, prompt_tokens=cached + 16)], tier_of=tiers.of)
    (tier,) = counted(ledger)
    assert tier != "gpu" or gpu > own
    assert tier != "external" or gpu <= own
    if noise == (0, 0):
        assert tier == "unknown" or (tier == "external") is (gpu <= own)
        assert tier != "unknown" or own < gpu < own + 16
