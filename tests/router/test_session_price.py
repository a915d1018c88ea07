"""The price of moving a session: which way is chosen, and what no price may do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.transfer_link import KvLink, Wire, arrival, carrying_seconds
from prefixwatch.router.sessions.price import Choice, Destination, Kind, Price, Why, cheapest, priced

LINK = KvLink(gbit_per_second=8, kv_bytes_per_token=100_000, latency_seconds=0.01)
"""0.1 ms a token."""


def prefill(tokens: int) -> float:
    """0.2 ms a token."""
    return tokens * 2e-4


def parts(price: Price | None) -> tuple[float, float, float]:
    assert price is not None
    return price.prefill_seconds, price.queue_seconds, price.migrate_seconds


def test_both_prices_have_the_three_parts_of_a_miss() -> None:
    choice = priced(1000, 800, Destination("b", held_tokens=100, queue_seconds=0.05, link=LINK), prefill)

    assert (choice.worker, choice.kind, choice.why) == ("b", Kind.SOFT, Why.BLOCKS_SOONER)
    assert parts(choice.soft) == pytest.approx((0.04, 0.05, 0.08))
    assert parts(choice.hard) == pytest.approx((0.18, 0.05, 0.0))
    assert choice.seconds == pytest.approx(0.17)


def test_a_transfer_costs_what_is_left_of_it_when_the_session_comes_back() -> None:
    destination = Destination("b", 0, 0.0, LINK, link_wait_seconds=0.5)

    at_once = priced(1000, 1000, destination, prefill)
    later = priced(1000, 1000, destination, prefill, return_seconds=0.6)

    assert (at_once.kind, at_once.why) == (Kind.HARD, Why.PREFILL_SOONER)
    assert later.kind is Kind.SOFT
    assert parts(later.soft) == pytest.approx((0.0, 0.0, 0.01))


@pytest.mark.parametrize(
    ("source", "changes", "why"),
    [
        (None, {}, Why.SOURCE_DEAD),
        (800, {"link": None}, Why.NO_CONNECTOR),
        (800, {"held_tokens": 800}, Why.HELD_THERE),
        (0, {}, Why.HELD_THERE),
    ],
)
def test_what_cannot_be_sent_is_computed(source: int | None, changes: dict[str, object], why: Why) -> None:
    destination = replace(Destination("b", 100, 0.0, LINK), **changes)  # type: ignore[arg-type]
    choice = priced(1000, source, destination, prefill)
    assert (choice.kind, choice.why, choice.soft) == (Kind.HARD, why, None)


def test_without_a_known_price_the_fullest_holder_is_chosen_hard() -> None:
    destinations = [Destination("b", 0, 0.0, LINK), Destination("c", 500, 9.0, LINK)]
    assert cheapest(1000, 800, destinations, lambda _: None) == Choice("c", Kind.HARD, Why.PRICE_UNKNOWN)


@pytest.mark.parametrize("wrong", [{"gbit_per_second": 0.0}, {"compression": -1.0}, {"latency_seconds": -0.1}])
def test_an_impossible_link_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        replace(LINK, **wrong)


def test_transfers_leave_one_after_another_and_no_tokens_take_no_time() -> None:
    """The latency of one passes while the next is carried."""
    wire, size = Wire(LINK.gbit_per_second), LINK.sent_bytes(900)
    assert arrival([wire], size, 10.0, LINK.latency_seconds, book=True) == pytest.approx(10.0 + LINK.seconds(900))
    assert arrival([wire], size, 10.05, LINK.latency_seconds, book=True) == pytest.approx(10.19)
    assert wire.wait_seconds(10.15) == pytest.approx(0.03)
    assert LINK.seconds(0) == 0.0


seconds = st.floats(0, 100)
tokens = st.integers(0, 100_000)
links = st.none() | st.builds(
    KvLink,
    gbit_per_second=st.none() | st.floats(0.01, 10_000),
    kv_bytes_per_token=st.floats(1e3, 1e6),
    latency_seconds=st.floats(0, 1),
    compression=st.floats(1, 10),
)
places = st.builds(Destination, st.sampled_from("abcd"), tokens, seconds, links, seconds)


@given(tokens.filter(bool), st.none() | tokens, st.lists(places, min_size=1, max_size=5), seconds)
def test_the_choice_is_never_dearer_than_any_other(
    prompt: int, source: int | None, destinations: list[Destination], back: float
) -> None:
    choice = cheapest(prompt, source, destinations, prefill, back)
    assert choice.seconds is not None
    for destination in destinations:
        other = priced(prompt, source, destination, prefill, back)
        for price in (other.soft, other.hard):
            assert price is not None or other.kind is Kind.HARD
            assert price is None or choice.seconds <= price.seconds
    assert choice.kind is Kind.HARD or (source is not None and choice.soft is not None)


@given(tokens.filter(bool), tokens, places, st.floats(1, 1000))
def test_a_faster_link_never_turns_a_soft_move_hard(
    prompt: int, source: int, destination: Destination, factor: float
) -> None:
    slow = priced(prompt, source, destination, prefill)
    if destination.link is None or slow.kind is Kind.HARD:
        return
    rate = destination.link.gbit_per_second
    faster = replace(destination.link, gbit_per_second=None if rate is None else rate * factor)
    assert priced(prompt, source, replace(destination, link=faster), prefill).kind is Kind.SOFT


@given(st.lists(st.tuples(st.floats(0, 5), tokens.filter(bool)), min_size=1, max_size=20), links.filter(bool))
def test_blocks_come_when_the_price_says_and_the_link_is_never_faster_than_its_rate(
    sends: list[tuple[float, int]], link: KvLink
) -> None:
    wire, now, sent_bytes = Wire(link.gbit_per_second), 0.0, 0.0
    for gap, count in sends:
        now += gap
        expected = now + wire.wait_seconds(now) + link.seconds(count)
        came = arrival([wire], link.sent_bytes(count), now, link.latency_seconds, book=True)
        assert came == pytest.approx(expected)
        sent_bytes += link.sent_bytes(count)
    assert wire.free_at >= carrying_seconds(sent_bytes, link.gbit_per_second) * (1 - 1e-9)
