"""Burn rates: the workbook's table, scaled; what can't happen is refused or replaced, with the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.alerts.burn_rate import BASE_SECONDS, WORKBOOK, WORKBOOK_PERIOD_SECONDS, burn_rates
from prefixwatch.documents.errors import InputError
from prefixwatch.slo.promql import Selector
from prefixwatch.slo.rule_model import BurnCondition, RatioIndicator, Slices, SloDefinition

DAY = 86_400


def slo(target: float = 0.999, days: float = 30) -> SloDefinition:
    return SloDefinition(
        name="api",
        title="API",
        service="shop",
        description="",
        target=target,
        rule="",
        window_seconds=round(days * DAY),
        indicator=RatioIndicator(total=Selector("all_total", ()), bad=Selector("bad_total", ())),
        place="api.yaml:9",
    )


def table(definition: SloDefinition) -> list[tuple[float, int, int, str]]:
    return [(r.factor, r.long_seconds, r.short_seconds, r.severity) for r in burn_rates(definition)]


def test_thirty_days_have_the_workbooks_table() -> None:
    assert table(slo()) == [
        (14.4, 3600, 300, "page"),
        (6.0, 6 * 3600, 1800, "page"),
        (3.0, DAY, 7200, "ticket"),
        (1.0, 3 * DAY, 6 * 3600, "ticket"),
    ]


def test_windows_are_scaled_to_the_slos_own_period() -> None:
    """90 days: 2 % of the budget are 14.4 times the even rate for 3 hours."""
    assert table(slo(days=90))[0] == (14.4, 3 * 3600, 900, "page")
    assert table(slo(days=7)) == [
        (14.4, 900, 300, "page"),
        (6.0, 5100, 600, "page"),
        (3.0, 20_400, 1800, "ticket"),
        (1.0, 60_600, 5100, "ticket"),
    ]


def test_a_window_too_short_to_count_in_is_replaced_and_said_so() -> None:
    [fast, *_] = burn_rates(slo(days=1))

    assert fast.long_seconds == 3 * BASE_SECONDS
    assert fast.factor == 6, "14.4 over the same 15 minutes says nothing more"
    assert fast.note == "api: a window of 2m is too short to count events in pieces of 5m: replaced by 15m"


def test_a_window_rounded_up_by_one_piece_needs_no_note() -> None:
    """14.4 over 5 days want 10 minutes, and get three pieces of 5."""
    [fast, *_] = burn_rates(slo(days=5))
    assert (fast.factor, fast.long_seconds, fast.note) == (14.4, 900, "")


def test_a_burn_rate_that_cannot_happen_is_replaced_and_said_so() -> None:
    """slok/sloth#341: at 85 %, 14.4 times the even rate are 216 % bad events."""
    [fast, slow, *_] = burn_rates(slo(target=0.85))

    assert (fast.factor, fast.line(0.15) < 1) == (5.33, True)
    assert fast.note == (
        "api: burn rate 14.4 × budget 15 % = 216 % bad events can't happen: replaced by 5.33 × 15 % = 80 %, "
        "over a window that spends as much of the budget"
    )
    assert fast.long_seconds == 9900, "14.4 × 3600 / 5.33 = 9726, in whole pieces of 300"
    assert (slow.factor, slow.note) == (6.0, "")


def test_an_own_burn_rate_that_cannot_happen_is_refused_with_the_arithmetic() -> None:
    condition = BurnCondition(14.4, 3600, "page", 0, "policy.yaml:12")

    with pytest.raises(InputError) as caught:
        burn_rates(replace(slo(target=0.9), conditions=(condition,)))

    assert str(caught.value) == (
        "policy.yaml:12: a burn rate of 14.4 can't happen to api: 14.4 × 10 % = 144 % of the events would have to be "
        "bad; use one below 10"
    )


def test_an_own_lookback_too_short_to_count_in_is_refused() -> None:
    condition = BurnCondition(2, 300, "page", 0, "policy.yaml:12")

    with pytest.raises(InputError, match=r"policy.yaml:12: a lookback of 5m is too short .* use 15m or more"):
        burn_rates(replace(slo(), conditions=(condition,)))


def test_the_bounds_of_own_conditions() -> None:
    """All events bad is a rate that can't be exceeded; three pieces are enough to count in."""
    with pytest.raises(InputError, match=r"2 × 50 % = 100 % of the events"):
        burn_rates(replace(slo(target=0.5), conditions=(BurnCondition(2, 3600, "page", 0, "policy.yaml:12"),)))
    [rate] = burn_rates(replace(slo(), conditions=(BurnCondition(2, 3 * BASE_SECONDS, "page", 0, "policy.yaml:12"),)))
    assert (rate.long_seconds, rate.hold) == (900, "2m")


def test_own_conditions_take_the_place_of_the_table() -> None:
    condition = BurnCondition(2, 5400, "ticket", 600, "policy.yaml:12")

    [rate] = burn_rates(replace(slo(), conditions=(condition,)))

    assert (rate.factor, rate.long_seconds, rate.short_seconds, rate.severity, rate.hold) == (
        2,
        5400,
        600,
        "ticket",
        "10m",
    )


@given(
    target=st.floats(0.5, 0.99999),
    days=st.floats(1, 400),
    base=st.sampled_from([60, 300, 600, 3600]),
)
def test_every_burn_rate_can_happen_and_counts_whole_pieces(target: float, days: float, base: int) -> None:
    definition = replace(slo(target, days), slices=Slices(base, 0.5))

    for rate in burn_rates(definition):
        assert rate.line(definition.budget) < 1
        assert rate.long_seconds % base == 0
        assert rate.short_seconds % base == 0
        assert rate.short_seconds < rate.long_seconds


def test_the_workbooks_table_spends_2_5_10_and_10_percent_of_a_30_day_budget() -> None:
    """To the second: windows are rounded up to whole pieces, which would hide a length that is a little off."""
    assert [round(100 * factor * seconds / WORKBOOK_PERIOD_SECONDS, 6) for factor, seconds, _ in WORKBOOK] == [
        2,
        5,
        10,
        10,
    ]
    assert WORKBOOK_PERIOD_SECONDS == 30 * DAY
    assert [severity for _, _, severity in WORKBOOK] == ["page", "page", "ticket", "ticket"]
