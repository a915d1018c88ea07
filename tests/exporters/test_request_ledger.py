"""From request records to outcomes, latencies, goodput, the funnel and cold-prefill costs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from prefixwatch.exporters.requests.config import Pricing, RequestSettings
from prefixwatch.exporters.requests.ledger import PROBES, ROUTER, SPANS, RequestLedger
from prefixwatch.exporters.requests.request import Place
from prefixwatch.exporters.requests.router_records import doubts
from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.slo.buckets import LATENCY_SECONDS
from tests.exporters.requests import TRACE, done, figures, ledger_of, refused


def test_refused_requests_are_bad_however_fast_the_others_are() -> None:
    """An independent A/B of a KV-aware router under saturation (SL20): 86 fast, 14 turned away after 5 ms."""
    shown = figures(ledger_of([*[done(ttft_seconds=0.4)] * 86, *[refused()] * 14]))
    assert shown["requests_total"]["default", "completed"] == 86
    assert shown["requests_total"]["default", "refused"] == 14
    assert shown["goodput_requests_total"] == {("default",): 86}
    assert shown["goodput_tokens_total"] == {("default",): 86 * 11}
    for objective in ("availability", "ttft", "goodput"):
        assert shown["slo_requests_total"][objective, "good"] == 86
        assert shown["slo_requests_total"][objective, "bad"] == 14
    assert shown["ttft_seconds_count"] == {("miss",): 86}  # what was refused has no first token


@pytest.mark.parametrize("outcome", ["refused", "rejected", "failed", "timed_out", "disconnected"])
def test_whatever_did_not_complete_is_bad(outcome: str) -> None:
    """As the load test's grader counts."""
    shown = figures(ledger_of([refused(outcome=outcome)]))
    assert shown["goodput_requests_total"] == {("default",): 0}
    assert shown["slo_requests_total"]["availability", "bad"] == 1


def test_an_answer_that_was_not_streamed_has_no_ttft_and_is_left_out_of_its_objective() -> None:
    """kubernetes-sigs/inference-perf#150 (LT27): excluded and shown as such, no E2E in its place."""
    ledger = ledger_of([done(ttft_seconds=None, tpot_seconds=None, e2e_seconds=4.0)])
    shown = figures(ledger)
    assert "ttft_seconds_count" not in shown
    assert shown["e2e_seconds_sum"] == {("default",): 4.0}
    objectives = ledger.document(100.0)["objectives"]
    assert (objectives["ttft"]["good"], objectives["ttft"]["bad"], objectives["ttft"]["excluded"]) == (0, 0, 1)
    assert shown["goodput_requests_total"] == {("default",): 1}


def test_goodput_is_of_requests_that_meet_every_objective_at_once() -> None:
    slow_start, slow_rest, fine = done(ttft_seconds=0.6), done(tpot_seconds=0.06), done()
    shown = figures(ledger_of([slow_start, slow_rest, fine]))
    assert shown["goodput_requests_total"] == {("default",): 1}
    assert shown["slo_requests_total"]["ttft", "bad"] == 1
    assert shown["slo_requests_total"]["tpot", "bad"] == 1
    assert shown["slo_requests_total"]["goodput", "bad"] == 2


def test_counters_begin_at_0_when_records_are_read_so_that_the_first_bad_one_is_an_increase() -> None:
    """pyrra-dev/pyrra#1259, #448, #477 (SL05): a fresh deploy has its series before its first request."""
    ledger = ledger_of()
    assert "requests_total" not in figures(ledger)  # nothing is read: absent, not 0
    ledger.expect(ROUTER)
    assert "requests_total" not in figures(ledger)  # no model is known yet
    ledger.serves("m", "w0")
    shown = figures(ledger)
    assert shown["requests_total"]["default", "failed"] == 0
    assert shown["slo_requests_total"]["availability", "bad"] == 0
    assert "isolation_violations_total" not in shown  # nothing was judged


