"""Least load: the shortest estimated time until the worker has drained its queue.

    score = (queued + sent) / throughput + kv_pressure_weight · k / (1 − k)      [seconds, lowest wins]

    queued      uncached prompt tokens waiting in the engine: as reported, else waiting requests × mean_prefill_tokens
    sent        tokens this router sent since the engine's last report (whole prompts, whatever is cached)
    throughput  the engine's reported generation rate, else default_tokens_per_second
    k           KV usage, clamped to 0.999; not reported: the term is left out

Defaults: default_tokens_per_second 2000, mean_prefill_tokens 1024, kv_pressure_weight 0.15 s; the gateway
polls every 10 s. A worker without a report while others have one: in flight × mean_prefill_tokens / mean
reported throughput (default_tokens_per_second where none is reported), and no less than the highest score of those that
report. A report without waiting requests or KV usage: the highest that others report. Nobody reports: fewest in flight.
Ties: fewer in flight, then random.

Source: smg `least_load`. Not kept: there an engine that fell silent while idle counts as idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.router.policy import (
    Decision,
    Fleet,
    LoadReport,
    Needs,
    Policy,
    RouteRequest,
    Worker,
    known_or_highest,
    kv_usages,
)

KV_USAGE_CEILING = 0.999


@dataclass(frozen=True, slots=True)
class LeastLoadOptions:
    default_tokens_per_second: float = 2000.0
    mean_prefill_tokens: int = 1024
    kv_pressure_weight: float = 0.15


class LeastLoad(Policy):
    """The worker that should drain its queue first, by engine reports and what was sent since."""

    name = "least_load"
    source = "smg least_load"
    needs = Needs(engine_load=True)
    reasons = ("least_drain_time", "shortest_queue")
    Options = LeastLoadOptions
    options: LeastLoadOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._sent: dict[str, deque[tuple[float, int]]] = {}

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        workers = fleet.workers
        reporting = [worker.report for worker in workers if worker.report is not None]
        if reporting:
            nominal = self._nominal_throughput(reporting)
            scores = self._drain_seconds(workers, nominal)
            reason = "least_drain_time"
        else:
            self._sent.clear()
            scores = [float(worker.in_flight) for worker in workers]
            reason = "shortest_queue"
        lowest = min(zip(scores, (worker.in_flight for worker in workers), strict=True))
        ties = [w.name for w, score in zip(workers, scores, strict=True) if (score, w.in_flight) == lowest]
        chosen = self.rng.choice(ties)
        by_name = {worker.name: score for worker, score in zip(workers, scores, strict=True)}
        queue_seconds = None
        if reporting:
            (report,) = (worker.report for worker in workers if worker.name == chosen)
            usage = None if report is None else report.kv_usage_ratio
            queue_seconds = by_name[chosen] - kv_pressure_seconds(usage, self.options.kv_pressure_weight)
        return Decision(chosen, reason, scores=by_name, predicted_queue_seconds=queue_seconds)

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._sent.setdefault(worker, deque()).append((now_seconds, request.prompt_tokens))

    def on_worker_removed(self, worker: str) -> None:
        self._sent.pop(worker, None)

    def _drain_seconds(self, workers: Sequence[Worker], nominal: float) -> list[float]:
        options = self.options
        mean_tokens = options.mean_prefill_tokens
        usages = known_or_highest(kv_usages(workers))
        queued = known_or_highest([_queued_tokens(worker.report, mean_tokens) for worker in workers])
        seconds: list[float | None] = []
        default_rate, weight = options.default_tokens_per_second, options.kv_pressure_weight
        for worker, tokens, usage in zip(workers, queued, usages, strict=True):
            report = worker.report
            if report is None:
                self._sent.pop(worker.name, None)
                seconds.append(None)
                continue
            throughput = report.generation_tokens_per_second or default_rate
            waiting = (tokens + self._sent_since(worker.name, report.at_seconds)) / throughput
            seconds.append(waiting + kv_pressure_seconds(usage, weight))
        if None not in seconds:
            return known_or_highest(seconds)
        estimates = [0.0 if worker.report else worker.in_flight * mean_tokens / nominal for worker in workers]
        return [max(pair) for pair in zip(known_or_highest(seconds), estimates, strict=True)]

    def _sent_since(self, worker: str, at_seconds: float) -> int:
        sent = self._sent.get(worker)
        if not sent:
            return 0
        while sent and sent[0][0] <= at_seconds:
            sent.popleft()
        return sum(tokens for _, tokens in sent)

    def _nominal_throughput(self, reports: Sequence[LoadReport]) -> float:
        rates = [r.generation_tokens_per_second for r in reports if r.generation_tokens_per_second]
        return sum(rates) / len(rates) if rates else self.options.default_tokens_per_second


def _queued_tokens(report: LoadReport | None, mean_prefill_tokens: int) -> float | None:
    if report is None:
        return None
    if report.waiting_uncached_tokens is not None:
        return report.waiting_uncached_tokens
    return None if report.waiting is None else report.waiting * mean_prefill_tokens


def kv_pressure_seconds(usage_ratio: float | None, weight: float = 0.15) -> float:
    """The price of a filling KV cache: `weight · k / (1 − k)`; nothing where usage isn't reported."""
    if usage_ratio is None:
        return 0.0
    k = min(max(usage_ratio, 0.0), KV_USAGE_CEILING)
    return weight * k / (1.0 - k)
