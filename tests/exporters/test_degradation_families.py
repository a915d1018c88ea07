"""The degradation chain of a router on the exporter's page: the states, the transitions, the pool, the waits."""

from __future__ import annotations

from collections.abc import Callable

from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.target import Target

PAGE = """\
prefixwatch_router_in_flight{worker="a"} 1
prefixwatch_router_degradation_state{class="chat",state="normal"} 0
prefixwatch_router_degradation_state{class="chat",state="warm_pool"} 1
prefixwatch_router_degradation_state_seconds_total{class="chat",state="warm_pool"} 42
prefixwatch_router_degradation_transitions_total{class="chat",step="warm_pool",rule="pressure"} 2
prefixwatch_router_async_prefills_total{outcome="ready"} 3
prefixwatch_router_async_prefill_wait_seconds_bucket{le="1.0"} 2
prefixwatch_router_async_prefill_wait_seconds_bucket{le="+Inf"} 3
prefixwatch_router_async_prefill_wait_seconds_sum 4.5
prefixwatch_router_async_prefill_wait_seconds_count 3
"""
POOL = "prefixwatch_router_warm_pool_utilization_ratio 0.6\n"


def test_a_routers_chain_is_exported_by_class(make_target: Callable[..., Target]) -> None:
    page = render([make_target("router", PAGE + POOL, PAGE + POOL)], "", [])[0].decode()

    for line in (
        'prefixwatch_degradation_state{class="chat",state="normal",target="router"} 0.0',
        'prefixwatch_degradation_state{class="chat",state="warm_pool",target="router"} 1.0',
        'prefixwatch_degradation_state_seconds_total{class="chat",state="warm_pool",target="router"} 42.0',
        'prefixwatch_degradation_transitions_total{class="chat",rule="pressure",step="warm_pool",target="router"} 2.0',
        'prefixwatch_warm_pool_utilization_ratio{target="router"} 0.6',
        'prefixwatch_async_prefills_total{outcome="ready",target="router"} 3.0',
        'prefixwatch_async_prefill_wait_seconds_bucket{le="1.0"} 2.0',
        "prefixwatch_async_prefill_wait_seconds_count 3.0",
    ):
        assert line in page


def test_without_a_pool_its_utilization_is_absent(make_target: Callable[..., Target]) -> None:
    page = render([make_target("router", PAGE, PAGE)], "", [])[0].decode()
    assert "prefixwatch_warm_pool_utilization_ratio" not in page
