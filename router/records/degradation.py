"""The degradation chain's families on the router's own page."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixwatch.router.degradation.chain import STATES
from prefixwatch.router.degradation.policy import DegradingPolicy
from prefixwatch.router.records.metrics import NAMESPACE


class DegradationState(Collector):
    """Read at each scrape, which also advances the chain where nobody asks."""

    def __init__(self, policy: DegradingPolicy) -> None:
        self._policy = policy

    def collect(self) -> Iterator[Metric]:
        self._policy.tick(perf_counter())
        state = GaugeMetricFamily(
            f"{NAMESPACE}_degradation_state",
            "1 for the state that the request class is in: normal, or the latest step in effect.",
            labels=["class", "state"],
        )
        seconds = CounterMetricFamily(
            f"{NAMESPACE}_degradation_state_seconds", "Time that the class spent in the state.",
            labels=["class", "state"],
        )  # fmt: skip
        transitions = CounterMetricFamily(
            f"{NAMESPACE}_degradation_transitions",
            "Steps entered (by the rule pressure) and ended (by any other rule).",
            labels=["class", "step", "rule"],
        )
        for name, own in self._policy.classes.items():
            for each in STATES:
                state.add_metric([name, each], float(each == own.state.name))
                seconds.add_metric([name, each], own.seconds[each])
            for (step, rule), count in own.transitions.items():
                transitions.add_metric([name, step, rule], count)
        yield state
        yield seconds
        yield transitions
        utilization = self._policy.pool_utilization()
        if utilization is not None:
            yield GaugeMetricFamily(
                f"{NAMESPACE}_warm_pool_utilization_ratio",
                "Time to compute what waits at the workers reserved for misses, over the TTFT objective.",
                value=utilization,
            )
