"""What the router counts. Every label's values are bounded: workers, policies, reasons, known models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache.audit import IndexAudit
from kvcache.cache_class import cache_class
from kvcache.feed import FeedCounters
from kvcache.subscriber import KvEventSubscriber
from router.exchange import Exchange, Outcome
from router.ledger import Ledger

NAMESPACE = "prefixwatch_router"
OTHER_MODEL = "other"

_STEPS = ("tokenize", "hash", "lookup", "choose", "total")
_DECISION_BUCKETS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 8e-3),
    *(12e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKEN_BUCKETS = (0, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


class RouterMetrics:
    """The router's registry and the families in it."""

    def __init__(self, models: Iterable[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self.known_models = set(models)
        self.requests = self._counter(
            "requests", "Requests by the worker that answered last ('none' when none was tried).", "worker", "model",
            "outcome",
        )  # fmt: skip
        self.decisions = self._counter("decisions", "Routing decisions by the policy's branch.", "policy", "reason")
        self.retries = self._counter("retries", "Requests sent to a second worker, by the first one's fault.", "reason")
        self.refusals = self._counter(
            "refusals", "Requests the router itself refused: too_large, not_json, no_workers.", "reason"
        )
        self.untokenized = self._counter(
            "untokenized_requests", "Requests whose tokens were wanted but couldn't be known."
        )
        self.disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer was complete.", "phase"
        )
        usage = "over requests whose engine reported cached tokens"
        self.prompt_tokens = self._counter("prompt_tokens", f"Prompt tokens, {usage}.", "worker")
        self.delivered_hit_tokens = self._counter(
            "delivered_hit_tokens", f"Cached prompt tokens as reported, {usage}.", "worker"
        )
        self.predicted_hit_tokens = self._counter(
            "predicted_hit_tokens", f"Cached prompt tokens the router expected, {usage} and for which it looked.",
            "worker",
        )  # fmt: skip
        self.predictions = self._counter(
            "predictions", "Completed requests by what became of the predicted hit tokens.", "cause"
        )
        self.prediction_tokens = self._counter(
            "prediction_tokens",
            "Hit tokens predicted, and delivered, by what became of the prediction; where both are known.",
            "cause",
            "kind",
        )
        self.request_hit_tokens = self._histogram(
            "request_hit_tokens", "Cached prompt tokens of a request, as the engine reports them.", _TOKEN_BUCKETS
        )
        self.decision_seconds = self._histogram(
            "decision_seconds", "Time to route a request: tokenize, hash, lookup, choose, and their total.",
            _DECISION_BUCKETS, "step",
        )  # fmt: skip
        self._steps = {step: self.decision_seconds.labels(step) for step in _STEPS}
        self.predicted_queue_seconds = self._histogram(
            "predicted_queue_seconds", "Wait before its prefill that the policy expects for a request; policies that "
            "reckon in time.", _LATENCY_BUCKETS,
        )  # fmt: skip
        self.predicted_prefill_seconds = self._histogram(
            "predicted_prefill_seconds", "Prefill time that the policy expects for a request; policies that reckon in "
            "time.", _LATENCY_BUCKETS,
        )  # fmt: skip
        self.receive_seconds = self._histogram(
            "receive_seconds", "From a request's headers to the last byte of its body.", _DECISION_BUCKETS
        )
        self.ttft_seconds = self._histogram(
            "ttft_seconds", "From a request's headers to its first content, streamed requests.", _LATENCY_BUCKETS,
            "cache",
        )  # fmt: skip
        self.e2e_seconds = self._histogram(
            "e2e_seconds", "From a request's headers to the end of its answer, completed requests.", _LATENCY_BUCKETS
        )

    def watch(
        self,
        ledger: Ledger,
        healthy: Callable[[], dict[str, bool]],
        block_count: Callable[[str], int],
        subscribers: Sequence[KvEventSubscriber],
        audit: IndexAudit,
    ) -> None:
        """Serve the gauges, and the counts of event feeds and index audit, read from their owners at each scrape."""
        self.registry.register(_FleetState(ledger, healthy, block_count))
        self.registry.register(_AuditedIndex(audit, healthy))
        self.registry.register(_EventFeeds(subscribers))

    def record(self, exchange: Exchange, block_size: int) -> None:
        """Count a finished request."""
        prompt, placement = exchange.prompt, exchange.placement
        worker = placement.worker if placement else "none"
        model = prompt.model if prompt and prompt.model in self.known_models else OTHER_MODEL
        self.requests.labels(worker, model, exchange.outcome.value).inc()
        if exchange.received_at is not None:
            self.receive_seconds.observe(exchange.received_at - exchange.arrived_at)
        if exchange.outcome is Outcome.COMPLETED and exchange.ended_at is not None:
            self.e2e_seconds.observe(exchange.ended_at - exchange.arrived_at)
        if exchange.outcome is Outcome.DISCONNECTED:
            self.disconnects.labels("prefill" if exchange.first_content_at is None else "decode").inc()
        watch = exchange.watch
        if exchange.ttft_seconds is not None:
            cache = cache_class(watch.prompt_tokens, watch.cached_tokens, block_size)
            self.ttft_seconds.labels(cache).observe(exchange.ttft_seconds)
        if placement is not None and watch.prompt_tokens is not None and watch.cached_tokens is not None:
            self.prompt_tokens.labels(worker).inc(watch.prompt_tokens)
            self.delivered_hit_tokens.labels(worker).inc(watch.cached_tokens)
            self.request_hit_tokens.observe(watch.cached_tokens)
            if placement.predicted_tokens is not None:
                self.predicted_hit_tokens.labels(worker).inc(placement.predicted_tokens)
        if exchange.prediction_cause is not None:
            self._predicted(exchange, exchange.prediction_cause.value)

    def decided(self, exchange: Exchange, policy: str) -> None:
        """Count a decision."""
        prompt, placement, total = exchange.prompt, exchange.placement, exchange.decision_seconds
        if prompt is None or placement is None or total is None:
            return
        self.decisions.labels(policy, placement.reason).inc()
        if prompt.tokens is not None:
            self._steps["tokenize"].observe(prompt.tokenize_seconds)
        if len(prompt.blocks):
            self._steps["hash"].observe(prompt.hash_seconds)
            self._steps["lookup"].observe(placement.lookup_seconds)
        self._steps["choose"].observe(placement.choose_seconds)
        expected = placement.decision
        if expected.predicted_queue_seconds is not None:
            self.predicted_queue_seconds.observe(expected.predicted_queue_seconds)
        if expected.predicted_prefill_seconds is not None:
            self.predicted_prefill_seconds.observe(expected.predicted_prefill_seconds)
        self._steps["total"].observe(total)

    def _predicted(self, exchange: Exchange, cause: str) -> None:
        self.predictions.labels(cause).inc()
        predicted = exchange.placement.predicted_tokens if exchange.placement else None
        delivered = exchange.watch.cached_tokens
        if predicted is not None and delivered is not None:
            self.prediction_tokens.labels(cause, "predicted").inc(predicted)
            self.prediction_tokens.labels(cause, "delivered").inc(delivered)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=tuple(buckets))


