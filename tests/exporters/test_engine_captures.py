"""Engines and caches other than plain vLLM: exact values from real pages, and the traps of names and units."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exporters.catalogue import LabelRule, shipped_catalogue
from exporters.fleet import derive_fleet
from exporters.scraping.derive import derive_target
from exporters.scraping.exposition import metric_names
from exporters.scraping.signals import SignalStore
from exporters.scraping.target import Target

Feed = Callable[..., SignalStore]
Capture = Callable[[str], bytes]
MakeTarget = Callable[..., Target]

SYSTEMS = {
    "dynamo-mocker_1.2.1_v121_w1": "dynamo-worker",
    "dynamo-mocker_1.6.1_disagg_w1": "dynamo-worker",
    "dynamo-mocker_1.6.1_kv_w1": "vllm",
    "dynamo-mocker_1.6.1_pressure_w1": "vllm",
    "dynamo-mocker_1.6.1_sgl_w1": "sglang",
    "dynamo-mocker_1.6.1_trt_w1": "tensorrt-llm",
    "lmcache-inprocess_0.5.6": "lmcache",
    "lmcache-inprocess_0.5.6_noMP": "lmcache",
    "lmcache-server_0.5.6": "lmcache",
    "lmcache-server_0.5.6_idle": "lmcache",
    "mooncake-master_0.3.13.post1": "mooncake-master",
    "vllm_0.32.0": "vllm",
}


def systems_of(names: frozenset[str]) -> list[str]:
    catalogue = shipped_catalogue()
    return [name for name in catalogue.names if catalogue.get(name).matches(names)]


def hits_by_tier(store: SignalStore) -> dict[str, float]:
    return {tier: tokens for (tier,), tokens in store.totals_by("prefix_hit_tokens", "tier").items()}


@pytest.mark.parametrize(("page", "system"), SYSTEMS.items())
def test_a_real_page_is_of_exactly_one_system(capture: Capture, page: str, system: str) -> None:
    assert systems_of(metric_names(capture(page))) == [system]


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("sglang:num_running_reqs", "sglang"),
        ("sglang_num_running_reqs", "sglang"),
        ("trtllm_num_requests_running", "tensorrt-llm"),
        ("tgi_queue_size", "tgi"),
        ("llamacpp:requests_processing", "llamacpp"),
        ("ray_vllm_num_requests_running", "vllm-ray"),
        ("ray_vllm:num_requests_running", "vllm-ray"),
    ],
)
def test_one_name_tells_the_system(name: str, system: str) -> None:
    assert systems_of(frozenset([name])) == [system]


def test_an_engine_with_lmcache_inside_is_the_engine(capture: Capture) -> None:
    """Its counter of external hits has LMCache's in it: read as both, they would be there twice."""
    names = metric_names(capture("vllm_0.32.0_kvconnector")) | metric_names(capture("lmcache-inprocess_0.5.6"))
    assert systems_of(names) == ["vllm"]


def test_lmcaches_controller_is_not_a_cache(capture: Capture) -> None:
    assert systems_of(metric_names(capture("lmcache-controller_0.5.6"))) == ["lmcache-controller"]


# Dynamo's mocker in its three dresses


def test_a_dynamo_worker_in_vllms_dress(capture: Capture, feed: Feed) -> None:
    store = feed(capture("dynamo-mocker_1.6.1_kv_w1"))
    assert (store.total("ttft_seconds", "count"), store.total("ttft_seconds", "sum")) == (309.0, 9.040040248000002)
    assert (store.total("inter_token_seconds", "count"), store.total("preemptions")) == (2163.0, 0.0)


def test_a_dynamo_worker_under_pressure_in_vllms_dress(capture: Capture, feed: Feed) -> None:
    """It is vLLM by its names, but has no prefix cache counters, and says so."""
    store = feed(capture("dynamo-mocker_1.6.1_pressure_w1"))
    numbers = derive_target(store)
    assert (numbers.running, numbers.waiting, numbers.kv_usage_max_ratio) == (3.0, 9.0, 37 / 60)
    assert (store.total("ttft_seconds", "count"), store.total("inter_token_seconds", "count")) == (68.0, 456.0)
    assert (numbers.hit_ratio, numbers.flags["missing_family"]) == (None, True)
    assert "vllm:prefix_cache_hits_total" in numbers.absent["prefix_hit_tokens"]


