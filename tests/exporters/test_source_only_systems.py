"""Systems whose names are known from their source alone: the smallest page that shows each trap of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.plan import range_bounds
from prefixwatch.exporters.scraping.signals import SignalStore

Feed = Callable[..., SignalStore]

LLM_D = "".join(
    f'{prefix}request_total{{model_name="m",target_model_name="m"}} 40\n'
    f'{prefix}{cached}_bucket{{model_name="m",le="256"}} 10\n{prefix}{cached}_bucket{{model_name="m",le="+Inf"}} 40\n'
    f'{prefix}{cached}_sum{{model_name="m"}} 30000\n{prefix}{cached}_count{{model_name="m"}} 40\n'
    f'{prefix}{tokens}_sum{{model_name="m"}} 50000\n{prefix}{tokens}_count{{model_name="m"}} 40\n'
    for prefix, cached, tokens in (
        ("llm_d_epp_", "request_cached_tokens", "request_input_tokens"),
        ("inference_objective_", "prompt_cached_tokens", "input_tokens"),
    )
)


def histogram(name: str, labels: str, total: float, **buckets: int) -> str:
    inside = f"{labels}," if labels else ""
    lines = [
        f'{name}_bucket{{{inside}le="{bound[1:].replace("_", ".")}"}} {count}\n' for bound, count in buckets.items()
    ]
    return "".join(lines) + f"{name}_sum{{{labels}}} {total}\n{name}_count{{{labels}}} {max(buckets.values())}\n"


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("llm_d_epp_info", "llm-d-epp"),
        ("inference_extension_info", "llm-d-epp"),
        ("gateway_ttft_bucket_total", "aibrix-gateway"),
        ("flexlb_app_routing_queue_length", "flexlb"),
        ("ray_serve_num_http_requests_total", "ray-serve"),
        ("mooncake_transfer_read_bytes", "mooncake-client"),
        ("agent_tx_bytes_total", "nixl"),
        ("DCGM_FI_DEV_GPU_UTIL", "dcgm-exporter"),
        ("nv_trt_llm_request_metrics", "triton-tensorrt-llm"),
        ("sgl_router_requests_total", "sglang-router"),
        ("lmcache:cache_controller_registered_workers_count", "lmcache-controller"),
    ],
)
def test_one_name_tells_the_system(name: str, system: str) -> None:
    assert [found.system for found in shipped_catalogue().matching(frozenset([name]))] == [system]


# llm-d


def test_llm_ds_old_and_new_names_are_one_signal(feed: Feed) -> None:
    """Both stand on one page: 30000 cached tokens of 50000, not 60000 of 100000."""
    store = feed(LLM_D, system="llm-d-epp")
    assert store.total("router_delivered_hit_tokens") == 30000.0
    assert store.total("router_prompt_tokens") == 50000.0
    (per_request,) = store.histograms("request_hit_tokens")[()]
    assert (per_request.count, per_request.total) == (40.0, 30000.0)


def test_an_older_llm_d_alone_is_read_as_well(feed: Feed) -> None:
    page = "".join(f"{line}\n" for line in LLM_D.splitlines() if not line.startswith("llm_d_epp_"))
    assert feed(page, system="llm-d-epp").total("router_delivered_hit_tokens") == 30000.0


def test_llm_ds_time_to_first_token_is_of_streams(feed: Feed) -> None:
    """kubernetes-sigs/inference-perf#150 (LT27): without a stream the first token is the whole answer."""
    name = "llm_d_epp_request_ttft_seconds"
    page = histogram(name, 'streaming="true"', 5.0, _0_5=10, _Inf=10).replace('"Inf"', '"+Inf"')
    page += histogram(name, 'streaming="false"', 80.0, _0_5=0, _Inf=20).replace('"Inf"', '"+Inf"')
    store = feed(page, system="llm-d-epp")
    assert (store.total("ttft_seconds", "count"), store.total("ttft_seconds", "sum")) == (10.0, 5.0)


def test_llm_ds_placements_by_endpoint(feed: Feed) -> None:
    page = (
        'llm_d_epp_scheduler_attempts_total{status="success",endpoint_name="pod-0"} 30\n'
        'llm_d_epp_scheduler_attempts_total{status="success",endpoint_name="pod-1"} 10\n'
        'llm_d_epp_scheduler_attempts_total{status="failure",endpoint_name=""} 5\n'
        'llm_d_epp_inflight_requests{endpoint_name="pod-0",fairness_id="a",priority="0"} 3\n'
        'llm_d_epp_inflight_requests{endpoint_name="pod-0",fairness_id="b",priority="0"} 4\n'
    )
    store = feed(page, system="llm-d-epp")
    assert store.totals_by("routed_requests", "worker") == {("pod-0",): 30.0, ("pod-1",): 10.0}
    assert derive_target(store).loads == {"pod-0": 7.0}


