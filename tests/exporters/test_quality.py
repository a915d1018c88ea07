"""Flags on numbers that may mislead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.signals import SignalStore

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


def test_lookups_that_were_booked_twice_are_flagged(feed: Feed) -> None:
    """vllm-project/vllm#28585 (EM03): 1024 external lookups for a prompt of 512 tokens; all of it was reused."""
    before = counters(prompt_tokens_total=0, external_prefix_cache_queries_total=0, external_prefix_cache_hits_total=0,
                      prefix_cache_queries_total=0, prefix_cache_hits_total=0)  # fmt: skip
    after = counters(prompt_tokens_total=512, external_prefix_cache_queries_total=1024,
                     external_prefix_cache_hits_total=512, prefix_cache_queries_total=512,
                     prefix_cache_hits_total=0)  # fmt: skip
    store = feed(before, after)
    numbers = derive_target(store)
    assert (numbers.flags["double_counted"], numbers.raw_hit_ratio) == (True, 1.0)
    assert (store.grown("external_hit_tokens"), store.grown("external_query_tokens")) == (512.0, 1024.0)


@pytest.mark.parametrize(
    ("prompts", "queries", "flagged"),
    [
        ([0, 100_000], [128_000, 128_000], False),  # the last prompt before a pause ends
        ([0, 1_000_000], [50_000, 1_000_000], False),  # less is under way at the window's end than at its beginning
        ([0, 1_000_000], [50_000, 900_000], True),  # 150,000 are missing, 50,000 were under way
        ([0, 1_000_000], [9_000_000, 9_850_000], True),  # as many as were aborted over a year explain a tenth at most
        ([0, 1000], [0, 0], True),
    ],
)
def test_prompts_under_way_when_the_window_begins_are_no_skipped_ones(
    feed: Feed, prompts: list[int], queries: list[int], flagged: bool
) -> None:
    pages = [
        counters(prompt_tokens_total=p, prefix_cache_queries_total=q) for p, q in zip(prompts, queries, strict=True)
    ]
    assert derive_target(feed(*pages)).flags["lookup_skipped"] is flagged


def test_an_external_cache_that_is_asked_alone_is_no_collapse(feed: Feed) -> None:
    """vllm-project/vllm#57596 (EM04): 1203 external misses, no own lookup: not a ratio of 0."""
    before = counters(prefix_cache_queries_total=0, prefix_cache_hits_total=0, external_prefix_cache_queries_total=0)
    after = counters(prefix_cache_queries_total=0, prefix_cache_hits_total=0, external_prefix_cache_queries_total=1203)
    numbers = derive_target(feed(before, after))
    assert (numbers.raw_hit_ratio, numbers.hit_ratio, numbers.flags["lookup_skipped"]) == (None, None, True)
    assert numbers.absent["hit_ratio"] == "no prompt token was looked up in the window"


def test_the_block_size_explains_hits_of_zero(feed: Feed) -> None:
    """vllm-project/vllm#54607 (EM06): 240 shared tokens are less than a block of 784; not a cache that is off."""
    config = 'vllm:cache_config_info{block_size="784",enable_prefix_caching="True",engine="0"} 1.0\n'
    before = config + counters(prefix_cache_queries_total=0, prefix_cache_hits_total=0)
    after = config + counters(prefix_cache_queries_total=24000, prefix_cache_hits_total=0)
    numbers = derive_target(feed(before, after))
    assert (numbers.hit_ratio, numbers.block_size_tokens, numbers.flags["prefix_caching_off"]) == (0.0, 784.0, False)


def test_more_hits_than_lookups_are_no_ratio(feed: Feed) -> None:
    """kvcache-ai/Mooncake#4164 (RT12), pyrra-dev/pyrra#448 (SL21): 120 % is flagged, not shown and not cut to 100 %."""
    numbers = derive_target(
        feed(
            counters(prefix_cache_queries_total=0, prefix_cache_hits_total=0),
            counters(prefix_cache_queries_total=100, prefix_cache_hits_total=120),
        )
    )
    assert (numbers.raw_hit_ratio, numbers.hit_ratio, numbers.flags["impossible_ratio"]) == (None, None, True)
    assert "contradict" in numbers.absent["hit_ratio"]


