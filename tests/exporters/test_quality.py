"""Flags on numbers that may mislead."""

from __future__ import annotations

from collections.abc import Callable

from exporters.derive import derive_target
from exporters.signals import SignalStore

Feed = Callable[..., SignalStore]


def counters(**values: float) -> str:
    return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())


def ttft(total: float, *buckets: tuple[str, int]) -> str:
    count = buckets[-1][1]
    lines = [f'vllm:time_to_first_token_seconds_bucket{{le="{bound}"}} {within}\n' for bound, within in buckets]
    name = "vllm:time_to_first_token_seconds"
    return "".join(lines) + f"{name}_sum {total}\n{name}_count {count}\n"


def test_hits_after_preemptions_are_shown_and_flagged(feed: Feed) -> None:
    """vllm-project/vllm#25780 (EM01)."""
    before = counters(prefix_cache_queries_total=0, prefix_cache_hits_total=0, num_preemptions_total=0)
    after = counters(prefix_cache_queries_total=200_000, prefix_cache_hits_total=64_000, num_preemptions_total=180)
    numbers = derive_target(feed(before, after))
    assert (numbers.raw_hit_ratio, numbers.hit_ratio, numbers.hit_ratio_source) == (0.32, 0.32, "cache")
    assert numbers.flags["preemption_inflated"] is True


def test_the_headline_ratio_comes_from_the_tokens_really_computed(feed: Feed) -> None:
    """vllm-project/vllm#25780 (EM01): no prompt was reused, whatever the cache counters say."""
    computed, prompts = "request_prefill_kv_computed_tokens_sum", "request_prompt_tokens_sum"
    before = counters(
        prefix_cache_queries_total=0, prefix_cache_hits_total=0, num_preemptions_total=0, **{computed: 0, prompts: 0}
    )
    after = counters(
        prefix_cache_queries_total=200_000,
        prefix_cache_hits_total=64_000,
        num_preemptions_total=180,
        **{computed: 200_000, prompts: 200_000},
    )
    numbers = derive_target(feed(before, after))
    assert (numbers.raw_hit_ratio, numbers.hit_ratio, numbers.hit_ratio_source) == (0.32, 0.0, "computed")
    assert numbers.flags["preemption_inflated"] is True


def test_preemptions_that_changed_nothing_are_not_flagged(feed: Feed) -> None:
    computed, prompts = "request_prefill_kv_computed_tokens_sum", "request_prompt_tokens_sum"
    before = counters(
        prefix_cache_queries_total=0, prefix_cache_hits_total=0, num_preemptions_total=0, **{computed: 0, prompts: 0}
    )
    after = counters(
        prefix_cache_queries_total=1000,
        prefix_cache_hits_total=320,
        num_preemptions_total=2,
        **{computed: 680, prompts: 1000},
    )
    assert derive_target(feed(before, after)).flags["preemption_inflated"] is False


def test_first_tokens_faster_than_light_are_flagged(feed: Feed) -> None:
    """vllm-project/vllm#6337 (EM20): all in the smallest bucket, mean 10 microseconds."""
    flags = derive_target(feed(ttft(0.002, ("0.001", 208), ("+Inf", 208)))).flags
    assert (flags["stuck_in_one_bucket"], flags["implausible_latency"]) == (True, True)


def test_fewer_first_tokens_than_finished_requests_are_flagged(feed: Feed) -> None:
    """vllm-project/vllm#8115 (EM21): 8060 observed of 8192, mean 73 microseconds."""
    page = ttft(0.587, ("0.001", 8000), ("0.005", 8060), ("+Inf", 8060)) + counters(request_success_total=8192)
    flags = derive_target(feed(page)).flags
    assert (flags["missing_observations"], flags["implausible_latency"]) == (True, True)


def test_a_healthy_distribution_raises_nothing(feed: Feed) -> None:
    page = ttft(50.0, ("0.5", 40), ("1.0", 90), ("+Inf", 100)) + counters(request_success_total=100)
    flags = derive_target(feed(page)).flags
    assert not any(flags[name] for name in ("missing_observations", "implausible_latency", "stuck_in_one_bucket"))


def test_a_handful_of_observations_proves_nothing(feed: Feed) -> None:
    flags = derive_target(feed(ttft(0.0001, ("0.001", 3), ("+Inf", 3)))).flags
    assert "stuck_in_one_bucket" not in flags


def test_prompts_that_never_looked_into_the_cache_are_flagged(feed: Feed) -> None:
    """vllm-project/vllm#57596 (EM04)."""
    numbers = derive_target(
        feed(
            counters(prompt_tokens_total=0, prefix_cache_queries_total=0),
            counters(prompt_tokens_total=1000, prefix_cache_queries_total=600),
        )
    )
    assert numbers.flags["lookup_skipped"] is True


def test_an_engine_without_a_prefix_cache_says_so(feed: Feed) -> None:
    page = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",engine="0"} 1.0\n'
    assert derive_target(feed(page)).flags["prefix_caching_off"] is True
