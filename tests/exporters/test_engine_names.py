"""Engines other than vLLM: the traps of their names, labels and units."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

Feed = Callable[..., SignalStore]
Capture = Callable[[str], bytes]
MakeTarget = Callable[..., Target]


def hits_by_tier(store: SignalStore) -> dict[str, float]:
    return {tier: tokens for (tier,), tokens in store.totals_by("prefix_hit_tokens", "tier").items()}


# SGLang


def sglang(colon: str, cached: int, prompts: int) -> str:
    return (
        f'sglang{colon}num_running_reqs{{model_name="m"}} 3\nsglang{colon}num_queue_reqs{{model_name="m"}} 2\n'
        f'sglang{colon}token_usage{{model_name="m"}} 0.25\nsglang{colon}cache_hit_rate{{model_name="m"}} 0\n'
        f'sglang{colon}cached_tokens_total{{model_name="m"}} {cached}\n'
        f'sglang{colon}prompt_tokens_total{{model_name="m"}} {prompts}\n'
    )


@pytest.mark.parametrize("colon", [":", "_"])
def test_both_spellings_of_sglang_are_one(feed: Feed, colon: str) -> None:
    """sgl-project/sglang#12618 (EM12), sgl-project/sglang#26608 (EM11): 0.96 from counters, though the gauge says 0."""
    numbers = derive_target(feed(sglang(colon, 0, 0), sglang(colon, 9600, 10000), system="sglang"))
    assert (numbers.running, numbers.waiting, numbers.kv_usage_max_ratio) == (3.0, 2.0, 0.25)
    assert (numbers.hit_ratio, numbers.hit_ratio_source) == (0.96, "cache")


def test_a_page_with_both_spellings_counts_once(feed: Feed) -> None:
    store = feed(sglang(":", 9600, 10000) + sglang("_", 9600, 10000), system="sglang")
    assert (store.total("prefix_query_tokens"), derive_target(store).running) == (10000.0, 3.0)


def test_a_fleet_of_mixed_releases_shows_all_its_engines(make_target: MakeTarget) -> None:
    """sgl-project/sglang#36428 (EM12)."""
    old, new = make_target("old", sglang(":", 0, 0)), make_target("new", sglang("_", 0, 0))
    assert derive_fleet([old, new]).loads == {"old": 5.0, "new": 5.0}


def test_sglangs_cached_tokens_by_where_they_were(feed: Feed) -> None:
    """Trap 7: current releases say where and whether the request streamed, older ones neither."""
    store = feed(
        'sglang:cached_tokens_total{cache_source="device"} 600\nsglang:cached_tokens_total{cache_source="host"} 50\n'
        'sglang:cached_tokens_total{cache_source="storage_file"} 30\n'
        'sglang:cached_tokens_total{cache_source="storage_mooncake"} 20\nsglang:cached_tokens_total 7\n'
        'sglang:prompt_tokens_total{is_streaming="true"} 900\nsglang:prompt_tokens_total{is_streaming="false"} 100\n',
        system="sglang",
    )
    assert hits_by_tier(store) == {"gpu": 600.0, "cpu": 50.0, "disk": 30.0, "remote": 20.0, "unknown": 7.0}
    assert store.total("prefix_query_tokens") == 1000.0


def test_sglangs_pipeline_stages_are_not_added_up(feed: Feed) -> None:
    page = "".join(
        f'sglang:{name}{{dp_rank="{dp}",pp_rank="{pp}",tp_rank="0"}} {value}\n'
        for name, value in (("num_running_reqs", 4), ("token_usage", 0.6), ("num_pages", 100), ("page_size", 64))
        for dp in "01"
        for pp in "01"
    )
    numbers = derive_target(feed(page, system="sglang"))
    assert (numbers.running, numbers.kv_usage_max_ratio, numbers.loads) == (8.0, 0.6, {"0": 4.0, "1": 4.0})
    assert (numbers.kv_capacity_blocks, numbers.block_size_tokens) == (200.0, 64.0)