# AIBrix


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("5-10ms", (0.005, 0.01)),
        ("0-1ms", (0.0, 0.001)),
        ("5000ms+", (5.0, math.inf)),
        ("8192-16384", (8192.0, 16384.0)),
        ("32768+", (32768.0, math.inf)),
    ],
)
def test_a_range_in_a_label(text: str, bounds: tuple[float, float]) -> None:
    assert range_bounds(text) == bounds


@pytest.mark.parametrize("text", ["", "10ms", "5-10ms+", "fast", "5-10min"])
def test_a_label_that_is_no_range(text: str) -> None:
    assert all(math.isnan(bound) for bound in range_bounds(text))


def aibrix(**counts: int) -> str:
    name = "gateway_ttft_bucket_total"
    return "".join(
        f'{name}{{bucket="{bucket[1:].replace("_", "-")}",model="m",pod="p"}} {n}\n' for bucket, n in counts.items()
    )


def test_aibrixs_counters_of_ranges_are_a_histogram(feed: Feed) -> None:
    """Each counter is of its range alone, and ranges that saw nothing aren't written: 2-5 ms is known to be empty."""
    store = feed(aibrix(_1_2ms=10, _5_10ms=30, _10_20ms=60), system="aibrix-gateway")
    (histogram_,) = store.histograms("ttft_seconds")[()]
    assert histogram_.bounds == (0.001, 0.002, 0.005, 0.01, 0.02, math.inf)
    assert histogram_.counts == (0.0, 10.0, 10.0, 40.0, 100.0, 100.0)
    assert histogram_.total is None
    assert math.isclose(histogram_.quantile(0.25) or 0, 0.0075)
    assert store.total("ttft_seconds", "count") == 100.0


def test_aibrixs_open_range_hides_the_tail(feed: Feed) -> None:
    page = aibrix(_0_1ms=1) + 'gateway_ttft_bucket_total{bucket="5000ms+",model="m",pod="p"} 9\n'
    (histogram_,) = feed(page, system="aibrix-gateway").histograms("ttft_seconds")[()]
    assert (histogram_.counts[-1], histogram_.quantile(0.99)) == (10.0, None)


def test_aibrixs_window_has_quantiles(feed: Feed) -> None:
    numbers = derive_target(feed(aibrix(_5_10ms=5), aibrix(_5_10ms=25, _50_100ms=20), system="aibrix-gateway"))
    assert numbers.latency_seconds["ttft", 0.5] == 0.01
    assert math.isclose(numbers.latency_seconds["ttft", 0.95], 0.095)


def test_aibrixs_request_ids_are_never_labels(feed: Feed) -> None:
    """Trap 11: a family of theirs has the request's id as a label."""
    page = "".join(
        f'gateway_request_model_success_total{{model="m",pod="p",request_id="r{i}"}} 1\n' for i in range(500)
    )
    store = feed(page, system="aibrix-gateway")
    assert store.totals_by("routed_requests", "worker", "outcome") == {("p", "completed"): 500.0}
    assert {label for group in store.groups for label, _ in group.labels} == {"model", "worker", "outcome"}


# FlexLB


def test_flexlbs_timers_are_seconds_whatever_they_are_called(feed: Feed) -> None:
    """Micrometer appends `_seconds` to a timer called `….ms` and writes seconds: no scale."""
    page = histogram("flexlb_app_routing_queue_wait_time_ms_seconds", "", 4.5, _1=8, _Inf=9).replace('"Inf"', '"+Inf"')
    page += "flexlb_app_cache_routing_selected_match_hit_tokens_total 600\n"
    page += "flexlb_app_cache_routing_selected_match_total_tokens_total 1000\n"
    page += 'flexlb_app_flexlb_inflight_request_count{engineIp="10.0.0.1"} 3\n'
    page += 'flexlb_app_cache_used_kv_cache_ratio{engineIp="10.0.0.1"} 0.5\n'
    store = feed(page, system="flexlb")
    assert store.total("queue_seconds", "sum") == 4.5
    assert (store.total("router_predicted_hit_tokens"), store.total("router_prompt_tokens")) == (600.0, 1000.0)
    numbers = derive_target(store)
    assert (numbers.loads, numbers.kv_usage_max_ratio) == ({"10.0.0.1": 3.0}, None)
    assert "scrape the engines" in numbers.absent["kv_usage_ratio"]


# Mooncake's client, NIXL


def test_mooncakes_client_counts_in_microseconds(feed: Feed) -> None:
    """Trap 9."""
    page = histogram("mooncake_transfer_get_latency", "", 2_500_000, _1000=1, _Inf=5).replace('"Inf"', '"+Inf"')
    page += "mooncake_transfer_read_bytes 4096\nmooncake_transfer_write_bytes 1024\n"
    store = feed(page, system="mooncake-client")
    ((labels, (one,)),) = store.histograms("kv_transfer", "source", "destination").items()
    assert (labels, one.bounds, one.total) == (("remote", "local"), (0.001, math.inf), 2.5)
    assert store.totals_by("kv_transfer_bytes", "source", "destination") == {
        ("remote", "local"): 4096.0,
        ("local", "remote"): 1024.0,
    }


