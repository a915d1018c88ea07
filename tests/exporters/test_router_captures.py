"""Other routers' families to canonical signals: exact values from real pages, and the traps of these systems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.derive import derive_target
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.target import Target

Capture = Callable[[str], bytes]
Feed = Callable[..., SignalStore]
MakeTarget = Callable[..., Target]

CAPTURES = sorted(
    path.name.removeprefix("metrics_").removesuffix(".gz").removesuffix(".txt")
    for path in (Path(__file__).parent / "captures").iterdir()
)
ROUTERS = ("dynamo-frontend", "ray-serve", "production-stack", "sglang-router", "smg", "vllm-router")
WORKER_1, WORKER_2 = "http://127.0.0.1:18201", "http://127.0.0.1:18202"


@pytest.fixture
def store_of(capture: Capture, feed: Feed) -> Callable[[str], SignalStore]:
    """The signals of a router's capture, read as the system that its file name says."""
    return lambda name: feed(capture(name), system=name.split("_")[0])


StoreOf = Callable[[str], SignalStore]


@pytest.mark.parametrize("name", CAPTURES)
def test_every_page_is_taken_for_the_right_router_or_for_none(capture: Capture, name: str) -> None:
    names, catalogue = metric_names(capture(name)), shipped_catalogue()
    taken_for = [system for system in catalogue.names if catalogue.get(system).matches(names)]
    real = name.split("_", maxsplit=1)[0]
    if real in ROUTERS:
        assert taken_for == [real]
    else:
        assert not set(taken_for) & {*ROUTERS, "prefixwatch-router"}


@pytest.mark.parametrize(
    ("name", "version"),
    [("1.2.1_v121", "<1.5"), ("1.5.1_v151", "1.3-1.5"), ("1.6.1_kv", "1.6+"), ("1.6.1_approx", "1.6+")],
)
def test_dynamos_version_is_narrowed_down_by_the_names(capture: Capture, name: str, version: str) -> None:
    page = capture(f"dynamo-frontend_{name}")
    assert shipped_catalogue().get("dynamo-frontend").version(metric_names(page)) == version


def test_dynamos_tokens(store_of: StoreOf) -> None:
    store = store_of("dynamo-frontend_1.6.1_kv")
    assert store.totals_by("router_prompt_tokens", "model") == {("fake-model",): 311832.0}
    assert store.totals_by("router_delivered_hit_tokens", "model") == {("fake-model",): 261136.0}
    assert store.totals_by("router_predicted_hit_tokens", "model") == {("fake-model",): 253088.0}
    (per_request,) = store.histograms("request_hit_tokens")[()]
    assert (per_request.count, per_request.total) == (600.0, 261136.0)
    assert per_request.counts[per_request.bounds.index(430.0)] == 19.0


def test_dynamos_three_hit_rates_are_told_apart(store_of: StoreOf) -> None:
    """Trap 3: engines delivered 0.837, the router predicted 0.812; the mean of its ratios, 0.798, isn't taken."""
    store = store_of("dynamo-frontend_1.6.1_kv")
    prompts, delivered, predicted = (
        store.total(f"router_{tokens}_tokens") for tokens in ("prompt", "delivered_hit", "predicted_hit")
    )
    assert prompts
    assert delivered
    assert predicted
    assert round(delivered / prompts, 3) == 0.837
    assert round(predicted / prompts, 3) == 0.812
    assert not any("kv_hit_rate" in name for name in store.system.wanted_names())
    assert "mean of predicted ratios" in derive_target(store).absent["prefix_hit_ratio_mean"]


def test_a_salt_blinds_dynamos_router_and_not_the_engines(store_of: StoreOf) -> None:
    store = store_of("dynamo-frontend_1.6.1_kvtenant")
    assert store.total("router_predicted_hit_tokens") == 0.0
    assert store.total("router_delivered_hit_tokens") == 80528.0
    assert store.total("router_prompt_tokens") == 103980.0


def test_a_prompt_counts_once_with_prefill_and_decode_apart(store_of: StoreOf) -> None:
    """The disaggregated page has 207874 tokens twice, as phases of the same 400 requests."""
    store = store_of("dynamo-frontend_1.6.1_disagg")
    assert store.total("router_prompt_tokens") == 207874.0
    assert store.total("router_predicted_hit_tokens") == 164064.0


def test_older_dynamo_without_phases_and_without_hit_tokens(store_of: StoreOf) -> None:
    assert store_of("dynamo-frontend_1.5.1_v151").total("router_prompt_tokens") == 155894.0
    store = store_of("dynamo-frontend_1.2.1_v121")
    assert store.total("router_prompt_tokens") == 311832.0
    assert store.total("router_delivered_hit_tokens") is None
    assert store.total("router_predicted_hit_tokens") is None