def test_nothing_derived_before_there_is_anything_to_derive_it_from() -> None:
    """volcano-sh/kthena#1042 (SL22): unknown is absent, never 0, and the fleet API says why."""
    ledger = ledger_of([refused()])
    shown = figures(ledger)
    for name in (
        "ttft_miss_minus_hit_seconds",
        "sessions",
        "cold_prefill_cost_usd_total",
        "prefix_funnel_tokens_total",
    ):
        assert name not in shown
    absent = ledger.document(100.0)["absent"]
    assert absent["cold_prefill_cost_usd"] == "no price: set pricing.gpu_usd_per_hour"
    assert "20 hits and misses" in absent["ttft_miss_minus_hit_seconds"]
    assert list(ledger_of().document(100.0)["absent"]) == ["everything"]


def test_ttft_by_what_was_cached() -> None:
    hit, partial, silent = done(cached_tokens=992), done(cached_tokens=16), done(cached_tokens=None)
    shown = figures(ledger_of([done(), hit, partial, partial, silent]))
    assert shown["ttft_seconds_count"] == {("miss",): 1, ("hit",): 1, ("partial",): 2}
    assert shown["ttft_by_length_seconds_count"]["hit", "512-2048"] == 1
    assert shown["request_hit_tokens_sum"] == {(): 992 + 2 * 16}


def test_more_cached_than_there_was_is_clamped_and_flagged() -> None:
    """kvcache-ai/Mooncake#4164 (RT12): 3 blocks of 16 reported for a prompt of 40 tokens."""
    record = done(prompt_tokens=40, cached_tokens=48, tenant="acme")
    shown = figures(ledger_of([record]))
    assert shown["tenant_hit_tokens_total"] == shown["tenant_prompt_tokens_total"] == {("acme",): 40}
    assert doubts(record) == ["cached_exceeds_prompt"]


def test_a_first_token_that_came_with_the_last_is_flagged() -> None:
    """vllm-project/aibrix#2477 (RT38): 128 tokens, TTFT 4.515 s of 4.52 s."""
    assert doubts(done(output_tokens=128, ttft_seconds=4.515, e2e_seconds=4.52)) == ["ttft_near_e2e"]
    assert doubts(done(output_tokens=128, ttft_seconds=0.1, e2e_seconds=4.52)) == []
    assert doubts(done(output_tokens=2, ttft_seconds=4.515, e2e_seconds=4.52)) == []


def test_miss_minus_hit_compares_prompts_of_like_length() -> None:
    """The misses' longer prompts must not pass for the cache's gain."""
    short = [done(prompt_tokens=400, cached_tokens=cached, ttft_seconds=s) for cached, s in ((384, 0.05), (0, 0.15))]
    long = [done(prompt_tokens=8000, cached_tokens=cached, ttft_seconds=s) for cached, s in ((7984, 0.25), (0, 1.25))]
    shown = figures(ledger_of([*short * 40, *long * 20]))
    assert shown["ttft_miss_minus_hit_seconds"][("0.5",)] == pytest.approx((40 * 0.1 + 20 * 1.0) / 60)
    assert shown["ttft_window_requests"] == {("hit",): 60, ("miss",): 60}
    later = figures(ledger_of([*short * 40]), now_seconds=161.0)
    assert "ttft_window_requests" not in later


def test_miss_minus_hit_needs_20_of_each_of_one_length() -> None:
    hits, misses = [done(cached_tokens=992)] * 30, [done()] * 19
    assert "ttft_miss_minus_hit_seconds" not in figures(ledger_of([*hits, *misses]))


def test_names_that_clients_choose_are_bounded() -> None:
    """ai-dynamo/dynamo#9836 (EM33)."""
    made_up = [done(tenant=f"t{k}", request_class=f"c{k}") for k in range(5000)]
    settings = RequestSettings(label_values=3)
    shown = figures(ledger_of([*made_up, done(tenant="acme", request_class="")], settings=settings, tenants=("acme",)))
    tenants = {tenant for _, tenant in shown["tenant_requests_total"]}
    assert tenants == {"t0", "t1", "t2", "other", "acme"}
    assert {name for name, _ in shown["requests_total"]} == {"c0", "c1", "c2", "default"}
    assert sum(shown["requests_total"].values()) == 5001


