"""What the router counts. Every label's values are bounded: workers, policies, reasons, known models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixwatch.kvcache.cache_class import cache_class
from prefixwatch.kvcache.events.feed import FeedCounters
from prefixwatch.kvcache.events.subscriber import KvEventSubscriber
from prefixwatch.kvcache.index.audit import IndexAudit
from prefixwatch.router.config import WORKER_PLACE
from prefixwatch.router.exchange.exchange import Exchange, Outcome
from prefixwatch.router.placement.fair_share import FairShare
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.policy import Policy
from prefixwatch.router.records.capabilities import capability_families
from prefixwatch.router.records.recorder import reusable_tokens

if TYPE_CHECKING:
    from prefixwatch.router.serving.health import HealthMonitor

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
        self.passed_requests = self._counter(
            "passed_requests", "Requests for anything but answers, passed through: embeddings, tokenisation, ranking.",
            "endpoint", "worker", "outcome",
        )  # fmt: skip
        self.sessionless_requests = self._counter(
            "sessionless_requests", "Requests without a session key: policies can't keep them together."
        )
        self.decisions = self._counter("decisions", "Routing decisions by the policy's branch.", "policy", "reason")
        self.retries = self._counter("retries", "Requests sent to a second worker, by the first one's fault.", "reason")
        self.refusals = self._counter("refusals", "Requests the router itself refused, by the reason.", "reason")
        self.untokenized = self._counter(
            "untokenized_requests", "Requests whose tokens were wanted but couldn't be known.", "endpoint", "reason"
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
            "predictions", "Completed requests by why the predicted hit tokens were or were not delivered.", "cause"
        )
        self.prediction_tokens = self._counter(
            "prediction_tokens",
            "Hit tokens predicted and delivered, by the cause of their difference, where both are known.",
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

        self.split_prefills = self._counter(
            "split_prefills",
            "Requests of a split fleet by where the prompt was computed: remote, local (little uncached), and local "
            "because no prefill worker was up (no_worker) or it failed (failed).",
            "outcome",
        )
        self.async_prefills = self._counter(
            "async_prefills",
            "Asynchronous prefills: ready, failed, or refused because too many waited (full).",
            "outcome",
        )
        self.async_prefill_wait_seconds = self._histogram(
            "async_prefill_wait_seconds", "From a request to the end of its asynchronous prefill.", _LATENCY_BUCKETS
        )

    def prefilled(self, outcome: str, wait_seconds: float | None) -> None:
        """Count an asynchronous prefill that ended, or could not begin."""
        self.async_prefills.labels(outcome).inc()
        if wait_seconds is not None:
            self.async_prefill_wait_seconds.observe(wait_seconds)

    def watch_shares(self, shares: FairShare) -> None:
        """Serve how much of its share the tenant that fills the caches most has used."""
        used = Gauge(
            "fair_share_used_ratio", "The highest use of a tenant's share of the caches; beyond 1 it is refused.",
            namespace=NAMESPACE, registry=self.registry,
        )  # fmt: skip
        used.set_function(lambda: shares.used_ratio(perf_counter()))

    def watch(
        self,
        *,
        ledger: Ledger,
        health: HealthMonitor,
        block_count: Callable[[str], int],
        subscribers: Sequence[KvEventSubscriber],
        audit: IndexAudit,
        policy: Policy,
        identity_files: Mapping[str, bool],
    ) -> None:
        """Serve the gauges, and the counts of event feeds and index audit, read from their owners at each scrape."""
        self.registry.register(_FleetState(ledger, health, block_count, policy))
        self.registry.register(_AuditedIndex(audit, health.up))
        usable = Gauge(
            "identity_files_usable", "1 if the file could be read the last time; 0: its last content stays valid.",
            ("file",), namespace=NAMESPACE, registry=self.registry,
        )  # fmt: skip
        for file in identity_files:
            usable.labels(file).set_function(partial(identity_files.__getitem__, file))
        info = Gauge(
            "worker_info", "1; the labels say what the worker is.", ("worker", "zone", "node", *WORKER_PLACE),
            namespace=NAMESPACE, registry=self.registry,
        )  # fmt: skip
        for name, state in health.states.items():
            info.labels(worker=name, zone=state.config.zone, node=state.config.node, **state.config.place).set(1)
        self.registry.register(_EventFeeds(subscribers))

    def record(self, exchange: Exchange, block_size: int) -> None:
        """Count a finished request."""
        prompt, placement = exchange.prompt, exchange.placement
        worker = placement.worker if placement else "none"
        model = prompt.model if prompt and prompt.model in self.known_models else OTHER_MODEL
        if not exchange.asks_for_an_answer:
            self.passed_requests.labels(exchange.path, worker, exchange.outcome.value).inc()
            return
        self.requests.labels(worker, model, exchange.outcome.value).inc()
        if not exchange.session:
            self.sessionless_requests.inc()
        if exchange.received_at is not None:
            self.receive_seconds.observe(exchange.received_at - exchange.arrived_at)
        if exchange.outcome is Outcome.COMPLETED and exchange.ended_at is not None:
            self.e2e_seconds.observe(exchange.ended_at - exchange.arrived_at)
        if exchange.outcome is Outcome.DISCONNECTED:
            self.disconnects.labels("prefill" if exchange.first_content_at is None else "decode").inc()
        usage = exchange.answer.usage
        if exchange.ttft_seconds is not None:
            graded = cache_class(usage.prompt_tokens, usage.cached_tokens, block_size, reusable_tokens(exchange))
            self.ttft_seconds.labels(graded.name).observe(exchange.ttft_seconds)
        if placement is not None and usage.prompt_tokens is not None and usage.cached_tokens is not None:
            self.prompt_tokens.labels(worker).inc(usage.prompt_tokens)
            self.delivered_hit_tokens.labels(worker).inc(usage.cached_tokens)
            self.request_hit_tokens.observe(usage.cached_tokens)
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
        delivered = exchange.answer.usage.cached_tokens
        if predicted is not None and delivered is not None:
            self.prediction_tokens.labels(cause, "predicted").inc(predicted)
            self.prediction_tokens.labels(cause, "delivered").inc(delivered)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=tuple(buckets))


class _FleetState(Collector):
    def __init__(
        self, ledger: Ledger, health: HealthMonitor, block_count: Callable[[str], int], policy: Policy
    ) -> None:
        self._ledger = ledger
        self._health = health
        self._block_count = block_count
        self._policy = policy

    def collect(self) -> Iterator[Metric]:
        healthy = self._health.up()
        yield _gauge("in_flight", "Requests sent and not yet ended.", self._ledger.in_flight())
        yield _gauge(
            "prefill_tokens",
            "Uncached prompt tokens sent and not yet answered by a token.",
            {worker.name: worker.prefill_tokens for worker in self._ledger.workers},
        )
        yield _gauge("worker_up", "1 when the worker takes requests.", healthy)
        flaps = CounterMetricFamily(
            f"{NAMESPACE}_worker_flaps", "Times that the worker left the rotation.", labels=["worker"]
        )
        for worker, count in self._health.flaps().items():
            flaps.add_metric([worker], count)
        yield flaps
        yield from self._reports()
        yield from capability_families(self._ledger.workers, NAMESPACE)
        memory = self._policy.memory()
        for name, unit, value in (("entries", "Entries", memory.entries), ("bytes", "Bytes, about,", memory.bytes)):
            yield GaugeMetricFamily(
                f"{NAMESPACE}_policy_memory_{name}", f"{unit} of the policy's own memory of prompts.", value=value
            )
        yield _gauge(
            "believed_blocks",
            "KV blocks the router believes to be at the worker.",
            {worker: self._block_count(worker) for worker in healthy},
        )
        yield GaugeMetricFamily(  # without a sample while nothing is in flight: the family never goes from the page
            f"{NAMESPACE}_oldest_in_flight_seconds",
            "Age of the oldest request in flight.",
            value=self._ledger.oldest_seconds(perf_counter()),
        )

    def _reports(self) -> Iterator[Metric]:
        """The age of each worker's load report, for policies that use it; a worker that never reported has none."""
        if self._policy.needs.engine_load:
            now = perf_counter()
            yield _gauge(
                "load_report_age_seconds",
                "Since the engine last reported its load.",
                {name: now - at for name, at in self._ledger.reported_at.items()},
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
        by_worker: dict[str, list[KvEventSubscriber]] = {}
        for subscriber in self._subscribers:
            by_worker.setdefault(subscriber.worker, []).append(subscriber)
        if not by_worker:
            return
        for counter in fields(FeedCounters):
            family = CounterMetricFamily(
                f"{NAMESPACE}_kv_events_{counter.name}",
                f"KV-event feed: {counter.name.replace('_', ' ')}.",
                labels=["worker"],
            )
            for worker, own in by_worker.items():
                family.add_metric([worker], sum(getattr(each.feed.counters, counter.name) for each in own))
            yield family
        yield _gauge(
            "kv_events_connected",
            "1 while all KV-event streams of the worker are connected.",
            {worker: all(each.connected for each in own) for worker, own in by_worker.items()},
        )
        yield _gauge(
            "kv_events_lag_seconds",
            "From the engine's clock at its last event batch to the arrival here.",
            {
                worker: max(lags)
                for worker, own in by_worker.items()
                if (lags := [each.lag_seconds for each in own if each.lag_seconds is not None])
            },
        )


def _gauge(name: str, text: str, by_worker: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=["worker"])
    for worker, value in by_worker.items():
        family.add_metric([worker], float(value))
    return family
