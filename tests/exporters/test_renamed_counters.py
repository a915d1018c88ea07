"""A counter that a page gives under a better name from some moment on: the same events, counted once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.signals import SignalStore

Feed = Callable[..., SignalStore]


def page(queries: int, hits: int, by_source: int | None = None, started: int | None = None) -> str:
    """vLLM's counters; `by_source` under the name that shows up later, as labelled counters do with their first use."""
    later = "" if by_source is None else f'vllm:prompt_tokens_cached_by_source_total{{source="device"}} {by_source}\n'
    start = "" if started is None else f"process_start_time_seconds {started}\n"
    return (
        f"{start}vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"
        f"vllm:external_prefix_cache_hits_total 0\n{later}"
    )


def test_a_better_name_that_shows_up_later_counts_no_token_twice(feed: Feed) -> None:
    store = feed(page(1000, 500), page(2000, 1000, by_source=1000), page(3000, 1900, by_source=1900))
    assert store.total("prefix_hit_tokens") == 1900.0
    assert derive_target(store).hit_ratio == 1400 / 2000


def test_a_name_that_goes_again_counts_no_token_twice(feed: Feed) -> None:
    store = feed(page(1000, 500, by_source=500), page(2000, 1000), page(3000, 1500, by_source=1500))
    assert store.total("prefix_hit_tokens") == 1500.0


def test_tokens_that_move_to_another_tier_with_the_name_are_counted_there(feed: Feed) -> None:
    remote = 'vllm:prompt_tokens_cached_by_source_total{source="external_unspecified"} 300\n'
    store = feed(page(1000, 500), page(2000, 700, by_source=700) + remote)
    tiers = {tier: tokens for (tier,), tokens in store.totals_by("prefix_hit_tokens", "tier").items() if tokens}
    assert tiers == {"gpu": 700.0, "remote": 300.0}


def test_the_window_goes_on_over_the_change(feed: Feed) -> None:
    store = feed(page(1000, 500), page(2000, 750, by_source=750))
    assert derive_target(store).hit_ratio == 0.25


def test_the_window_starts_again_when_counts_moved_to_other_labels(feed: Feed) -> None:
    """200 tokens that were the GPU's are another tier's now: the GPU's growth would be below 0."""
    remote = 'vllm:prompt_tokens_cached_by_source_total{source="external_unspecified"} 300\n'
    store = feed(page(1000, 500), page(2000, 600, by_source=300) + remote)
    assert (store.increase, derive_target(store).flags["counter_reset"]) == (None, False)


def test_nothing_counted_before_leaves_the_window_as_it_is(feed: Feed) -> None:
    store = feed(page(0, 0), page(1000, 250, by_source=250))
    assert derive_target(store).hit_ratio == 0.25


@pytest.mark.parametrize("starts", [(None, None), (100, 200)], ids=["fewer tokens", "another start time"])
def test_a_newer_release_in_the_same_place_adds_to_what_the_older_one_counted(
    feed: Feed, starts: tuple[int | None, int | None]
) -> None:
    """With a start time the new process is known by it, else by counting fewer than the old one had."""
    hits = 900 if starts[0] else 100
    before, after = page(1000, 500, started=starts[0]), page(950, hits, by_source=hits, started=starts[1])
    assert feed(before, after).total("prefix_hit_tokens") == 500.0 + hits


def test_a_renamed_histogram_is_observed_once(feed: Feed) -> None:
    def histogram(name: str, count: int) -> str:
        return f'{name}_bucket{{le="+Inf"}} {count}\n{name}_sum {count}\n{name}_count {count}\n'

    old, new = "vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"
    store = feed(histogram(old, 40), histogram(old, 50) + histogram(new, 50))
    assert (store.total("inter_token_seconds", "count"), store.total("inter_token_seconds", "sum")) == (50.0, 50.0)