def test_sglangs_older_names(feed: Feed) -> None:
    """Trap 7: names that were dropped or renamed."""
    store = feed(
        "sglang:num_retractions_sum 5\nsglang:num_retractions_count 90\n"
        'sglang:queue_time_s_bucket{le="+Inf"} 9\nsglang:queue_time_s_sum 4.5\nsglang:queue_time_s_count 9\n'
        'sglang:time_per_output_token_seconds_bucket{le="+Inf"} 80\nsglang:time_per_output_token_seconds_count 80\n'
        'sglang:cache_config_info{page_size="16",num_pages="300"} 1\n',
        system="sglang",
    )
    numbers = derive_target(store)
    assert (store.total("preemptions"), store.total("queue_seconds", "sum")) == (5.0, 4.5)
    assert store.total("inter_token_seconds", "count") == 80.0
    assert (numbers.kv_capacity_blocks, numbers.block_size_tokens) == (300.0, 16.0)


def test_sglangs_transfer_times_become_seconds(feed: Feed, make_target: MakeTarget) -> None:
    """Trap 9: milliseconds, in sums and in bucket bounds."""
    name = "sglang:kv_transfer_latency_ms"
    page = f'{name}_bucket{{le="250"}} 3\n{name}_bucket{{le="+Inf"}} 4\n{name}_sum 1500\n{name}_count 4\n'
    store = feed(page, system="sglang")
    (histogram,) = store.histograms("kv_transfer")[()]
    assert (histogram.total, histogram.bounds, histogram.counts) == (1.5, (0.25, float("inf")), (3.0, 4.0))
    assert "kv_transfer" not in derive_target(store).absent
    fleet = derive_fleet([make_target("decode", page + "sglang:num_running_reqs 0\n")])
    assert "kv_transfer" not in fleet.absent


# TensorRT-LLM


def trtllm(prompts: int, cached: int, requests: int) -> str:
    return (
        "trtllm_num_requests_running 6\ntrtllm_num_requests_waiting 1\ntrtllm_kv_cache_utilization 0.4\n"
        "trtllm_kv_cache_max_blocks 2048\ntrtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_hit_rate 0.99\n"
        f"trtllm_prompt_tokens_total {prompts}\ntrtllm_prompt_cached_tokens_total {cached}\n"
        f'trtllm_request_success_total{{finished_reason="length"}} {requests}\n'
        f"trtllm_kv_cache_reused_blocks_total {cached // 10}\ntrtllm_kv_cache_missed_blocks_total {requests}\n"
        f'trtllm_prompt_cache_hit_tokens_total{{cache_level="0",cache_tier="gpu"}} {cached}\n'
        'trtllm_kv_cache_config_info{page_size="32",enable_block_reuse="True"} 1\n'
    )


def test_tensorrt_llms_hit_ratio_is_of_tokens(feed: Feed) -> None:
    """tenstorrent/tt-inference-server#4728 (EM43): 52000 of 114600 tokens, not one of two requests, nor blocks."""
    store = feed(trtllm(0, 0, 0), trtllm(114600, 52000, 2), system="tensorrt-llm")
    numbers = derive_target(store)
    assert numbers.hit_ratio == 52000 / 114600
    assert hits_by_tier(store) == {"unknown": 52000.0}
    assert (numbers.kv_capacity_blocks, numbers.block_size_tokens, numbers.kv_usage_max_ratio) == (2048.0, 32.0, 0.4)
    assert (numbers.running, numbers.flags["prefix_caching_off"]) == (6.0, False)


def test_blocks_alone_give_no_tokens(feed: Feed) -> None:
    numbers = derive_target(feed("trtllm_kv_cache_reused_blocks_total 90\n", system="tensorrt-llm"))
    assert numbers.hit_ratio is None
    assert "blocks alone give no tokens" in numbers.absent["prefix_hit_tokens"]


# TGI and llama.cpp


def test_tgi_has_queues_and_no_prefix_cache(feed: Feed) -> None:
    """Traps 5 and 9: counters without `_total`, durations in seconds that don't say so."""
    store = feed(
        "# TYPE tgi_request_success counter\ntgi_batch_current_size 7\ntgi_queue_size 2\n"
        'tgi_request_success{method="generate"} 40\ntgi_request_success{method="generate_stream"} 2\n'
        'tgi_request_queue_duration_bucket{le="+Inf"} 42\ntgi_request_queue_duration_sum 2.1\n'
        "tgi_request_queue_duration_count 42\ntgi_request_input_length_sum 8000\n",
        system="tgi",
    )
    numbers = derive_target(store)
    assert (numbers.running, numbers.waiting, store.total("finished_requests")) == (7.0, 2.0, 42.0)
    assert (store.total("queue_seconds", "sum"), store.total("prompt_tokens")) == (2.1, 8000.0)
    assert numbers.absent["prefix_hit_tokens"] == "TGI has no metric of its prefix cache"


