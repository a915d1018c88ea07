"""Independent sources are held against each other: a contradiction is a flag, with both values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.api import fleet_document
from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

Feed = Callable[..., SignalStore]


def page(**values: float) -> str:
    """A vLLM page; `source_*` are prompt tokens by source."""
    lines = []
    for name, value in values.items():
        family, _, source = name.partition("source_")
        label = f',source="{source}"' if source else ""
        family = "prompt_tokens_by_source_total" if source else family
        lines.append(f'vllm:{family}{{engine="0",model_name="m"{label}}} {value}\n')
    return "".join(lines)


def target(name: str, *texts: str, **config: object) -> Target:
    own = TargetConfig.model_validate({"name": name, "url": f"http://{name}:8000/metrics", **config})
    made = Target(own, ExporterConfig(targets=(own,)), shipped_catalogue())
    for step, text in enumerate(texts):
        made.ingest(Scrape(0.01, text.encode()), 5.0 * step)
    return made


def prefill(step: int) -> str:
    tokens = 10_000 * step
    return page(
        num_requests_running=2, prompt_tokens_total=tokens, prefix_cache_queries_total=tokens,
        prefix_cache_hits_total=0.2 * tokens, external_prefix_cache_queries_total=0.8 * tokens,
        external_prefix_cache_hits_total=0, source_local_compute=0.8 * tokens, source_local_cache_hit=0.2 * tokens,
        source_external_kv_transfer=0,
    )  # fmt: skip


def decode(step: int, share: float = 0.999) -> str:
    tokens = 10_000 * step
    return page(
        num_requests_running=2, prompt_tokens_total=tokens, prefix_cache_queries_total=tokens,
        prefix_cache_hits_total=0, external_prefix_cache_queries_total=tokens,
        external_prefix_cache_hits_total=share * tokens, source_local_compute=(1 - share) * tokens,
        source_external_kv_transfer=share * tokens,
    )  # fmt: skip


def test_what_a_prefill_engine_hands_over_is_no_hit() -> None:
    """vllm-project/vllm#33289: the fleet reused 20 % of its prompt tokens; the counters say 60 %."""
    fleet = [target("p", *map(prefill, range(1, 5))), target("d", *map(decode, range(1, 5)))]
    assert derive_fleet(fleet).hit_ratio == pytest.approx(0.2)
    assert fleet[1].flags(15.0)["hits_by_transfer"]
    text = render(fleet)[0].decode()
    assert 'prefixwatch_prompt_tokens_transferred_total{model="m",target="d"} 39960.0' in text
    assert 'prefix_query_tokens_total{model="m",target="d"}' not in text
    document = fleet_document(fleet, 15.0)["targets"][1]
    assert document["flag_reasons"]["hits_by_transfer"].startswith("39,960 of 40,000 prompt tokens")
    assert "arrive by KV transfer" in document["absent"]["hit_ratio"]


def test_a_configured_role_says_so_at_any_share() -> None:
    fleet = [
        target("p", *map(prefill, range(1, 5)), role="prefill"),
        target("d", *(decode(step, 0.5) for step in range(1, 5)), labels={"role": "decode"}),
    ]
    assert derive_fleet(fleet).hit_ratio == pytest.approx(0.2)


@given(st.floats(0.0, 0.95))
def test_an_external_cache_that_misses_sometimes_is_a_cache(share: float) -> None:
    cached = target("e", *(decode(step, share) for step in range(1, 5)))
    assert not cached.flags(15.0)["hits_by_transfer"]


def lookups(step: int, repeats: int, **more: float) -> str:
    tokens = 10_000 * step
    return page(
        num_requests_running=8, num_requests_waiting=40, prompt_tokens_total=tokens,
        prefix_cache_queries_total=repeats * tokens, prefix_cache_hits_total=0.88 * repeats * tokens,
        request_success_total=10 * step, **{name: value * tokens for name, value in more.items()},
    )  # fmt: skip


def test_lookups_that_waiting_requests_repeat_are_flagged(feed: Feed) -> None:
    """vllm-project/vllm#43736: five lookups a prompt; 30 % were cached, the counters say 88 %."""
    texts = [lookups(step, 5, prompt_tokens_cached_total=0.3) for step in range(1, 5)]
    numbers = derive_target(feed(*texts))
    assert numbers.flags["double_counted"]
    assert numbers.hit_ratio == pytest.approx(0.3)
    assert numbers.hit_ratio_source == "computed"
    assert numbers.contradictions["double_counted"] == "150,000 tokens looked up, 30,000 prompt tokens"
    assert derive_fleet([target("e", *texts)]).hit_ratio == pytest.approx(0.3)


def test_without_a_second_source_the_ratio_is_unknown_and_not_best(feed: Feed) -> None:
    numbers = derive_target(feed(*(lookups(step, 5) for step in range(1, 5))))
    assert (numbers.hit_ratio, numbers.flags["double_counted"]) == (None, True)
    assert "more than once" in numbers.absent["hit_ratio"]


@given(st.integers(0, 48_000))
def test_requests_under_way_are_no_repeated_lookups(ahead: int) -> None:
    """48 requests of 1,000 tokens have looked their prompts up and are not prefilled yet."""
    series = 'prefix_cache_queries_total{engine="0",model_name="m"} '
    before, after = lookups(1, 1), lookups(4, 1).replace(f"{series}40000", f"{series}{40_000 + ahead}")
    assert not target("e", before, after).flags(5.0)["double_counted"]


def served(step: int, running: float, seconds: float) -> str:
    """Ten requests a scrape, of one second each."""
    name, labels = "vllm:e2e_request_latency_seconds", 'engine="0",model_name="m"'
    count = 10 * step
    return (
        page(num_requests_running=running)
        + f'{name}_bucket{{{labels},le="+Inf"}} {count}\n{name}_sum{{{labels}}} {count * seconds}\n'
        + f"{name}_count{{{labels}}} {count}\n"
    )


@pytest.mark.parametrize(
    ("running", "seconds", "disagrees"),
    [(2.0, 1.0, False), (0.0, 1.0, False), (0.0, 4.0, True), (256.0, 1.0, True), (8.0, 4.0, False)],
)
def test_gauges_of_load_are_held_against_request_times(running: float, seconds: float, *, disagrees: bool) -> None:
    """Two requests a second of 4 s each are 8 at a time: a gauge that stands at 0 or at its bound is wrong."""
    engine = target("e", *(served(step, running, seconds) for step in range(1, 9)))
    assert engine.flags(40.0)["load_disagrees"] is disagrees
    assert ("load_disagrees" in engine.contradictions()) is disagrees