def test_dynamos_decisions_are_in_seconds(store_of: StoreOf) -> None:
    """The page says milliseconds: 103.003672 of them in all, 294 of 600 up to 0.09."""
    steps = store_of("dynamo-frontend_1.6.1_kv").histograms("router_decision", "step")
    assert {step: one.count for step, (one,) in steps.items()} == dict.fromkeys(steps, 600.0)
    assert {step: one.total for (step,), (one,) in steps.items()} == pytest.approx(
        {"total": 0.103003672, "hash": 0.001908811, "lookup": 0.004325786, "choose": 0.095120038}
    )
    (total,) = steps[("total",)]
    assert dict(zip(total.bounds, total.counts, strict=True))[0.09 * 0.001] == 294.0


def test_dynamos_two_worker_ids_are_not_mixed(store_of: StoreOf) -> None:
    """Decimal ones are engines. The hexadecimal one is the frontend itself and is no worker."""
    store = store_of("dynamo-frontend_1.6.1_kv")
    workers = {dict(labels)["worker"] for labels in store.gauges_of("prefill_backlog_tokens")}
    assert workers == {"4350158863595313617", "6823678871362098181"}
    for signal in ("router_prompt_tokens", "router_predicted_hit_tokens", "routed_requests"):
        assert list(store.totals_by(signal, "worker")) == [("",)]


def test_first_tokens_that_dynamo_missed_raise_a_flag(store_of: StoreOf) -> None:
    """Trap 12: 586 first tokens of 600 requests, streaming and unary mixed; the older one counts all."""
    store = store_of("dynamo-frontend_1.6.1_kv")
    assert (store.total("ttft_seconds", "count"), store.total("finished_requests")) == (586.0, 600.0)
    assert derive_target(store).flags["missing_observations"] is True
    assert derive_target(store_of("dynamo-frontend_1.2.1_v121")).flags["missing_observations"] is False
    assert "output token counter misses tokens" in derive_target(store).absent["generation_tokens"]


def test_a_router_that_names_no_worker_makes_no_hotspot(capture: Capture, make_target: MakeTarget) -> None:
    """600 requests of unknown workers are neither a share of 1 nor a worker with an empty name."""
    page = capture("dynamo-frontend_1.6.1_kv").decode()
    before = "\n".join(line for line in page.split("\n") if not line.startswith("dynamo_frontend_requests_total"))
    target = make_target("frontend", before, page)
    assert target.store is not None
    assert target.store.grown_by("routed_requests", "outcome") == {("completed",): 600.0}
    fleet = derive_fleet([target])
    assert (dict(fleet.loads), fleet.top_share) == ({}, None)


def test_dynamos_numbers_on_our_own_page(capture: Capture, make_target: MakeTarget) -> None:
    lines = render([make_target("frontend", capture("dynamo-frontend_1.6.1_kv").decode())])[0].decode().split("\n")
    assert 'prefixwatch_prefix_hit_tokens_total{model="fake-model",target="frontend",tier="unknown"} 261136.0' in lines
    assert 'prefixwatch_prefix_query_tokens_total{model="fake-model",target="frontend"} 311832.0' in lines
    assert 'prefixwatch_requests_total{class="unclassified",model="fake-model",outcome="completed"} 600.0' in lines
    assert "prefixwatch_request_hit_tokens_sum 261136.0" in lines
    assert 'prefixwatch_router_decision_seconds_count{step="total"} 600.0' in lines


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("smg_1.13.0_cache_aware", 123.0, 177.0),
        ("sglang-router_0.3.2_cache_aware", 96.0, 204.0),
        ("vllm-router_0.1.17_cache_aware", 195.0, 105.0),
        ("vllm-router_0.1.17_consistent_hash", 213.0, 87.0),
        ("production-stack_0.1.12-14-ga6c01db0_prefixaware", 8.0, 192.0),
        ("production-stack_0.1.12-14-ga6c01db0_session", 30.0, 170.0),
    ],
)
def test_requests_by_worker(store_of: StoreOf, name: str, first: float, second: float) -> None:
    counts = store_of(name).totals_by("routed_requests", "worker")
    assert counts == {(WORKER_1,): first, (WORKER_2,): second}


IN_FLIGHT = {
    "smg": 'smg_worker_requests_active{worker="%s"}',
    "sglang-router": 'smg_worker_requests_active{worker="%s"}',
    "vllm-router": 'vllm_router_running_requests{worker="%s"}',
    "production-stack": 'vllm:num_requests_running{server="%s"}',
}


@pytest.mark.parametrize("system", IN_FLIGHT)
def test_requests_in_flight_by_worker(capture: Capture, feed: Feed, system: str) -> None:
    """The captured routers are at rest; the same page with 3 requests at one worker."""
    name = next(name for name in CAPTURES if name.startswith(system) and "aware" in name)
    series = IN_FLIGHT[system] % WORKER_2
    lines = capture(name).decode().split("\n")
    busy = "\n".join(f"{series} 3" if line.startswith(series) else line for line in lines)
    assert derive_target(feed(capture(name), system=system)).loads == {WORKER_1: 0.0, WORKER_2: 0.0}
    assert derive_target(feed(busy, system=system)).loads == {WORKER_1: 0.0, WORKER_2: 3.0}