def test_llama_cpps_prompt_tokens_are_the_computed_ones(feed: Feed) -> None:
    """Read as whole prompts they would make every lookup a miss."""
    page = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 3\nllamacpp:prompt_tokens_total {}\n"
    store = feed(page.format(0), page.format(500), system="llamacpp")
    numbers = derive_target(store)
    assert (numbers.running, numbers.waiting, store.total("finished_computed_tokens")) == (1.0, 3.0, 500.0)
    assert (store.has("prompt_tokens"), store.has("prefix_query_tokens"), numbers.hit_ratio) == (False, False, None)
    assert "leaves out the cached tokens" in numbers.absent["prompt_tokens"]


# vLLM under Ray


def ray(worker: str, running: int, queries: int, hits: int) -> str:
    labels = f'{{WorkerId="{worker}",SessionName="s-{worker}",engine="0",model_name="m"}}'
    return (
        f"ray_vllm_num_requests_running{labels} {running}\nray_vllm_kv_cache_usage_perc{labels} 0.5\n"
        f"ray_vllm_prefix_cache_queries{labels} {queries}\nray_vllm_prefix_cache_queries_total{labels} {queries}\n"
        f"ray_vllm_prefix_cache_hits{labels} {hits}\nray_vllm_prefix_cache_hits_total{labels} {hits}\n"
    )


def test_vllm_under_ray_is_counted_once_and_by_worker(feed: Feed) -> None:
    """Trap 5: each counter is there with and without `_total`. Trap 11: session and actor labels aren't kept."""
    store = feed(
        ray("a", 1, 0, 0) + ray("b", 5, 0, 0), ray("a", 1, 600, 300) + ray("b", 5, 400, 100), system="vllm-ray"
    )
    numbers = derive_target(store)
    assert (store.totals_by("prefix_query_tokens", "model"), numbers.hit_ratio) == ({("m",): 1000.0}, 0.4)
    assert (numbers.loads, numbers.kv_usage_max_ratio) == ({"a": 1.0, "b": 5.0}, 0.5)
    assert set(store.gauges_of("running_requests")) == {(("engine", w), ("model", "m")) for w in "ab"}


def test_a_replica_that_ray_shows_though_it_exited_has_no_requests_any_more(feed: Feed) -> None:
    """ray-project/ray#65892 (EM31): 12 run, not 24; what it had counted stays counted."""
    pages = [ray("old", 12, 5000, 100) + ray("new", 12, 10 * step, 0) for step in range(122)]
    ten_minutes = derive_target(feed(*pages[:120], system="vllm-ray"))
    assert (ten_minutes.running, ten_minutes.flags["frozen_engine"]) == (24.0, False)
    store = feed(*pages, system="vllm-ray")
    numbers = derive_target(store)
    assert (numbers.running, numbers.loads, numbers.flags["frozen_engine"]) == (12.0, {"new": 12.0}, True)
    assert store.total("prefix_query_tokens") == 5000.0 + 10 * 121


def test_an_idle_replica_stands_still_and_is_there(feed: Feed) -> None:
    pages = [ray("idle", 0, 5000, 100) + ray("busy", 12, 10 * step, 0) for step in range(200)]
    numbers = derive_target(feed(*pages, system="vllm-ray"))
    assert (numbers.loads, numbers.flags["frozen_engine"]) == ({"idle": 0.0, "busy": 12.0}, False)


def test_a_replica_that_moves_again_is_back(feed: Feed) -> None:
    pages = [ray("a", 12, 5000, 100)] * 200 + [ray("a", 12, 5100, 100)]
    assert derive_target(feed(*pages[:200], system="vllm-ray")).running is None
    assert derive_target(feed(*pages, system="vllm-ray")).running == 12.0


def test_other_engines_pages_are_taken_as_they_are(feed: Feed) -> None:
    """A hanging engine must be seen to have requests: only a page that is known to show dead ones is doubted."""
    numbers = derive_target(feed(*['vllm:num_requests_running{engine="0"} 12\n'] * 200))
    assert (numbers.running, "frozen_engine" in numbers.flags) == (12.0, False)
