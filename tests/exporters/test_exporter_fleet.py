"""What several targets say together, and what only a router can tell."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.target import Target

MakeTarget = Callable[..., Target]


def engine(running: float, hits: float = 0, queries: float = 0) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} 0\n'
        f"vllm:prefix_cache_hits_total {hits}\nvllm:prefix_cache_queries_total {queries}\n"
    )


class RouterPage:
    """A router's metrics page, under the reference router's names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "worker", "model", "outcome")
        self.delivered = self._counter("delivered_hit_tokens", "worker")
        self.prompts = self._counter("prompt_tokens", "worker")
        self.hit_tokens = self._histogram("request_hit_tokens", (0, 64, 1024))
        self.ttft = self._histogram("ttft_seconds", (0.1, 0.2, 0.4, 0.8), "cache")
        self.decision = self._histogram("decision_seconds", (0.001, 0.012), "step")
        self.in_flight = Gauge("prefixwatch_router_in_flight", "-", ["worker"], registry=self.registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(f"prefixwatch_router_{name}", "-", labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"prefixwatch_router_{name}", "-", labels, buckets=buckets, registry=self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def test_hotspots_of_a_fleet(make_target: MakeTarget) -> None:
    targets = [make_target(f"e{i}", engine(load)) for i, load in enumerate([1, 1, 1, 5])]
    hotspot = derive_fleet(targets).hotspot
    assert hotspot is not None
    assert (hotspot.overloaded_ratio, hotspot.max_over_mean, hotspot.busiest_over_least) == (0.25, 2.5, 5.0)


def test_hotspots_inside_one_endpoint(make_target: MakeTarget) -> None:
    """vllm-project/vllm#21257 (EM15): engines behind one endpoint are workers of their own."""
    page = 'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_running{engine="1"} 57\n'
    fleet = derive_fleet([make_target("pod", page)])
    assert fleet.loads == {"pod/0": 0.0, "pod/1": 57.0}
    assert fleet.hotspot is not None
    assert (fleet.hotspot.max_over_mean, fleet.hotspot.busiest_over_least) == (2.0, math.inf)


def test_a_fleet_that_waits_for_one_worker_is_hot(make_target: MakeTarget) -> None:
    """vllm-project/production-stack#1035 (RT01): 1.82 by cache alone is above 1.5, 1.31 with load is not."""
    uneven = derive_fleet([make_target(f"e{i}", engine(load)) for i, load in enumerate([45.5, 20, 18, 16.5])]).hotspot
    even = derive_fleet([make_target(f"e{i}", engine(load)) for i, load in enumerate([32.75, 25, 22.25, 20])]).hotspot
    assert uneven is not None
    assert even is not None
    assert (uneven.max_over_mean, uneven.overloaded_ratio) == (1.82, 0.25)
    assert (even.max_over_mean, even.overloaded_ratio) == (1.31, 0.0)


def test_engines_tell_the_hotspot_that_no_router_replica_sees(make_target: MakeTarget) -> None:
    """smg-project/smg#1621 (RT05): three replicas with 20 requests each at one worker, which has 60."""
    replica = 'smg_worker_requests_total{worker="a"} 1\nsmg_worker_requests_active{worker="a"} 20\n'
    usage = 'vllm:kv_cache_usage_perc{{engine="0"}} {}\n'
    engines = [make_target("a", engine(60) + usage.format(0.98)), make_target("b", engine(0) + usage.format(0.05))]
    fleet = derive_fleet([*engines, *(make_target(f"r{i}", replica) for i in range(3))])
    assert fleet.hotspot is not None
    assert (fleet.hotspot.max_over_mean, dict(fleet.loads)) == (2.0, {"a": 60.0, "b": 0.0})
    assert [target.numbers.kv_usage_max_ratio for target in engines if target.numbers] == [0.98, 0.05]


def test_one_worker_gets_all_though_nothing_is_in_flight(make_target: MakeTarget) -> None:
    """AMD-AGI/Infera#103 (RT04): 448 to 0, sent one after another: the share of the window tells, the load can't."""
    decisions = 'vllm_router_policy_decisions_total{{policy="p",worker="{}"}} {}\n'
    before, after = decisions.format("w0", 0), decisions.format("w0", 448) + decisions.format("w1", 0)
    idle = [make_target(name, engine(0)) for name in ("e0", "e1")]
    fleet = derive_fleet([*idle, make_target("r", before, after)])
    assert (fleet.hotspot, fleet.top_share) == (None, 1.0)  # of two workers: twice its even share


def test_the_steps_of_a_decision_stay_apart(make_target: MakeTarget) -> None:
    """vllm-project/aibrix#673 (RT37), llm-d/llm-d-router#1109 (RT36): tokenizing 60 ms is seen as such."""
    router = RouterPage()
    router.decision.labels("tokenize").observe(0.06)
    router.decision.labels("lookup").observe(0.0005)
    page = render([make_target("router", router.text())])[0].decode()
    assert 'prefixwatch_router_decision_seconds_sum{step="tokenize"} 0.06' in page
    assert 'prefixwatch_router_decision_seconds_sum{step="lookup"} 0.0005' in page


def test_an_idle_fleet_has_no_hotspot(make_target: MakeTarget) -> None:
    fleet = derive_fleet([make_target("a", engine(0)), make_target("b", engine(0.5))])
    assert fleet.hotspot is None
    assert "fewer than 1 requests" in fleet.absent["hotspot"]


def test_a_target_that_failed_has_no_load_and_no_frozen_numbers(make_target: MakeTarget) -> None:
    """ray-project/ray#65892 (EM31): running is 12, not 24."""
    old, new = make_target("old", engine(12), "refused"), make_target("new", engine(12))
    assert derive_fleet([old, new]).loads == {"new": 12.0}
    page = render([old, new])[0].decode()
    assert 'requests_running{target="new"} 12.0' in page
    assert 'requests_running{target="old"}' not in page
    assert 'prefixwatch_target_up{system="vllm",target="old"} 0.0' in page


def test_the_fleets_hit_ratio_is_of_sums(make_target: MakeTarget) -> None:
    a = make_target("a", engine(0), engine(0, hits=90, queries=100))
    b = make_target("b", engine(0), engine(0, hits=0, queries=900))
    assert derive_fleet([a, b]).hit_ratio == 0.09


def test_what_the_router_tells_comes_out_under_the_contract_names(make_target: MakeTarget) -> None:
    router = RouterPage()
    router.requests.labels("w0", "m", "completed").inc(3)
    router.hit_tokens.observe(32)
    router.ttft.labels("hit").observe(0.15)
    router.ttft.labels("unknown").observe(0.15)
    router.decision.labels("total").observe(0.0005)
    page = render([make_target("router", router.text())])[0].decode()
    for line in (
        'prefixwatch_requests_total{class="unclassified",model="m",outcome="completed"} 3.0',
        'prefixwatch_request_hit_tokens_bucket{le="64.0"} 1.0',
        'prefixwatch_ttft_seconds_bucket{cache="hit",le="0.2"} 1.0',
        'prefixwatch_ttft_seconds_sum{cache="hit"} 0.15',
        'prefixwatch_router_decision_seconds_bucket{le="0.001",step="total"} 1.0',
    ):
        assert line in page
    assert 'cache="unknown"' not in page


def test_what_a_miss_costs(make_target: MakeTarget) -> None:
    router = RouterPage()
    router.ttft.labels("hit")
    router.ttft.labels("miss")
    before = router.text()
    for _ in range(20):
        router.ttft.labels("hit").observe(0.15)
        router.ttft.labels("miss").observe(0.6)
    delta = derive_fleet([make_target("router", before, router.text())]).ttft_delta
    assert delta is not None
    assert (delta.hits, delta.misses) == (20.0, 20.0)
    assert math.isclose(delta.seconds[0.5], 0.45)


def test_few_misses_make_no_delta(make_target: MakeTarget) -> None:
    router = RouterPage()
    before = router.text()
    router.ttft.labels("hit").observe(0.15)
    fleet = derive_fleet([make_target("router", before, router.text())])
    assert fleet.ttft_delta is None
    assert fleet.absent["ttft_delta"].startswith("1 hits and 0 misses")


def test_the_routers_token_counts_stand_in_only_without_engines(make_target: MakeTarget) -> None:
    """They are the engines' own tokens: both together would count each twice."""
    router = RouterPage()
    router.delivered.labels("w0").inc(64)
    router.prompts.labels("w0").inc(100)
    alone = render([make_target("router", router.text())])[0].decode()
    assert 'prefixwatch_prefix_hit_tokens_total{target="w0",tier="unknown"} 64.0' in alone
    both = render([make_target("router", router.text()), make_target("w0", engine(0, 64, 100))])[0].decode()
    assert both.count("prefixwatch_prefix_hit_tokens_total{") == 1


def test_the_share_of_the_busiest_worker(make_target: MakeTarget) -> None:
    router = RouterPage()
    router.requests.labels("w0", "m", "completed")
    before = router.text()
    router.requests.labels("w0", "m", "completed").inc(30)
    router.requests.labels("w1", "m", "completed").inc(10)
    router.requests.labels("none", "m", "refused").inc(50)
    assert derive_fleet([make_target("router", before, router.text())]).top_share == 0.75


def test_a_restarted_routers_histograms_go_on(make_target: MakeTarget) -> None:
    """prometheus/prometheus#7074 (EM45)."""
    first, second = RouterPage(), RouterPage()
    for page, count in ((first, 5), (second, 2)):
        for _ in range(count):
            page.decision.labels("total").observe(0.0001)
    text = render([make_target("router", first.text(), second.text())])[0].decode()
    assert 'prefixwatch_router_decision_seconds_count{step="total"} 7.0' in text


def test_another_system_under_the_same_name_is_recognised(make_target: MakeTarget) -> None:
    target = make_target("a", engine(1), RouterPage().text())
    assert target.system is not None
    assert (target.system.system, target.up) == ("prefixwatch-router", True)


def test_our_own_page_is_not_a_router(make_target: MakeTarget) -> None:
    router = RouterPage()
    router.decision.labels("total").observe(0.0001)
    page = render([make_target("router", router.text())])[0].decode()
    assert make_target("ourselves", page).reason == "unknown_system"


@pytest.mark.prometheus
def test_promtool_finds_no_fault_in_the_metrics(make_target: MakeTarget) -> None:
    router = RouterPage()
    for family in (router.ttft.labels("hit"), router.ttft.labels("miss"), router.decision.labels("total")):
        family.observe(0.1)
    router.hit_tokens.observe(32)
    router.requests.labels("w0", "m", "completed").inc()
    targets = [
        make_target("router", router.text(), router.text()),
        make_target("w0", engine(1, 5, 10), engine(2, 10, 20)),
        make_target("w1", engine(4, 5, 10), engine(3, 10, 20)),
        make_target("gone", "refused"),
    ]
    page = render(targets)[0].decode()
    check = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert (check.returncode, check.stderr) == (0, "")