def test_hits_booked_after_the_windows_edge_are_no_contradiction(feed: Feed) -> None:
    """A lookup is booked when a request is scheduled, its hits later: a scrape may come between the two."""
    numbers = derive_target(
        feed(
            counters(prefix_cache_queries_total=2000, prefix_cache_hits_total=0),
            counters(prefix_cache_queries_total=4000, prefix_cache_hits_total=3968),
        )
    )
    assert (numbers.raw_hit_ratio, numbers.flags["impossible_ratio"]) == (1.0, False)


def sglang(throughput: float, generated: int) -> str:
    return (
        f'sglang:num_running_reqs{{model_name="m"}} 1\nsglang:gen_throughput{{model_name="m"}} {throughput}\n'
        f'sglang:generation_tokens_total{{model_name="m"}} {generated}\n'
    )


def test_a_gauge_of_the_last_rank_alone_is_flagged(feed: Feed) -> None:
    """sgl-project/sglang#6892 (EM14): 900 tokens/s by the gauge, 7100 by the counter; the counter is right."""
    store = feed(sglang(900, 0), sglang(900, 35_500), system="sglang")
    assert derive_target(store).flags["last_rank_only"] is True
    assert store.grown("generation_tokens") == 7100 * 5.0
    assert derive_target(feed(sglang(7000, 0), sglang(7000, 35_500), system="sglang")).flags["last_rank_only"] is False


def answers(ttft_seconds: float, e2e_seconds: float, tokens_each: int, requests: int = 100) -> str:
    first, whole = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
    return "".join(
        f'{name}_bucket{{le="10.0"}} {requests}\n{name}_bucket{{le="+Inf"}} {requests}\n'
        f"{name}_sum {seconds * requests}\n{name}_count {requests}\n"
        for name, seconds in ((first, ttft_seconds), (whole, e2e_seconds))
    ) + counters(generation_tokens_total=tokens_each * requests, request_success_total=requests)


def test_a_first_token_at_the_end_of_the_answer_is_flagged(feed: Feed) -> None:
    """vllm-project/aibrix#2477 (RT38): 4.515 s of 4.52 s for 128 tokens; one token alone may well take all of it."""
    assert derive_target(feed(answers(4.515, 4.52, 128))).flags["ttft_is_whole_answer"] is True
    assert derive_target(feed(answers(0.10, 4.52, 128))).flags["ttft_is_whole_answer"] is False
    assert "ttft_is_whole_answer" not in derive_target(feed(answers(4.515, 4.52, 1))).flags


def test_a_first_token_that_leaves_out_the_wait_is_flagged(feed: Feed) -> None:
    """llm-d/llm-d-inference-sim#266 (SL16): first token after 40 ms, though requests wait 6 s."""

    def page(first: float, waited: float) -> str:
        return "".join(
            f'{name}_bucket{{le="10.0"}} 100\n{name}_bucket{{le="+Inf"}} 100\n'
            f"{name}_sum {seconds * 100}\n{name}_count 100\n"
            for name, seconds in (
                ("vllm:time_to_first_token_seconds", first), ("vllm:request_queue_time_seconds", waited),
            )
        )  # fmt: skip

    assert derive_target(feed(page(0.04, 6.0))).flags["ttft_without_queue"] is True
    assert derive_target(feed(page(6.1, 6.0))).flags["ttft_without_queue"] is False


def test_an_engines_own_rate_is_never_compared(feed: Feed) -> None:
    """inference-sim/inference-sim#1726 (EM47): 0.50 against 0.60 by tokens, though the engine prints 0.50 and 0.43."""

    def arm(hits: int, printed: float) -> float | None:
        def page(hit_tokens: int, prompts: int) -> str:
            return (
                f"sglang:cache_hit_rate {printed}\nsglang:cached_tokens_total {hit_tokens}\n"
                f"sglang:prompt_tokens_total {prompts}\n"
            )

        return derive_target(feed(page(0, 0), page(hits, 100), system="sglang")).hit_ratio

    assert (arm(50, 0.50), arm(60, 0.43)) == (0.50, 0.60)
