"""vLLM's families to canonical signals: exact values from real pages, and the traps of field reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.quality import missing_signals
from prefixwatch.exporters.scraping.signals import SignalStore

Feed = Callable[..., SignalStore]
Capture = Callable[[str], bytes]


def hits_by_tier(store: SignalStore) -> dict[str, float]:
    return {tier: tokens for (tier,), tokens in store.totals_by("prefix_hit_tokens", "tier").items() if tokens}


def test_a_real_page_gives_its_token_counters(capture: Capture, feed: Feed) -> None:
    store = feed(capture("vllm_0.32.0"))
    assert store.totals_by("prefix_query_tokens", "model") == {("tiny",): 118473.0}
    assert hits_by_tier(store) == {"gpu": 59616.0}
    assert store.total("finished_requests") == 59.0
    assert store.total("preemptions") == 2.0
    assert (store.total("ttft_seconds", "count"), store.total("ttft_seconds", "sum")) == (59.0, 42.26764178276062)


def test_a_real_page_gives_its_cache_size(capture: Capture, feed: Feed) -> None:
    numbers = derive_target(feed(capture("vllm_0.32.0")))
    assert (numbers.kv_capacity_blocks, numbers.block_size_tokens) == (300.0, 32.0)
    assert numbers.flags["missing_family"] is False


def test_tokens_from_a_kv_connector_are_a_tier_of_their_own(capture: Capture, feed: Feed) -> None:
    """vllm-project/vllm#30522 (EM02): the overall hit tokens are own plus external, over the own queries only."""
    store = feed(capture("vllm_0.32.0_kvconnector"))
    assert hits_by_tier(store) == {"gpu": 2944.0, "remote": 2944.0}
    assert store.total("prefix_query_tokens") == 27800.0


def test_the_headline_ratio_of_a_real_page(capture: Capture, feed: Feed) -> None:
    """Everything counted since the engine's first event: the first text has none of the counters yet."""
    page = capture("vllm_0.32.0")
    before = b"\n".join(line for line in page.split(b"\n") if b"_total{" not in line and b"tokens_sum" not in line)
    numbers = derive_target(feed(before, page))
    assert numbers.hit_ratio == 1 - 58857 / 118473
    assert numbers.hit_ratio_source == "computed"


@pytest.mark.parametrize(
    ("names", "version"),
    [
        (["gpu_prefix_cache_queries_total"], "0.8-0.9.1"),
        (["gpu_prefix_cache_queries_total", "prefix_cache_queries_total"], "0.9.2-0.10"),
        (["prefix_cache_queries_total", "time_per_output_token_seconds_count"], "0.11"),
        (["prefix_cache_queries_total", "inter_token_latency_seconds_count"], "0.12-0.31"),
    ],
)
def test_the_version_is_narrowed_down_by_the_names(names: list[str], version: str) -> None:
    present = frozenset(f"vllm:{name}" for name in names)
    system = shipped_catalogue().detect(present)
    assert system is not None
    assert (system.system, system.version(present)) == ("vllm", version)


def test_a_router_that_repeats_vllm_names_is_not_vllm(capture: Capture) -> None:
    """production-stack re-exports vllm:num_requests_running and more."""
    names = metric_names(capture("production-stack_0.1.12-14-ga6c01db0_prefixaware"))
    assert "vllm:num_requests_running" in names
    system = shipped_catalogue().detect(names)
    assert system is not None
    assert system.system == "production-stack"


@pytest.mark.parametrize("names", [["gpu_cache_usage_perc"], ["kv_cache_usage_perc"], ["gpu_cache_usage_perc"] * 2])
def test_the_usage_gauge_under_its_old_its_new_and_both_names(feed: Feed, names: list[str]) -> None:
    """vllm-project/production-stack#989 (EM07): one series of 0.42, not two and not 0.84."""
    both = {*names} if len(names) == 1 else {"gpu_cache_usage_perc", "kv_cache_usage_perc"}
    store = feed("".join(f'vllm:{name}{{engine="0"}} 0.42\n' for name in sorted(both)))
    assert list(store.gauges_of("kv_usage_ratio").values()) == [0.42]


def test_a_usage_gauge_under_no_known_name_is_absent_and_flagged(feed: Feed) -> None:
    """vllm-project/production-stack#989 (EM07): never 0."""
    numbers = derive_target(feed('vllm:num_requests_running{engine="0"} 3\n'))
    assert numbers.kv_usage_max_ratio is None
    assert numbers.flags["missing_family"] is True
    assert "vllm:gpu_cache_usage_perc" in numbers.absent["kv_usage_ratio"]


