"""Counters that fall: another process, a restart or a correction; and counters that never had a value."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.metrics_page.fleet_families import render
from tests.exporters.test_unread_pages import target


def page(tokens: float | str, start: str = "") -> str:
    return (
        f'{start}vllm:num_requests_running{{engine="0",model_name="m"}} 1\n'
        f'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {tokens}\n'
        f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {tokens}\n'
    )


def total(*pages: str) -> float | None:
    store = target(*pages).store
    assert store is not None
    return store.total("prefix_query_tokens")


@pytest.mark.parametrize("start", ["", "process_start_time_seconds 1000\n"])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), max_size=8))
def test_processes_of_one_start_time_are_counted_each_from_where_it_was(
    start: str, turns: list[tuple[int, int]]
) -> None:
    """vllm-project/vllm#18053, kserve/kserve#2979: forked in one moment, or without a start time on the page."""
    shown = [20_000, 5_000, 1_000]
    pages = [page(tokens, start) for tokens in shown]
    for which, grown in turns:
        shown[which] += grown
        pages.append(page(shown[which], start))
    assert total(*pages) == sum(shown)
    if len({which for which, _ in turns} - {2}) > 0:
        assert target(*pages[: 4 + next(k for k, (which, _) in enumerate(turns) if which != 2)]).flags(0.0)[
            "several_processes"
        ]


def test_a_restart_is_one_and_is_counted_from_zero() -> None:
    pages = [page(tokens) for tokens in (10_000, 10_500, 5, 700, 2_000)]
    assert total(*pages) == 12_500
    assert not target(*pages).flags(20.0)["several_processes"]


@given(st.integers(100, 10**9), st.floats(0.51, 0.9), st.floats(0, 0.9))
def test_a_counter_that_is_corrected_counts_nothing_twice(before: int, ratio: float, share: float) -> None:
    """vllm-project/vllm#18053: a worker's file is gone, and with it what it had counted."""
    left = math.ceil(before * ratio)
    more = math.floor(share * (before - left))
    assert total(page(before), page(left), page(left + more)) == before + more


@given(st.lists(st.sampled_from(["NaN", "+Inf", "-Inf", "-1"]), min_size=1, max_size=4))
def test_a_counter_without_a_value_is_unknown_and_flagged(values: list[str]) -> None:
    pages = [page(value) for value in values]
    made = target(*pages)
    assert total(*pages) is None
    assert made.flags(0.0)["malformed_lines"]
    assert "prefixwatch_prefix_query_tokens_total{" not in render([made])[0].decode()
    known = target(*pages, page(7), page(9), *pages)
    assert known.store is not None
    assert known.store.total("prefix_query_tokens") == 9
