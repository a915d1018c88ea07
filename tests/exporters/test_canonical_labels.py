"""Labels and units that systems spell differently come out the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.exporters.catalogue.model import parse_system, shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.exposition import ExpositionReader
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

Feed = Callable[..., SignalStore]


@pytest.mark.parametrize("name", ["/models/Qwen3-0.6B", "/models/Qwen3-0.6B/", "./Qwen3-0.6B", "Qwen3-0.6B"])
def test_a_model_by_its_path_is_the_model_by_its_name(feed: Feed, name: str) -> None:
    """NVIDIA/TensorRT-LLM#19418 (EM25)."""
    store = feed(f'trtllm_num_requests_running{{model_name="{name}"}} 4\n', system="tensorrt-llm")
    assert store.gauges_of("running_requests") == {(("model", "Qwen3-0.6B"),): 4.0}


def test_an_organisations_name_stays_part_of_the_models(feed: Feed) -> None:
    store = feed('trtllm_num_requests_running{model_name="Qwen/Qwen3-0.6B"} 4\n', system="tensorrt-llm")
    assert store.gauges_of("running_requests") == {(("model", "Qwen/Qwen3-0.6B"),): 4.0}


def target(page: str, **config: object) -> Target:
    settings = TargetConfig.model_validate({"name": "t", "url": "http://localhost/metrics", **config})
    made = Target(settings, ExporterConfig(targets=(settings,)), shipped_catalogue())
    made.ingest(Scrape(0.01, page.encode()), 0.0)
    return made


def test_a_model_that_a_system_doesnt_know_is_the_configured_one() -> None:
    """vllm-project/aibrix#2004 (EM23): TensorRT-LLM writes `undefined`."""
    page = 'trtllm_num_requests_running{engine_type="undefined",model_name="undefined"} 2\n'
    for model, expected in (("Qwen3", "Qwen3"), (None, "undefined")):
        store = target(page, model=model).store
        assert store is not None
        assert store.gauges_of("running_requests") == {(("model", expected),): 2.0}


@pytest.mark.parametrize(("ranks", "raised"), [(8, True), (1, False), (None, None)])
def test_ranks_that_dont_report_are_told_and_not_made_up(ranks: int | None, raised: bool | None) -> None:
    """ai-dynamo/nixl#1838 (EM48): one of eight processes has the port; its bytes are not multiplied by eight."""
    made = target('agent_tx_bytes_total{agent_name="rank0",category="t"} 1000\n', ranks=ranks)
    assert made.store is not None
    assert made.store.total("kv_transfer_bytes") == 1000.0
    assert made.flags(0.0).get("ranks_missing") is raised


def test_a_scale_by_model_family() -> None:
    """ModelEngine-Group/unified-cache-management#1149 (EM50): per rank for one model, in all for another, TP 8."""
    system = parse_system(
        """\
system: ucm
title: Unified cache management
role: cache
detect: {any_of: [ucm_shards_total]}
signals:
  x_stored_blocks:
    kind: counter
    unit: blocks
    labels: {model: model}
    sources:
      - families:
          - {name: ucm_shards_total, scale: 0.125, only: {model: a}}
          - {name: ucm_shards_total, only: {model: b}}
""",
        "ucm.yaml",
    )
    store = SignalStore(system, 60.0, 100)
    page = b'ucm_shards_total{model="a"} 800\nucm_shards_total{model="b"} 100\n'
    store.apply(ExpositionReader(system.wanted_names()).read(page), 0.0)
    assert store.totals_by("x_stored_blocks", "model") == {("a",): 100.0, ("b",): 100.0}


def test_cache_usages_of_two_models_in_one_process_are_not_added(feed: Feed) -> None:
    """Two models, both in an engine called 0: each has a cache of its own."""
    usage = 'vllm:kv_cache_usage_perc{{engine="0",model_name="{}"}} {}\n'
    numbers = derive_target(feed(usage.format("a", 0.25) + usage.format("b", 0.75)))
    assert (numbers.kv_usage_max_ratio, numbers.kv_usage_mean_ratio) == (0.75, 0.5)


def test_ratios_and_sizes_that_several_series_repeat_are_not_added(feed: Feed) -> None:
    """What tells these series apart is no canonical label."""
    usage = 'trtllm_kv_cache_utilization{{model_name="m",rank="{}"}} {}\n'
    size = 'trtllm_kv_cache_tokens_per_block{{rank="{}"}} 64\n'
    page = usage.format(0, 0.5) + usage.format(1, 0.625) + size.format(0) + size.format(1)
    numbers = derive_target(feed(page, system="tensorrt-llm"))
    assert (numbers.kv_usage_max_ratio, numbers.block_size_tokens) == (0.625, 64.0)