def test_neither_created_gauges_nor_deprecated_twins_are_added(feed: Feed) -> None:
    """vllm-project/production-stack#617 (EM09)."""
    store = feed(
        "# TYPE vllm:prefix_cache_queries_created gauge\n"
        'vllm:prefix_cache_queries_created{engine="0"} 1.75e9\n'
        'vllm:prefix_cache_queries_total{engine="0"} 32\n'
        'vllm:gpu_prefix_cache_queries_total{engine="0"} 32\n'
    )
    assert store.total("prefix_query_tokens") == 32.0


def test_engines_of_one_endpoint_are_summed_and_kept_apart(feed: Feed) -> None:
    """kubernetes-sigs/gateway-api-inference-extension#2950 (EM15)."""
    numbers = derive_target(
        feed(
            'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
            'vllm:num_requests_running{engine="1",model_name="m"} 57\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.05\n'
            'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.95\n'
        )
    )
    assert numbers.running == 57.0
    assert numbers.kv_usage_max_ratio == 0.95
    assert numbers.kv_usage_mean_ratio == 0.5
    assert numbers.loads == {"0": 0.0, "1": 57.0}


def test_usage_stays_a_ratio_however_small(feed: Feed) -> None:
    """vllm-project/vllm#20302 (EM41): the gauge is about 0 between requests and never a percentage."""
    store = feed('vllm:kv_cache_usage_perc{engine="0"} 9.75e-06\n')
    assert derive_target(store).kv_usage_max_ratio == 9.75e-06


def test_a_value_that_is_no_number_is_unknown(feed: Feed) -> None:
    store = feed('vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:prefix_cache_hits_total{engine="0"} NaN\n')
    assert derive_target(store).kv_usage_max_ratio is None


def test_client_chosen_model_names_are_bounded(feed: Feed) -> None:
    """ai-dynamo/dynamo#9836 (EM33): 1000 invented models make three series, and no token is lost."""
    text = "".join(f'vllm:prefix_cache_queries_total{{model_name="nope-{i}"}} 1\n' for i in range(1000))
    totals = feed(text, label_limit=2).totals_by("prefix_query_tokens", "model")
    assert totals == {("nope-0",): 1.0, ("nope-1",): 1.0, ("other",): 998.0}


@pytest.mark.parametrize("external_queries", [1000, 400])
def test_the_external_caches_queries_are_never_added(feed: Feed, external_queries: int) -> None:
    """vllm-project/vllm#30522 (EM02): 0.8 overall, whichever way the release counts external queries."""

    def page(queries: int, hits: int, external_hits: int, external: int) -> str:
        return (
            f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"
            f"vllm:external_prefix_cache_hits_total {external_hits}\n"
            f"vllm:external_prefix_cache_queries_total {external}\n"
        )

    numbers = derive_target(feed(page(0, 0, 0, 0), page(1000, 600, 200, external_queries)))
    assert numbers.raw_hit_ratio == 0.8


def test_a_histogram_without_finite_buckets_has_a_count_and_no_quantile(feed: Feed) -> None:
    """Found by fuzzing: what is left of a page that broke off, or of bounds that have nothing in common."""
    name = "vllm:time_to_first_token_seconds"
    numbers = derive_target(
        feed(*(f'{name}_bucket{{le="+Inf"}} {count}\n{name}_sum {count}\n{name}_count {count}\n' for count in (0, 50)))
    )
    assert dict(numbers.latency_seconds) == {}
    assert numbers.absent["ttft"] == "its series have no bucket bound in common but +Inf"


def test_a_latency_without_buckets_says_so_and_blames_no_window(feed: Feed) -> None:
    name = "vllm:time_to_first_token_seconds"
    numbers = derive_target(feed(*(f"{name}_sum {count}\n{name}_count {count}\n" for count in (0, 50))))
    assert numbers.absent["ttft"] == "its series have no bucket +Inf"


def test_a_renamed_hit_counter_is_missing_though_the_external_one_is_still_there(feed: Feed) -> None:
    """vllm-project/production-stack#989 (EM07): hits must not read 0 because a lesser counter is on the page."""
    store = feed("vllm:prefix_cache_hits_v2_total 600\nvllm:external_prefix_cache_hits_total 0\n")

    assert not store.has("prefix_hit_tokens")
    assert "prefix_hit_tokens" in missing_signals(store)
