"""What is on a page and isn't read, or isn't as the catalogue says, is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.documents import DocumentError
from prefixwatch.exporters.catalogue.check import check
from prefixwatch.exporters.catalogue.model import parse_system, shipped_catalogue
from prefixwatch.exporters.catalogue.signals import KIND_OF
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.api import fleet_document
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

Feed = Callable[..., SignalStore]

HEALTHY = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100
"""


def target(*texts: str, content_type: str = "text/plain", **config: object) -> Target:
    own = TargetConfig.model_validate({"name": "e", "url": "http://e:8000/metrics", **config})
    made = Target(own, ExporterConfig(targets=(own,)), shipped_catalogue())
    for step, text in enumerate(texts):
        made.ingest(Scrape(0.01, text.encode(), content_type=content_type), 5.0 * step)
    return made


def document(made: Target) -> dict[str, object]:
    found: dict[str, object] = fleet_document([made], 5.0)["targets"][0]
    return found


@pytest.mark.parametrize(
    ("source", "tier"),
    [
        ("device", "gpu"),
        ("host", "cpu"),
        ("storage_HiCacheFile", "disk"),
        ("storage_file", "disk"),
        ("storage_MooncakeStore", "remote"),
        ("STORAGE_mooncakestore", "remote"),
        ("storage_HiCacheNixl", "remote"),
        ("storage_EICStorage", "remote"),
        ("storage_HiCacheHF3FS", "remote"),
        ("storage_SomethingNew", "unknown"),
        ("elsewhere", "unknown"),
    ],
)
def test_a_store_s_hits_have_a_tier_whatever_its_backend_is_called(feed: Feed, source: str, tier: str) -> None:
    """sgl-project/sglang#17648: the class of the backend is part of the value."""
    page = f'sglang:num_running_reqs 0\nsglang:cached_tokens_total{{cache_source="{source}"}} 5\n'
    assert feed(page, system="sglang").totals_by("prefix_hit_tokens", "tier") == {(tier,): 5.0}


@given(st.text(st.characters(min_codepoint=32, blacklist_categories=["Cs"], blacklist_characters='"\\'), min_size=1))
def test_a_tier_is_one_that_we_know_or_unknown(source: str) -> None:
    """Never the system's own text."""
    page = f'sglang:num_running_reqs 0\nsglang:cached_tokens_total{{cache_source="{source}"}} 5\n'
    store = target(page).store
    assert store is not None
    ((tier,),) = store.totals_by("prefix_hit_tokens", "tier")
    assert tier in {"gpu", "cpu", "disk", "remote", "unknown"}


def test_a_value_that_nobody_translated_is_flagged_and_reported_by_catalogue_check() -> None:
    page = 'sglang:num_running_reqs 0\nsglang:cached_tokens_total{cache_source="storage_New"} 5\n'
    made = target(page)
    assert made.flags(0.0)["unmapped_label"]
    assert made.contradictions()["unmapped_label"] == "prefix_hit_tokens: storage_New"
    warnings = check(shipped_catalogue().get("sglang"), page.encode(), shipped_catalogue()).warnings
    assert any("the map of 'tier' has no entry for cache_source=storage_New" in line for line in warnings)


def test_families_that_look_like_ours_and_are_not_read_are_counted_and_listed() -> None:
    made = target(HEALTHY + "vllm:new_cache_hits_total 1\nvllm:disk_queue_depth 2\nvllm:colour 3\ngo_memstats 1\n")
    assert document(made)["unread_families"] == ["vllm:disk_queue_depth", "vllm:new_cache_hits_total"]
    assert 'prefixwatch_unread_families{system="vllm"} 2.0' in render([made])[0].decode()


@pytest.mark.parametrize(
    ("text", "flag", "reason"),
    [
        (
            HEALTHY.replace("vllm:prefix_cache_queries counter", "vllm:prefix_cache_queries gauge"),
            "type_mismatch",
            "vllm:prefix_cache_queries_total: declared a gauge, read as a counter",
        ),
        (HEALTHY + "# TYPE vllm:num_requests_running gauge\n", "family_twice", "vllm:num_requests_running"),
    ],
)
def test_declarations_are_held_against_the_catalogue(text: str, flag: str, reason: str) -> None:
    made = target(text)
    assert (made.flags(0.0)[flag], made.contradictions()[flag]) == (True, reason)
    assert not target(HEALTHY).flags(0.0)[flag]


@pytest.mark.parametrize(
    ("content_type", "wrong"),
    [
        ("text/plain; version=0.0.4", False),
        ("application/openmetrics-text; version=1.0.0", False),
        ("text/html", True),
        ("application/json", True),
    ],
)
def test_a_page_declared_as_something_else_is_flagged(content_type: str, *, wrong: bool) -> None:
    assert target(HEALTHY, content_type=content_type).flags(0.0)["wrong_content_type"] is wrong


def test_a_family_that_goes_from_a_page_is_seen_but_not_after_a_restart() -> None:
    fewer = "\n".join(HEALTHY.splitlines()[:2]) + "\n"
    made = target(HEALTHY, fewer)
    assert made.flags(5.0)["schema_changed"]
    assert document(made)["vanished_families"] == ["vllm:prefix_cache_queries_total"]
    assert not made.flags(5.0 + 61.0)["schema_changed"]
    declared = target(HEALTHY, fewer + "# TYPE vllm:prefix_cache_queries_total counter\n")
    assert not declared.flags(5.0)["schema_changed"]  # as a gauge of what is in flight, while nothing is
    start = "process_start_time_seconds 1\nvllm:prompt_tokens_total 5\n"
    restarted = target(HEALTHY + start, fewer + start.replace(" 1\n", " 999\n"))
    assert not restarted.flags(5.0)["schema_changed"]


def test_a_layer_that_is_configured_and_silent_is_flagged() -> None:
    assert target(HEALTHY, layers=["lmcache"]).flags(0.0)["layer_silent"]
    assert not target(HEALTHY + "lmcache:num_hit_tokens 5\n", layers=["lmcache"]).flags(0.0)["layer_silent"]
    assert "layer_silent" not in target(HEALTHY).flags(0.0)


OWN = """\
system: zephyr
title: Zephyr
role: engine
detect: {any_of: [zephyr_running]}
signals:
  SIGNAL: {kind: gauge, unit: requests, sources: [{families: [zephyr_running]}]}
"""


def test_a_signal_that_nobody_knows_is_refused_with_the_nearest_name() -> None:
    """The file was taken, and the target lost its load without a word."""
    with pytest.raises(DocumentError, match="'runing_requests' is not a known signal, did you mean 'running_requests'"):
        parse_system(OWN.replace("SIGNAL", "runing_requests"), "zephyr.yaml")
    with pytest.raises(DocumentError, match="signal 'prompt_tokens' is a counter, not a gauge"):
        parse_system(OWN.replace("SIGNAL", "prompt_tokens"), "zephyr.yaml")
    assert "x_queue" in parse_system(OWN.replace("SIGNAL", "x_queue"), "zephyr.yaml").signals


def test_every_known_signal_is_one_that_a_shipped_system_gives() -> None:
    catalogue = shipped_catalogue()
    given_by = {name for system in catalogue.names for name in catalogue.get(system).signals}
    assert set(KIND_OF) == given_by