def test_a_dynamo_worker_in_sglangs_dress(capture: Capture, feed: Feed) -> None:
    """Trap 8: token counters that aren't there are absent with a reason, not 0; the gauge 0.855 is no substitute."""
    store = feed(*[capture("dynamo-mocker_1.6.1_sgl_w1")] * 2, system="sglang")
    numbers = derive_target(store)
    assert store.totals_by("finished_requests", "model") == {("fake-model",): 140.0}
    assert (store.total("ttft_seconds", "count"), store.total("ttft_seconds", "sum")) == (140.0, 2.738421621999999)
    assert store.total("inter_token_seconds", "count") == 980.0
    assert (numbers.running, numbers.waiting, numbers.raw_hit_ratio) == (0.0, 0.0, None)
    assert not store.has("prefix_hit_tokens")
    assert {"prefix_hit_tokens", "prefix_query_tokens", "kv_usage_ratio"} <= numbers.absent.keys()


def test_a_dynamo_worker_in_tensorrt_llms_dress(capture: Capture, feed: Feed) -> None:
    """Trap 7: the mocker writes `trtllm:`; trap of twins: the usage gauge's two names are one series."""
    store = feed(capture("dynamo-mocker_1.6.1_trt_w1"), system="tensorrt-llm")
    assert (store.total("ttft_seconds", "count"), store.total("ttft_seconds", "sum")) == (90.0, 2.9962544600000016)
    assert store.total("inter_token_seconds", "count") == 630.0
    assert list(store.gauges_of("kv_usage_ratio").values()) == [0.0]
    assert "inter_token_seconds" not in derive_target(store).absent


@pytest.mark.parametrize(("page", "requests"), [("1.2.1_v121_w1", 304.0), ("1.6.1_disagg_w1", 400.0)])
def test_a_dynamo_worker_without_engine_metrics(capture: Capture, feed: Feed, page: str, requests: float) -> None:
    """Its endpoint for KV queries is not counted as a request."""
    store = feed(capture(f"dynamo-mocker_{page}"), system="dynamo-worker")
    assert store.total("finished_requests") == requests
    assert derive_target(store).absent["kv_usage_ratio"] == "the engine's metrics are not in the text"


def test_a_worker_is_its_engine_once_the_engines_names_show_up(capture: Capture, make_target: MakeTarget) -> None:
    """Trap 8: Dynamo's worker has no engine metrics before its first request."""
    page = capture("dynamo-mocker_1.6.1_kv_w1").decode()
    before = "".join(f"{line}\n" for line in page.split("\n") if "vllm:" not in line)
    found = [make_target("w", *outcomes).system for outcomes in ((before,), (before, page), (page, before))]
    assert [system.system for system in found if system] == ["dynamo-worker", "vllm", "dynamo-worker"]


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
    (histogram,) = store.histograms("kv_transfer")[""]
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


def test_ray_without_vllm_is_not_vllm(capture: Capture) -> None:
    assert "vllm-ray" not in systems_of(metric_names(capture("ray-serve_2.60.0")))


# LMCache and Mooncake


@pytest.mark.parametrize("page", ["lmcache-inprocess_0.5.6", "lmcache-inprocess_0.5.6_noMP"])
def test_lmcache_in_process(capture: Capture, feed: Feed, page: str) -> None:
    store = feed(capture(page), system="lmcache")
    assert store.totals_by("prefix_query_tokens", "model") == {("m",): 256.0}
    assert (hits_by_tier(store), store.total("retrieved_tokens")) == ({"unknown": 128.0}, 128.0)
    assert derive_target(store).flags["dead_hit_counter"] is False


def test_lmcaches_live_counter_is_read_and_the_dead_one_flagged(feed: Feed) -> None:
    """LMCache/LMCache#2574 (EM27)."""
    store = feed(
        "lmcache:num_lookup_hits_total 51200\nlmcache:num_hit_tokens_total 0\nlmcache:num_vllm_hit_tokens_total 0\n",
        system="lmcache",
    )
    assert store.total("prefix_hit_tokens") == 51200.0
    assert derive_target(store).flags["dead_hit_counter"] is True