def test_vllms_connectors_give_transfers(feed: Feed) -> None:
    """NIXL's bytes are the sum of a histogram; the offloading connector counts by direction."""
    page = histogram("vllm:nixl_xfer_time_seconds", 'engine="0"', 0.4, _0_1=15, _Inf=20).replace('"Inf"', '"+Inf"')
    page += histogram("vllm:nixl_bytes_transferred", 'engine="0"', 8192, _4096=20, _Inf=20).replace('"Inf"', '"+Inf"')
    page += 'vllm:nixl_num_failed_transfers_total{engine="0"} 2\n'
    page += 'vllm:kv_offload_load_bytes_total{engine="0"} 100\nvllm:kv_offload_store_bytes_total{engine="0"} 300\n'
    store = feed(page)
    assert (store.total("kv_transfer", "count"), store.total("kv_transfer_failures")) == (20.0, 2.0)
    assert store.totals_by("kv_transfer_bytes", "source", "destination") == {
        ("remote", "gpu"): 8192.0,
        ("cpu", "gpu"): 100.0,
        ("gpu", "cpu"): 300.0,
    }


def test_sglangs_megabytes_are_bytes_and_ranks_are_not_added(feed: Feed) -> None:
    """Trap 9: MB of 1,048,576 bytes, once a tensor-parallel rank, each with the same transfers."""
    page = "".join(
        histogram("sglang:kv_transfer_total_mb", f'tp_rank="{rank}"', 3, _5=2, _Inf=2).replace('"Inf"', '"+Inf"')
        + f'sglang:evicted_tokens_total{{tp_rank="{rank}"}} 70\n'
        for rank in range(4)
    )
    store = feed(page, system="sglang")
    assert store.totals_by("kv_transfer_bytes", "source", "destination") == {("gpu", "remote"): 3 * 1048576.0}
    assert store.total("evicted_tokens") == 70.0


# GPUs

DCGM = """\
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="n1",pod="p"} 87
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",Hostname="n1"} 0
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-a"} 0.31
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 70000
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 612.5
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a"} 7200000
DCGM_FI_PROF_PCIE_TX_BYTES{gpu="0",UUID="GPU-a"} 1000000
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a"} 31
"""


def test_dcgms_percent_mebibytes_and_millijoules(feed: Feed) -> None:
    """Trap 9."""
    store = feed(DCGM, system="dcgm-exporter")
    of_gpu_0 = (("gpu", "0"),)
    assert store.gauges_of("gpu_utilization_ratio") == {of_gpu_0: 0.87, (("gpu", "1"),): 0.0}
    assert store.gauges_of("gpu_memory_used_bytes") == {of_gpu_0: 70000 * 1048576.0}
    assert store.gauges_of("gpu_power_watts") == {of_gpu_0: 612.5}
    assert store.totals_by("gpu_energy_joules", "gpu") == {("0",): 7200.0}
    assert store.gauges_of("gpu_pcie_bytes_per_second") == {(("direction", "sent"), ("gpu", "0")): 1e6}


def test_a_gpu_is_no_worker(feed: Feed) -> None:
    numbers = derive_target(feed(DCGM, system="dcgm-exporter"))
    assert (numbers.running, numbers.loads, numbers.hit_ratio) == (None, {}, None)
    assert numbers.absent["running_requests"] == "a GPU knows no requests"


# Triton


def test_tritons_families_carry_their_meaning_in_a_label(feed: Feed) -> None:
    page = (
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 9\n'
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 6\n'
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3\n'
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm"} 6239\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm"} 3119.5\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm"} 64\n'
    )
    numbers = derive_target(feed(page, system="triton-tensorrt-llm"))
    assert (numbers.running, numbers.waiting, numbers.kv_usage_max_ratio) == (6.0, 3.0, 0.5)
    assert (numbers.kv_capacity_blocks, numbers.block_size_tokens) == (6239.0, 64.0)


# The older SGLang router


def test_sglangs_router_before_its_rename(feed: Feed) -> None:
    """Trap 7: `sgl_router_*` became `smg_*`."""
    page = (
        'sgl_router_processed_requests_total{worker="w0"} 7\nsgl_router_processed_requests_total{worker="w1"} 5\n'
        'sgl_router_running_requests{worker="w0"} 2\nsgl_router_cache_hits_total 4\n'
    )
    store = feed(page, system="sglang-router")
    assert store.totals_by("routed_requests", "worker") == {("w0",): 7.0, ("w1",): 5.0}
    assert derive_target(store).loads == {"w0": 2.0}
    assert shipped_catalogue().get("sglang-router").version(metric_names(page.encode())) == "<0.3"