def test_only_listed_classes_count_by_name() -> None:
    settings = RequestSettings(classes=("chat",))
    shown = figures(ledger_of([done(request_class="chat"), done(request_class="x")], settings=settings))
    assert shown["goodput_requests_total"] == {("default",): 1, ("chat",): 1}


def test_the_funnel_and_where_requests_were_admitted() -> None:
    there = done(held_tokens=512, held_by="w0", predicted_tokens=512, cached_tokens=496)
    elsewhere = done(held_tokens=800, held_by="w1", predicted_tokens=160, cached_tokens=160)
    nobody = done(held_tokens=0, predicted_tokens=0)
    unknown = done(predicted_tokens=64, cached_tokens=64)
    zones = {"w0": Place(zone="a"), "w1": Place(zone="b")}
    shown = figures(ledger_of([there, elsewhere, nobody, unknown], places=zones))
    assert shown["prefix_funnel_tokens_total"] == {("held",): 1312, ("routed",): 672, ("delivered",): 656}
    assert shown["predicted_hit_tokens_total"] == {(): 736}
    assert shown["delivered_hit_tokens_total"] == {(): 720}
    assert shown["affinity_admissions_total"] == {("held",): 1, ("elsewhere",): 1}
    assert shown["topology_placements_total"] == {("in_zone",): 1, ("out_of_zone",): 1}
    assert shown["router_decisions_total"] == {("cache_aware", "match"): 4}


def test_a_salt_for_each_request_shows_as_a_tenant_that_never_hits() -> None:
    """vllm-project/vllm#52655 (IS08): what the tenant had sent before is computed again each time."""
    shown = figures(ledger_of([done(tenant="acme", salted=True, own_tokens=992)] * 3))
    assert shown["tenant_prompt_tokens_total"] == {("acme",): 3000}
    assert shown["tenant_hit_tokens_total"] == {("acme",): 0}


def test_hits_that_cannot_happen_show_between_routed_and_delivered() -> None:
    """ai-dynamo/dynamo#8197 (IS06): an index without salts predicts what no engine delivers."""
    shown = figures(ledger_of([done(held_tokens=512, predicted_tokens=512, held_by="w0", salted=True)] * 2))
    assert shown["prefix_funnel_tokens_total"] == {("held",): 1024, ("routed",): 1024, ("delivered",): 0}


def test_cold_prefills_cost_their_time_at_the_price() -> None:
    pricing = Pricing(gpu_usd_per_hour=3.6, gpus_per_worker=2)
    shown = figures(ledger_of([done(ttft_seconds=0.5), done(cached_tokens=992)], pricing=pricing))
    assert shown["cold_prefill_requests_total"] == {(): 1}
    assert shown["cold_prefill_gpu_seconds_total"] == {(): 1.0}
    assert shown["cold_prefill_cost_usd_total"] == {(): pytest.approx(0.001)}
    assert shown["warm_prefill_seconds_count"] == {(): 1}


def test_with_a_baseline_waiting_is_not_paid_for_and_a_miss_has_its_cost() -> None:
    records = [done(ttft_seconds=0.5), done(cached_tokens=500, ttft_seconds=0.1)]
    shown = figures(ledger_of(records, baseline=lambda model, tokens: tokens / 5000 if model == "m" else None))
    assert shown["cold_prefill_gpu_seconds_total"] == {(): 0.2}
    assert shown["prefix_miss_cost_ratio_sum"] == {(): 2.5}
    assert shown["prefill_saved_gpu_seconds_total"] == {(): 0.1}


def test_without_probes_the_fastest_tenth_of_the_misses_is_the_baseline() -> None:
    misses = [done(ttft_seconds=0.1 * (k + 1)) for k in range(20)]
    shown = figures(ledger_of([*misses, done(ttft_seconds=0.4)]))
    assert shown["prefix_miss_cost_ratio_count"] == {(): 1}
    assert shown["prefix_miss_cost_ratio_sum"] == {(): pytest.approx(2.0)}