def test_lmcaches_server(capture: Capture, feed: Feed) -> None:
    """Its tenants' cache salts are labels there, and are not taken over."""
    store = feed(
        capture("lmcache-server_0.5.6_idle"),
        capture("lmcache-server_0.5.6"),
        system="lmcache",
    )
    assert store.totals_by("prefix_query_tokens", "model", "cache_salt") == {("test-model", ""): 61440.0}
    assert hits_by_tier(store) == {"cpu": 30720.0, "l2": 0.0}
    numbers = derive_target(store)
    assert (numbers.raw_hit_ratio, numbers.kv_usage_max_ratio) == (0.5, 0.671875)


def test_lmcaches_idle_server_has_no_hits_yet(capture: Capture, feed: Feed) -> None:
    """Trap 8: absent is not 0."""
    numbers = derive_target(feed(capture("lmcache-server_0.5.6_idle"), system="lmcache"))
    assert numbers.raw_hit_ratio is None
    assert "first lookup" in numbers.absent["prefix_query_tokens"]


def test_lmcaches_tiers_add_up_and_stay_out_of_the_engines_ratio(make_target: MakeTarget) -> None:
    """LMCache/LMCache#4962 (EM29): 450 + 150 = 600 of 1000; the GPU's 2000 of 4000 is a ratio of its own."""

    def cache(times: int) -> str:
        requested, hit, l1, l2 = (times * tokens for tokens in (1000, 600, 450, 150))
        return (
            f"lmcache_mp_lookup_requested_tokens_total {requested}\nlmcache_mp_lookup_hit_tokens_total {hit}\n"
            f"lmcache_mp_lookup_hit_l1_tokens_total {l1}\nlmcache_mp_lookup_hit_l2_tokens_total {l2}\n"
        )

    def engine(times: int) -> str:
        return f"vllm:prefix_cache_queries_total {times * 4000}\nvllm:prefix_cache_hits_total {times * 2000}\n"

    lmcache, vllm = make_target("cache", cache(0), cache(1)), make_target("engine", engine(0), engine(1))
    assert lmcache.store is not None
    assert lmcache.numbers is not None
    assert hits_by_tier(lmcache.store) == {"cpu": 450.0, "l2": 150.0}
    assert lmcache.numbers.raw_hit_ratio == 0.6
    assert derive_fleet([lmcache, vllm]).hit_ratio == 0.5


def test_mooncakes_master_counts_objects_and_bytes(capture: Capture, feed: Feed) -> None:
    """Trap 5: names are taken as they are on the page, without an added `_total`."""
    store = feed(capture("mooncake-master_0.3.13.post1"), system="mooncake-master")
    objects = ("lookup_objects", "lookup_hit_objects", "evicted_objects")
    assert [store.total(name) for name in objects] == [210.0, 62.0, 69.0]
    assert store.total("evicted_bytes") == 72351744.0
    numbers = derive_target(store)
    assert numbers.kv_usage_max_ratio == 52428800 / 67108864


def test_mooncakes_objects_never_enter_a_token_ratio(capture: Capture, feed: Feed) -> None:
    """tenstorrent/tt-inference-server#4765 (EM43)."""
    page = capture("mooncake-master_0.3.13.post1")
    numbers = derive_target(feed(page, page.replace(b"_get_nums_ ", b"_get_nums_ 1"), system="mooncake-master"))
    assert (numbers.hit_ratio, numbers.raw_hit_ratio) == (None, None)
    assert numbers.absent["prefix_hit_tokens"] == "Mooncake counts objects, not tokens"


def test_a_store_without_capacity_has_no_usage(feed: Feed) -> None:
    numbers = derive_target(feed("master_allocated_bytes 0\nmaster_total_capacity_bytes 0\n", system="mooncake-master"))
    assert numbers.kv_usage_max_ratio is None


# The schema


def test_a_label_that_a_sample_lacks_has_its_default() -> None:
    rule = LabelRule.model_validate({"from": "source", "map": {"device": "gpu"}, "default": "unknown"})
    assert [rule.apply(labels) for labels in ({"source": "device"}, {"source": "host"}, {})] == [
        "gpu",
        "host",
        "unknown",
    ]


@pytest.mark.parametrize("system", shipped_catalogue().names)
def test_no_system_reads_a_gauge_of_a_ratio_as_tokens(system: str) -> None:
    """Of the last batch only (EM11), of blocks, or of requests (EM43): none of them is a hit ratio of tokens."""
    ratios = {"sglang:cache_hit_rate", "sglang_cache_hit_rate", "trtllm_kv_cache_hit_rate", "lmcache:lookup_hit_rate"}
    assert not ratios & shipped_catalogue().get(system).wanted_names()
