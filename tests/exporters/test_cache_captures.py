"""LMCache and Mooncake: exact values from real pages, in the units that they count in."""

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
