"""What moving KV costs against computing it: closed forms, and what must hold for any prices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.transfer_link import KvLink
from prefixwatch.loadgen.request_log.break_even import Affine, break_even_tokens, cheapest_pull, crossing_tokens, fitted

PRICES = st.builds(Affine, st.floats(0, 0.2), st.floats(0, 2e-3))
RATES = st.floats(1e-6, 2e-3)
LONGEST = 4096


def break_even(price: Affine, token_s: float) -> float:
    found = break_even_tokens(
        lambda tokens: price.start_s + tokens * price.token_s,
        lambda prompt, cached: 0.01 + token_s * (prompt - cached),
        longest=LONGEST,
    )
    return float("inf") if found is None else found


def test_a_link_moves_bytes_and_compression_makes_them_fewer() -> None:
    """CacheGen's setting: 3.5 : 1 at 3 Gbit/s; 9,600 tokens of 128 KiB each."""
    plain = KvLink(gbit_per_second=3.0, kv_bytes_per_token=131_072, latency_seconds=0.005)
    packed = replace(plain, compression=3.5)
    assert plain.seconds(9600) == pytest.approx(0.005 + 9600 * 131_072 * 8 / 3e9)
    assert packed.seconds(9600) - 0.005 == pytest.approx((plain.seconds(9600) - 0.005) / 3.5)
    assert (plain.seconds(0), replace(plain, gbit_per_second=None).seconds(9600)) == (0, 0.005)


def test_the_break_even_of_two_affine_prices_is_the_latency_over_the_difference_of_the_rates() -> None:
    price = Affine(start_s=0.0201, token_s=1e-4)
    assert crossing_tokens(price, Affine(0.01, 3e-4)) == pytest.approx(100.5)
    assert break_even(price, 3e-4) == 112  # the first whole block beyond
    assert crossing_tokens(price, Affine(0.01, 1e-4)) is None
    assert break_even(price, 1e-4) == float("inf")


@given(PRICES, RATES, st.floats(1, 10))
def test_the_break_even_grows_with_latency_and_falls_with_rate_compression_and_slower_engines(
    price: Affine, token_s: float, factor: float
) -> None:
    length = break_even(price, token_s)
    assert break_even(price._replace(start_s=price.start_s * factor), token_s) >= length
    assert break_even(price._replace(token_s=price.token_s / factor), token_s) <= length
    assert break_even(price, token_s * factor) <= length


@given(st.integers(0, 4000), st.lists(st.tuples(st.integers(1, 500), st.floats(0, 3)), max_size=5), RATES)
def test_the_choice_is_the_cheapest_of_all_and_never_dearer_than_computing(
    held: int, parts: list[tuple[int, float]], token_s: float
) -> None:
    prompt, tokens, runs = 10_000, held, []
    for more, seconds in parts:
        tokens += more
        runs.append((tokens, seconds))

    def prefill_s(cached: int) -> float:
        return 0.01 + token_s * (prompt - cached)

    def total_s(count: int) -> float:
        waits_s = max((seconds for _, seconds in runs[:count]), default=0.0)
        return waits_s + prefill_s(runs[count - 1][0] if count else held)

    chosen = cheapest_pull(held, runs, prefill_s)
    assert total_s(chosen) == min(total_s(count) for count in range(len(runs) + 1))
    assert 0 <= total_s(chosen) <= prefill_s(held)


@given(PRICES, st.lists(st.integers(1, 10_000), min_size=8, max_size=30))
def test_a_fitted_price_is_nowhere_negative_and_finds_what_made_the_samples(price: Affine, sizes: list[int]) -> None:
    found = fitted([(size, price.start_s + size * price.token_s) for size in sizes])
    if len(set(sizes)) < 2:
        assert found is None
        return
    assert found is not None
    assert found.start_s >= 0
    assert found.token_s >= 0
    middle = sum(sizes) / len(sizes)
    assert found.start_s + middle * found.token_s == pytest.approx(price.start_s + middle * price.token_s, rel=1e-6)


def test_too_few_samples_have_no_price() -> None:
    assert fitted([(size, 1.0) for size in range(7)]) is None
