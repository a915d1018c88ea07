"""What a page is recognised as, and Dynamo's workers in engines' dresses: exact values from real pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.exporters.catalogue.model import LabelRule, shipped_catalogue
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

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


def test_ray_without_vllm_is_not_vllm(capture: Capture) -> None:
    assert "vllm-ray" not in systems_of(metric_names(capture("ray-serve_2.60.0")))


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
    assert (store.total("inter_token_seconds", "count"), store.total("finished_requests")) == (630.0, 90.0)
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
