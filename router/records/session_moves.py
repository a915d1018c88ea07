"""Counts of the sessions that were moved on purpose, on the router's own page."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixwatch.router.records.metrics import NAMESPACE
from prefixwatch.router.sessions.moving import MovingPolicy


class SessionMoves(Collector):
    """Read at each scrape."""

    def __init__(self, policy: MovingPolicy) -> None:
        self._policy = policy

    def collect(self) -> Iterator[Metric]:
        moves = CounterMetricFamily(
            f"{NAMESPACE}_session_moves",
            "Sessions moved on purpose, by trigger, kind (soft: blocks sent; hard: computed again) and what decided.",
            labels=["trigger", "kind", "why"],
        )
        for labels, count in self._policy.counts.items():
            moves.add_metric(labels, count)
        yield moves
