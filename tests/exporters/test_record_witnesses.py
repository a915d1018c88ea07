"""Request records are held against the engines' counters, and against what can be cached at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.isolation.tenant_routes import TenantRoutes
from prefixwatch.exporters.requests.router_records import RouterRecords
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.request_record import RequestRecord
from tests.exporters.requests import done, ledger_of
from tests.exporters.test_router_records import Log

Request = tuple[int, int]
"""Prompt tokens and cached tokens."""


def target(name: str) -> Target:
    config = TargetConfig(name=name, url=f"http://{name}:8000/metrics")
    return Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())


def engine_page(served: Sequence[Request]) -> bytes:
    prompts, cached = sum(one[0] for one in served), sum(one[1] for one in served)
    return (
        'vllm:num_requests_running{engine="0"} 1\n'
        f"vllm:prompt_tokens_total {prompts}\nvllm:prefix_cache_queries_total {prompts}\n"
        f"vllm:prefix_cache_hits_total {cached}\nvllm:request_success_total {len(served)}\n"
    ).encode()


def observed(
    served: Sequence[Request], records: Sequence[RequestRecord], *, records_at: int = 1
) -> tuple[Target, Target]:
    """A router and its only engine, read twice; the records come between."""
    engine, router, log, now = target("w0"), target("router"), Log(), [0.0]
    routes = TenantRoutes()
    records_of = RouterRecords(ledger_of(), [engine, router], routes=routes, clock=lambda: now[0])
    router.ingest(Scrape(0.01, b"prefixwatch_router_in_flight 0\n"), 0.0)

    async def run() -> None:
        for step, page in enumerate((engine_page([]), engine_page(served))):
            now[0] = 10.0 * step
            engine.ingest(Scrape(0.01, page), now[0])
            if step == records_at:
                log.records += records
            await records_of.read(router, log.get)

    asyncio.run(run())
    return router, engine


requests = st.lists(
    st.integers(64, 4000).flatmap(lambda prompt: st.tuples(st.just(prompt), st.integers(0, (prompt - 1) // 16 * 16))),
    min_size=20, max_size=60,
)  # fmt: skip


@given(requests)
@settings(max_examples=25)
def test_records_and_counters_of_the_same_requests_agree(served: list[Request]) -> None:
    records = [done(prompt_tokens=p, cached_tokens=c, reusable_tokens=c // 16 * 16) for p, c in served]
    router, engine = observed(served, records)
    assert engine.flags(10.0)["records_disagree"] is False
    assert router.flags(10.0).get("cached_all_but_one", False) is False


@given(requests, st.floats(0.0, 1.0))
@settings(max_examples=25)
def test_a_hit_counter_that_counts_something_else_is_flagged_with_both_values(
    served: list[Request], share: float
) -> None:
    """The records' ratio against the counter's, whichever is larger."""
    prompts = sum(p for p, _ in served)
    counted = [(p, int(share * p)) for p, _ in served]
    ratio = sum(c for _, c in counted) / prompts
    told = sum(c for _, c in served) / prompts
    _, engine = observed(counted, [done(prompt_tokens=p, cached_tokens=c) for p, c in served])
    assert engine.flags(10.0)["records_disagree"] is (abs(ratio - told) > 0.2)
    if engine.flags(10.0)["records_disagree"]:
        assert engine.contradictions()["records_disagree"] == (
            f"{told:.1%} of the prompt tokens were cached by {len(served)} records, {ratio:.1%} by its counters"
        )


def test_an_engine_that_serves_others_too_is_not_compared() -> None:
    served = [(1000, 0)] * 40
    _, engine = observed([*served, *[(1000, 992)] * 40], [done(prompt_tokens=p, cached_tokens=c) for p, c in served])
    assert "records_disagree" not in engine.flags(10.0)


def test_records_without_cached_tokens_are_not_compared() -> None:
    served = [(1000, 992)] * 40
    _, engine = observed(served, [done(cached_tokens=None)] * 40)
    assert "records_disagree" not in engine.flags(10.0)


@pytest.mark.parametrize("reusable", [0, 400])
def test_all_but_one_token_of_new_prompts_cached_is_no_cache(reusable: int) -> None:
    """vllm-project/vllm#43370 (N21): behind a prefill/decode split it is prompt − 1, whatever was cached."""
    prompts = range(600, 640)
    records = [done(prompt_tokens=p, cached_tokens=p - 1, reusable_tokens=reusable) for p in prompts]
    router, _ = observed([], records)
    assert router.flags(10.0)["cached_all_but_one"]
    assert router.contradictions()["cached_all_but_one"] == (
        "w0: 40 of 40 new prompts are reported as cached except for one token"
    )


@given(st.integers(64, 4000), st.integers(1, 16))
@settings(max_examples=25)
def test_prompts_that_were_sent_before_may_be_cached_but_for_one_token(prompt: int, block: int) -> None:
    """SGLang's blocks are of one token: a repeated prompt is cached up to the last."""
    known = (prompt - 1) // block * block
    records = [done(prompt_tokens=prompt, cached_tokens=prompt - 1, reusable_tokens=known, block_size=block)] * 40
    router, _ = observed([], records)
    assert not router.flags(10.0).get("cached_all_but_one")


def test_the_flags_end_with_the_window() -> None:
    records = [done(prompt_tokens=p, cached_tokens=p - 1, reusable_tokens=0) for p in range(600, 640)]
    router, _ = observed([], records, records_at=0)
    assert router.flags(10.0)["cached_all_but_one"]
    router, _ = observed([], [], records_at=0)
    assert "cached_all_but_one" not in router.flags(10.0)


def test_misses_that_no_answer_reports_are_flagged_with_both_bounds() -> None:
    """vllm-project/vllm#44377, vllm-project/vllm-ascend#9911, ai-dynamo/dynamo#4530: a count of 0 is left out;
    BerriAI/litellm#36882: a gateway loses some. Ratios of what is reported were 90 % of an engine that hits 45 %."""
    hits = [done(prompt_tokens=1000, cached_tokens=900)] * 30
    router, _ = observed([], [*hits, *[done(prompt_tokens=1000, cached_tokens=None)] * 30])
    assert router.flags(10.0)["misses_unreported"]
    assert router.contradictions()["misses_unreported"] == (
        "w0: 30 answers report cached tokens, none of them 0, and 30 report none: "
        "its hit ratio is 45.0% if those were misses, and at most 90.0%"
    )


@given(requests, st.integers(1, 5))
@settings(max_examples=25)
def test_a_reported_miss_or_no_missing_count_raises_no_flag(served: list[Request], unknown: int) -> None:
    """Failed requests have no usage either, and streams without it are few."""
    known = [done(prompt_tokens=p, cached_tokens=c) for p, c in served]
    without = done(prompt_tokens=500, cached_tokens=None)
    for records in ([*known, *[without] * unknown], [*known, done(prompt_tokens=99, cached_tokens=0), *[without] * 40]):
        router, _ = observed([], records)
        assert router.flags(10.0)["misses_unreported"] is False
    nothing, _ = observed([], [without] * 40)
    assert "misses_unreported" not in nothing.flags(10.0)