class _FleetState(Collector):
    def __init__(
        self, ledger: Ledger, healthy: Callable[[], dict[str, bool]], block_count: Callable[[str], int]
    ) -> None:
        self._ledger = ledger
        self._healthy = healthy
        self._block_count = block_count

    def collect(self) -> Iterator[Metric]:
        healthy = self._healthy()
        yield _gauge("in_flight", "Requests sent and not yet ended.", self._ledger.in_flight())
        yield _gauge(
            "prefill_tokens",
            "Uncached prompt tokens sent and not yet answered by a token.",
            {worker.name: worker.prefill_tokens for worker in self._ledger.workers},
        )
        yield _gauge("worker_up", "1 when the worker takes requests.", healthy)
        yield _gauge(
            "believed_blocks",
            "KV blocks the router believes to be at the worker.",
            {worker: self._block_count(worker) for worker in healthy},
        )
        oldest = self._ledger.oldest_seconds(perf_counter())
        if oldest is not None:
            yield GaugeMetricFamily(
                f"{NAMESPACE}_oldest_in_flight_seconds", "Age of the oldest request in flight.", value=oldest
            )


class _AuditedIndex(Collector):
    def __init__(self, audit: IndexAudit, workers: Callable[[], Iterable[str]]) -> None:
        self._audit = audit
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            f"{NAMESPACE}_index_audited_lookups",
            "Prompts looked up in the block index both by bisection and block by block.",
            value=self._audit.audited_lookups,
        )
        holes = CounterMetricFamily(
            f"{NAMESPACE}_index_prefix_holes",
            "Audited lookups whose two answers differ: the worker holds a block without all those before it.",
            labels=["worker"],
        )
        for worker in self._workers():
            holes.add_metric([worker], self._audit.holes[worker])
        yield holes


class _EventFeeds(Collector):
    def __init__(self, subscribers: Sequence[KvEventSubscriber]) -> None:
        self._subscribers = subscribers

    def collect(self) -> Iterator[Metric]:
        if not self._subscribers:
            return
        for counter in fields(FeedCounters):
            family = CounterMetricFamily(
                f"{NAMESPACE}_kv_events_{counter.name}",
                f"KV-event feed: {counter.name.replace('_', ' ')}.",
                labels=["worker"],
            )
            for subscriber in self._subscribers:
                family.add_metric([subscriber.worker], getattr(subscriber.feed.counters, counter.name))
            yield family
        yield _gauge(
            "kv_events_connected",
            "1 while the worker's KV-event stream is connected.",
            {subscriber.worker: subscriber.connected for subscriber in self._subscribers},
        )
        yield _gauge(
            "kv_events_lag_seconds",
            "From the engine's clock at its last event batch to the arrival here.",
            {s.worker: s.lag_seconds for s in self._subscribers if s.lag_seconds is not None},
        )


def _gauge(name: str, text: str, by_worker: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=["worker"])
    for worker, value in by_worker.items():
        family.add_metric([worker], float(value))
    return family