def missed(prompt: int, prefill: float, queue: float, migrate: float = 0.0, **more: Any) -> RequestRecord:
    parts = {"miss_prefill_seconds": prefill, "miss_queue_seconds": queue, "miss_migrate_seconds": migrate}
    return done(prompt_tokens=prompt, ttft_seconds=prefill + queue + migrate, **{**parts, **more})


def test_the_cost_of_a_miss_by_part_and_prompt_length_over_five_minutes() -> None:
    short = [missed(400, 0.04, 0.01 * k) for k in range(1, 6)]
    long = [missed(4000, 0.4, 0.0, 0.1, cached_tokens=1600, reusable_tokens=3200)] * 5
    ledger = ledger_of([*short, *long])

    shown = figures(ledger)["miss_cost_seconds"]

    assert shown["0-512", "prefill", "0.5"] == 0.04
    assert (shown["0-512", "queue", "0.5"], shown["0-512", "queue", "0.95"]) == (0.03, 0.05)
    assert shown["0-512", "total", "0.95"] == pytest.approx(0.09)
    assert shown["2048-8192", "migrate", "0.95"] == 0.1
    assert ledger.seconds_per_token("m") == pytest.approx((5 * 0.04 + 5 * 0.4) / (5 * 400 + 5 * 2400))
    assert "miss_cost_seconds" not in figures(ledger, now_seconds=401.0)
    assert "5 minutes" in ledger.document(401.0)["absent"]["miss_cost_seconds"]


def test_hits_and_misses_without_parts_have_no_cost() -> None:
    hits = [missed(1000, 0.01, 0.2, cached_tokens=992)] * 9
    assert "miss_cost_seconds" not in figures(ledger_of([*hits, *[done()] * 9]))


def test_sessions_moved_on_purpose_are_counted_by_what_decided() -> None:
    moved = done(session="s", move="hard", move_why="no_connector", move_trigger="drain")
    shown = figures(ledger_of([done(session="s"), moved]))
    assert shown["session_moves_total"] == {("hard", "drain", "no_connector"): 1}


def test_bucket_bounds_are_those_that_thresholds_are_held_to() -> None:
    buckets = figures(ledger_of([done()]))["tpot_seconds_bucket"]
    bounds = [float(bound) for _, bound in buckets]
    assert bounds == [*LATENCY_SECONDS, math.inf]


class _Page(Collector):
    def __init__(self, ledger: RequestLedger) -> None:
        self._ledger = ledger

    def collect(self):  # type: ignore[no-untyped-def]  # the library's signature
        return self._ledger.metrics(100.0)


def test_openmetrics_carries_trace_ids_as_exemplars() -> None:
    registry = CollectorRegistry()
    registry.register(_Page(ledger_of([done(trace_id=TRACE, ttft_seconds=0.2)])))
    page: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]  # the library's, without types
    lines = page.decode().splitlines()
    bucket = 'prefixwatch_ttft_seconds_bucket{cache="miss",cluster="",le="0.2",model="m",namespace="",pool=""}'
    marked = [line for line in lines if line.startswith(bucket)]
    assert marked == [f'{bucket} 1.0 # {{trace_id="{TRACE}"}} 0.2 1700000000.0']


def test_a_trace_id_that_is_too_long_for_an_exemplar_is_left_out() -> None:
    """128 characters with the label's name: a strict reader refuses the whole page for one more."""
    registry = CollectorRegistry()
    registry.register(_Page(ledger_of([done(trace_id="a" * 120, ttft_seconds=0.2), done(trace_id="b" * 121)])))
    page: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]  # the library's, without types
    text = page.decode()
    assert "a" * 120 in text
    assert "b" * 121 not in text
    assert list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def test_a_routers_policies_are_bounded() -> None:
    shown = figures(ledger_of([done(policy=f"p{number}", reason="match") for number in range(150)]))
    assert len(shown["router_decisions_total"]) == 101
    assert shown["router_decisions_total"]["other", "match"] == 50


