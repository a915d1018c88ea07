"""One side of a split fleet: its engines, and what its policy knows about them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prefixwatch.engines.model.engine import EngineConfig, EngineModel
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.placement.cache_view import CacheView, HistoryView, NoView
from prefixwatch.router.placement.ledger import Ledger, Ticket
from prefixwatch.router.policy import Fleet, Policy, RouteRequest
from prefixwatch.simulator.engine_views import EngineView, load_report
from prefixwatch.simulator.result import WorkerTotals

SideView = Literal["history", "events"]


@dataclass(frozen=True, slots=True, eq=False)
class Stay:
    """A request at one side, until it leaves."""

    worker: str
    ticket: Ticket
    computing: Sequence[RouteRequest]
    """Requests at the worker whose prompts weren't computed when this one was placed."""
    evicted_blocks: int
    """Evicted there until then."""


class Side:
    """The engines of one side, and what its policy knows about them."""

    def __init__(
        self, kind: str, workers: int, policy: Policy, engine: EngineConfig, view: SideView, *, looks: bool
    ) -> None:
        if workers < 1:
            raise ValueError(f"a split fleet needs at least 1 {kind} worker, got {workers}")
        if policy.needs.truth:
            raise ValueError(f"policy {policy.name} needs the engines' true state, which a split fleet doesn't tell")
        hears = looks and (view == "events" or policy.needs.events)
        self.index = BlockIndex() if hears else None
        self._view = _cache_view(self.index, engine, looks=looks)
        self._ledger = Ledger()
        self.workers = [self._ledger.join(f"{kind}-{k}") for k in range(workers)]
        self.models = {worker.name: EngineModel(replace(engine, report_events=hears)) for worker in self.workers}
        self.needs_load = policy.needs.engine_load
        self._computing: dict[str, dict[RouteRequest, None]] = {worker.name: {} for worker in self.workers}

    def fleet(self, now_s: float) -> Fleet:
        return Fleet(self.workers, self._view.depths, now_s, self._view.source)

    def admit(self, route: RouteRequest, worker: str, prefill_tokens: int, now_s: float) -> Stay:
        ticket = self._ledger.admit(worker, prefill_tokens, now_s)
        self._view.routed(route, worker)
        stay = Stay(worker, ticket, tuple(self._computing[worker]), self.models[worker].pool.evicted_blocks)
        self._computing[worker][route] = None
        return stay

    def first_token(self, route: RouteRequest, stay: Stay) -> None:
        self._ledger.first_token(stay.ticket)
        self._computing[stay.worker].pop(route, None)

    def end(self, route: RouteRequest, stay: Stay) -> None:
        self.first_token(route, stay)
        self._ledger.end(stay.ticket)

    def evicted_since(self, stay: Stay) -> bool:
        return self.models[stay.worker].pool.evicted_blocks != stay.evicted_blocks

    def report(self, now_s: float) -> None:
        for worker in self.workers:
            worker.report = load_report(self.models[worker.name], now_s)

    def totals(self) -> list[WorkerTotals]:
        return [
            WorkerTotals(worker.name, worker.served, model.counters, model.pool.evicted_blocks)
            for worker, model in zip(self.workers, self.models.values(), strict=True)
        ]


def _cache_view(index: BlockIndex | None, engine: EngineConfig, *, looks: bool) -> CacheView:
    if index is not None:
        return EngineView(index)
    return HistoryView(engine.capacity_blocks or sys.maxsize) if looks else NoView()
