"""No tenant pushes out what all the others reuse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tenant_flood import measured
from prefixwatch.router.placement.fair_share import FairShare
from prefixwatch.router.tenant_config import FairnessConfig
from tests.router.conftest import Start
from tests.router.fake_engine import FakeEngine

FAIR = FairnessConfig(cache_tokens=10_000, share=0.5, window_seconds=10)


def test_a_flood_costs_the_victim_a_third_of_its_hits_and_none_with_fair_shares() -> None:
    quiet, flood, fair = measured().values()
    assert flood.hit_tokens < 0.65 * quiet.hit_tokens
    assert fair.hit_tokens == quiet.hit_tokens
    assert (fair.victim_refused, flood.flood_refused) == (0, 0)
    assert fair.flood_served > 1000


def test_a_tenant_that_is_alone_may_fill_everything() -> None:
    shares = FairShare(FAIR)
    for second in range(100):
        assert shares.wait_seconds("a", second) == 0
        shares.wrote("a", 10_000, second)
    assert shares.wait_seconds("b", 100.0) == 0
    assert shares.wait_seconds("a", 100.0) > 0
    assert shares.wait_seconds("a", 110.1) == 0, "alone again"
    assert shares.wait_seconds("b", 111.0) == 0
    assert FairShare(FAIR).used_ratio(0.0) == 0


def test_after_the_wait_that_it_was_given_a_tenant_is_served() -> None:
    shares = FairShare(FAIR)
    shares.wrote("a", 20_000, 0.0)
    shares.wait_seconds("b", 1.0)
    wait = shares.wait_seconds("a", 1.0)
    assert wait == pytest.approx(10 * 1.386 - 1 + 1, abs=0.1)
    shares.wait_seconds("b", wait)
    assert shares.wait_seconds("a", 1.0 + wait) == 0
    assert shares.used_ratio(1.0 + wait) < 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3000), st.floats(0, 3)), max_size=200))
def test_beside_others_a_tenant_writes_at_most_its_share_in_a_window(asked: list[tuple[str, int, float]]) -> None:
    """Up to one prompt, the one that takes it over its share: e times the limit bounds any window."""
    shares, now, written = FairShare(FAIR), 0.0, []
    for owner, tokens, pause in asked:
        now += pause
        shares.wait_seconds("other", now)
        if not shares.wait_seconds(owner, now):
            shares.wrote(owner, tokens, now)
            written.append((owner, now, tokens))
        for each in "abc":
            recent = sum(tokens for who, at, tokens in written if who == each and at > now - 10)
            assert recent <= 2.72 * (5000 + 3000)


def test_owners_are_bounded() -> None:
    shares = FairShare(FAIR)
    for number in range(20_000):
        shares.wrote(str(number), 1, number / 1e6)
    assert len(shares._levels) == 10_000


async def test_a_tenant_beyond_its_share_gets_a_429_and_others_do_not(start: Start, engines: list[FakeEngine]) -> None:
    settings: dict[str, Any] = {"cache_tokens": 400, "share": 0.5, "window_seconds": 600}
    client = await start(engines[:1], policy="cache_aware", fairness=settings)

    async def status(tenant: str, text: str) -> int:
        async with client.chat(text, headers={"x-tenant-id": tenant}) as answer:
            if answer.status == 429:
                assert int(answer.headers["Retry-After"]) >= 1
            await answer.read()
            return int(answer.status)

    assert [await status("small", "x" * 50) for _ in range(9)] == [200] * 9, "what it reuses isn't written"
    assert [await status("flood", f"{k}" * 120) for k in range(4)] == [200, 200, 429, 429]
    assert await status("small", "y" * 50) == 200
    assert client.value("refusals_total", reason="tenant_share") == 2
    ratio = client.value("fair_share_used_ratio")
    assert ratio is not None
    assert 1 < ratio < 1.6
