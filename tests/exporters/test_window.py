"""Counters over restarts, and windows over counters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.exporters.scraping.derive import NO_WINDOW, derive_target
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.window import CounterBank, LoadWindow, Window

Feed = Callable[..., SignalStore]


def page(queries: float, hits: float, started: float | None = None) -> str:
    start = "" if started is None else f"process_start_time_seconds {started}\n"
    return f"{start}vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"


def test_a_restart_of_one_engine_is_no_spike_in_the_sum() -> None:
    """prometheus/prometheus#7074 (EM45): +450 in all, where adding first and then increasing gives +1500."""
    a = [1000, 1025, 1050, 75, 100, 125, 150, 175, 200]
    b = [1000 + 25 * step for step in range(9)]
    bank = CounterBank()
    bank.grow(2)
    places = np.array([0, 1])
    sums = []
    for pair in zip(a, b, strict=True):
        bank.update(places, np.array(pair, dtype=float))
        sums.append(bank.totals().sum())
    assert sums[-1] - sums[0] == 450.0
    assert sums == sorted(sums)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=20))
def test_totals_never_go_backwards(rows: list[list[float]]) -> None:
    bank = CounterBank()
    bank.grow(3)
    places = np.array([0, 1, 2])
    before = np.zeros(3)
    for row in rows:
        bank.update(places, np.array(row))
        assert (bank.totals() >= before).all()
        before = bank.totals()


def test_values_that_no_counter_can_have_change_nothing() -> None:
    bank = CounterBank()
    bank.grow(3)
    places = np.array([0, 1, 2])
    bank.update(places, np.array([5.0, 6.0, 7.0]))
    assert bank.update(places, np.array([np.nan, np.inf, -1.0])) is False
    assert bank.totals().tolist() == [5.0, 6.0, 7.0]


def test_a_series_that_vanished_keeps_its_total() -> None:
    bank = CounterBank()
    bank.grow(2)
    bank.update(np.array([0, 1]), np.array([5.0, 6.0]))
    bank.update(np.array([1]), np.array([8.0]))
    assert bank.totals().tolist() == [5.0, 8.0]


def test_there_is_no_window_before_two_samples(feed: Feed) -> None:
    """volcano-sh/kthena#1042 (SL22): unknown, not 0."""
    numbers = derive_target(feed(page(2000, 1000)))
    assert (numbers.hit_ratio, numbers.window_seconds) == (None, None)
    assert numbers.absent["window"] == NO_WINDOW


def test_the_window_is_of_this_run_not_of_the_engines_life(feed: Feed) -> None:
    """vllm-project/vllm#46938 (EM46): 0.10 for the run, where the lifetime ratio is 0.827."""
    numbers = derive_target(feed(page(1e6, 9e5), page(1.1e6, 9.1e5)))
    assert numbers.hit_ratio == 0.1
    assert numbers.window_seconds == 5.0


def test_a_reset_begins_a_new_window(feed: Feed) -> None:
    """vllm-project/vllm#46938 (EM46): no ratio over a restart; totals go on."""
    store = feed(page(1000, 900), page(100, 10))
    assert derive_target(store).hit_ratio is None
    assert derive_target(store).flags["counter_reset"] is True
    assert store.total("prefix_query_tokens") == 1100.0
    assert derive_target(feed(page(1000, 900), page(100, 10), page(300, 60))).hit_ratio == 0.25


def test_another_process_start_is_a_reset_even_if_the_counter_is_higher(feed: Feed) -> None:
    store = feed(page(1000, 0, started=100), page(1500, 0, started=200))
    assert store.total("prefix_query_tokens") == 2500.0


def test_a_counter_that_appears_with_its_first_event_was_zero_before(feed: Feed) -> None:
    store = feed("vllm:prefix_cache_queries_total 100\n", page(300, 50))
    assert derive_target(store).hit_ratio == 0.25


def test_the_window_covers_its_horizon() -> None:
    window = Window(horizon_seconds=10)
    for at in range(0, 31, 5):
        window.add(float(at), np.array([float(at)]))
    increase = window.increase()
    assert increase is not None
    assert (increase.seconds, increase.vector.tolist()) == (10.0, [10.0])


def test_samples_further_apart_than_the_horizon_still_make_a_window() -> None:
    window = Window(horizon_seconds=10)
    window.add(0.0, np.array([1.0]))
    window.add(25.0, np.array([6.0]))
    increase = window.increase()
    assert increase is not None
    assert (increase.seconds, increase.vector.tolist()) == (25.0, [5.0])


def test_mean_loads_are_of_who_is_still_there() -> None:
    loads = LoadWindow(horizon_seconds=10)
    for at, sample in enumerate([{"old": 9.0, "kept": 1.0}, {"kept": 2.0}, {"kept": 3.0, "new": 4.0}]):
        loads.add(float(at), sample)
    assert loads.means() == {"kept": 2.0, "new": 4.0}
