"""A family that an upgrade renames is missed at once, and routers' beliefs are shown beside the engines' blocks."""

from __future__ import annotations

from collections.abc import Callable

from prefixwatch.exporters.caches.believed_blocks import router_believed_blocks
from prefixwatch.exporters.scraping.quality import missing_signals
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

GAUGES = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"
QUERIES, HITS = "vllm:prefix_cache_queries_total 100\n", "vllm:prefix_cache_hits_total 50\n"


def test_a_counter_that_left_the_page_is_missing_although_its_sum_is_kept(feed: Callable[..., SignalStore]) -> None:
    """vllm-project/production-stack#989 (EM07): a rename while the exporter runs."""
    store = feed(GAUGES + QUERIES + HITS, GAUGES + HITS)
    assert missing_signals(store) == ["prefix_query_tokens"]
    assert store.total("prefix_query_tokens") == 100


def test_a_family_that_is_back_is_not_missing(feed: Callable[..., SignalStore]) -> None:
    whole = GAUGES + QUERIES + HITS
    assert missing_signals(feed(whole, GAUGES + HITS, whole)) == []


def _router(make_target: Callable[..., Target], name: str, **blocks: int) -> Target:
    lines = [f'prefixwatch_router_believed_blocks{{worker="{worker}"}} {count}' for worker, count in blocks.items()]
    return make_target(name, "\n".join([*lines, 'prefixwatch_router_in_flight{worker="a"} 0', ""]))


def test_of_several_routers_the_one_that_knows_most_of_a_worker_counts(make_target: Callable[..., Target]) -> None:
    routers = [_router(make_target, "r0", a=100, b=7), _router(make_target, "r1", a=90, b=40)]
    assert router_believed_blocks(routers) == {"a": 100, "b": 40}


def test_a_router_that_is_down_believes_nothing(make_target: Callable[..., Target]) -> None:
    page = 'prefixwatch_router_believed_blocks{worker="a"} 5\nprefixwatch_router_in_flight{worker="a"} 0\n'
    assert router_believed_blocks([make_target("r", page, "refused")]) == {}