@pytest.mark.parametrize("name", ["vllm-router_0.1.17_round_robin", "sglang-router_0.3.2_round_robin"])
def test_a_policy_that_ignores_load_leaves_it_unknown(store_of: StoreOf, name: str) -> None:
    assert derive_target(store_of(name)).loads == {}


def test_requests_waiting_in_the_router(feed: Feed) -> None:
    dynamo = 'dynamo_frontend_router_queue_pending_requests{model="m",worker_type="decode"} 4\n'
    assert derive_target(feed(dynamo, system="dynamo-frontend")).waiting == 4.0
    assert derive_target(feed("smg_admission_queue_depth 5\n", system="smg")).waiting == 5.0


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("smg_1.13.0_cache_aware", "smg_router_request_duration_seconds"),
        ("sglang-router_0.3.2_cache_aware", "smg_router_request_duration_seconds"),
        ("vllm-router_0.1.17_cache_aware", "vllm_router_generate_duration_seconds"),
    ],
)
def test_a_duration_that_ends_at_the_headers_is_no_latency(
    capture: Capture, store_of: StoreOf, name: str, family: str
) -> None:
    """Trap 1: streams of 414 to 428 ms read 5 to 12 ms there."""
    store = store_of(name)
    assert f"{family}_count" in metric_names(capture(name))
    assert not any(wanted.startswith(family) for wanted in store.system.wanted_names())
    assert derive_target(store).absent["e2e_seconds"].startswith(f"{family} ends at the response's headers")


def test_how_answers_ended_isnt_made_up(capture: Capture, make_target: MakeTarget) -> None:
    """smg counts placements: its requests have no outcome, so availability isn't told from them."""
    target = make_target("smg", capture("smg_1.13.0_worker_down").decode())
    assert target.store is not None
    assert target.store.totals_by("routed_requests", "worker") == {(WORKER_1,): 40.0, (WORKER_2,): 10.0}
    assert "prefixwatch_requests_total" not in render([target])[0].decode()
    assert target.numbers is not None
    assert "not how the answer ended" in target.numbers.absent["requests"]


def test_a_health_gauge_that_ignores_the_circuit_breaker_is_not_taken(capture: Capture, store_of: StoreOf) -> None:
    """Trap 10: smg says that the dead worker is healthy while its circuit is open."""
    page = capture("smg_1.13.0_worker_down").decode()
    assert f'smg_worker_health{{worker="{WORKER_2}"}} 1\n' in page
    assert f'smg_worker_cb_state{{worker="{WORKER_2}"}} 1\n' in page
    store = store_of("smg_1.13.0_worker_down")
    assert not store.has("worker_up")
    assert "smg_worker_cb_state" in derive_target(store).absent["worker_up"]


def test_model_unknown_is_a_value_like_any_other(store_of: StoreOf) -> None:
    """Trap 10: smg's own totals call 100 of 300 requests' model `unknown`; its count by worker knows it."""
    assert store_of("smg_1.13.0_cache_aware").totals_by("routed_requests", "model") == {("fake-model",): 300.0}


def test_production_stacks_gauges_named_total(store_of: StoreOf) -> None:
    """Pods are a gauge; prefix hits are gauges too, of names that engines dropped, and stay 0: not taken."""
    store = store_of("production-stack_0.1.12-14-ga6c01db0_prefixaware")
    assert {dict(labels)["worker"]: up for labels, up in store.gauges_of("worker_up").items()} == {
        WORKER_1: 1.0,
        WORKER_2: 1.0,
    }
    numbers = derive_target(store)
    assert (numbers.raw_hit_ratio, numbers.running) == (None, None)
    assert "scrape the engines" in numbers.absent["prefix_hit_tokens"]


def test_production_stacks_tokens_and_outcomes(store_of: StoreOf) -> None:
    store = store_of("production-stack_0.1.12-14-ga6c01db0_prefixaware")
    assert store.totals_by("prompt_tokens", "worker") == {(WORKER_1,): 1080.0, (WORKER_2,): 16920.0}
    assert store.totals_by("generation_tokens", "worker") == {(WORKER_1,): 48.0, (WORKER_2,): 752.0}
    assert store.totals_by("routed_requests", "outcome") == {("completed",): 200.0}


def test_a_router_that_repeats_vllm_names_is_no_engine_of_the_fleet(capture: Capture, make_target: MakeTarget) -> None:
    """Trap 6: told by the target, not by the name."""
    page = capture("production-stack_0.1.12-14-ga6c01db0_prefixaware").decode()
    target = make_target("router", page, page)
    assert target.system is not None
    assert (target.system.role, target.up) == ("router", True)
    assert "prefixwatch_requests_running" not in render([target])[0].decode()


def test_an_smg_that_has_routed_nothing_yet_is_not_taken_for_sglang_router() -> None:
    """Its count by worker comes with the first request; gauges of its runtime need none."""
    system = shipped_catalogue().detect(frozenset({"smg_worker_health", "smg_tokio_workers"}))
    assert system is not None
    assert system.system == "smg"