def test_the_same_requests_told_by_two_sources_count_once() -> None:
    ledger = ledger_of([done()] * 3)
    for _ in range(3):
        ledger.record(done(trace_id=TRACE), SPANS)
    shown = figures(ledger)
    assert shown["requests_total"]["default", "completed"] == 3
    assert shown["request_records_total"] == {("router",): 3, ("spans",): 3}
    assert figures(ledger_of([done()], SPANS))["requests_total"]["default", "completed"] == 1


def test_probes_are_no_traffic() -> None:
    shown = figures(ledger_of([done()], PROBES))
    assert shown["ttft_seconds_count"] == {("miss",): 1}
    assert "requests_total" not in shown
    assert "goodput_requests_total" not in shown


def test_traces_that_the_router_told_are_known_to_who_reads_spans() -> None:
    ledger = ledger_of([done(trace_id=TRACE)])
    assert TRACE in ledger.router_traces
    assert "0" * 32 not in ledger.router_traces


def test_a_source_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="'nobody' isn't a source of request records; use one of router"):
        ledger_of([done()], "nobody")


_RECORDS = st.builds(
    done,
    outcome=st.sampled_from(["completed", "refused", "failed", "timed_out", "rejected", "disconnected"]),
    worker=st.sampled_from(["w0", "w1", ""]),
    tenant=st.sampled_from(["", "a", "b"]),
    request_class=st.sampled_from(["", "chat", "batch"]),
    prompt_tokens=st.one_of(st.none(), st.integers(1, 40_000)),
    cached_tokens=st.one_of(st.none(), st.integers(0, 40_000)),
    held_tokens=st.one_of(st.none(), st.integers(0, 4000)),
    predicted_tokens=st.one_of(st.none(), st.integers(0, 4000)),
    own_tokens=st.one_of(st.none(), st.integers(0, 4000)),
    ttft_seconds=st.one_of(st.none(), st.sampled_from([0.25, 0.5, 1.0])),
    session=st.sampled_from(["", "s", "t"]),
)
_BY_ORDER = (
    "session_", "sticky_", "prefix_miss_cost_ratio", "cold_prefill_gpu", "prefill_saved", "isolation_violations",
)  # fmt: skip
"""Sessions, the baseline that is learnt and whoever shared an engine before: what came first matters."""


@settings(max_examples=40, deadline=None)
@given(st.lists(_RECORDS, max_size=60), st.randoms(use_true_random=False))
def test_totals_do_not_depend_on_the_order(records: list[RequestRecord], random_order: random.Random) -> None:
    shuffled = random_order.sample(records, len(records))
    one, other = (
        {name: values for name, values in figures(ledger_of(given)).items() if not name.startswith(_BY_ORDER)}
        for given in (records, shuffled)
    )
    assert one == other


@settings(max_examples=40, deadline=None)
@given(st.lists(_RECORDS, max_size=60))
def test_nothing_is_lost_between_outcomes_tenants_and_goodput(records: list[RequestRecord]) -> None:
    shown = figures(ledger_of(records))
    by_outcome = shown.get("requests_total", {})
    assert sum(by_outcome.values()) == sum(shown.get("tenant_requests_total", {}).values()) == len(records)
    for name, good in shown.get("goodput_requests_total", {}).items():
        assert good <= by_outcome[(*name, "completed")]
    hits, prompts = shown.get("tenant_hit_tokens_total", {}), shown.get("tenant_prompt_tokens_total", {})
    assert all(hits[tenant] <= prompts[tenant] for tenant in hits)


def test_the_live_trace_has_each_request_once_and_no_probe() -> None:
    """A plan counted the exporter's own probes as traffic, and found some where nobody had sent any."""
    probed = ledger_of([done()] * 3, PROBES)
    assert probed.live_trace.page(0)["added"] == 0
    both = ledger_of([done(trace_id=TRACE)])
    both.record(done(trace_id=TRACE), SPANS)
    both.record(done(trace_id=TRACE[::-1]), SPANS)
    both.record(done(), SPANS)
    assert both.live_trace.page(0)["added"] == 3
