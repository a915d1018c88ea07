"""A bench's own figures while it runs, for dashboards: on a page that Prometheus scrapes, or pushed by OTLP.

| Prometheus | OTLP | is |
| `prefixwatch_bench_requests_total` | `prefixwatch.bench.requests` | ended requests, by `outcome` |
| `prefixwatch_bench_planned_requests` | `prefixwatch.bench.planned_requests` | requests of the run's plan |
| `prefixwatch_bench_in_flight_requests` | `prefixwatch.bench.in_flight_requests` | sent and not ended |
| `prefixwatch_bench_ttft_seconds` | `prefixwatch.bench.ttft` | TTFT so far, by `quantile`, from the schedule |
| `prefixwatch_bench_client_lag_max_seconds` | `prefixwatch.bench.client_lag_max` | the client's worst lag so far |

All have the labels `scenario`, `policy` and `repeat`. A figure that isn't known yet has no sample.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prefixwatch.exporters.config import split_listen
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.errors import UsageError

PUSH_SECONDS = 1.0
_OUTCOMES = ("completed", "refused", "failed", "timed_out", "cut_off")
Labels = Mapping[str, str]


class _Figure(NamedTuple):
    name: str
    otlp_unit: str
    help: str
    read: Callable[[Mapping[str, Any]], Iterable[tuple[Labels, float]]]
    counts: bool = False


def _one(key: str, factor: float = 1.0) -> Callable[[Mapping[str, Any]], Iterable[tuple[Labels, float]]]:
    def read(state: Mapping[str, Any]) -> Iterable[tuple[Labels, float]]:
        if state.get(key) is not None:
            yield {}, factor * state[key]

    return read


def _requests(state: Mapping[str, Any]) -> Iterator[tuple[Labels, float]]:
    for outcome in _OUTCOMES:
        if outcome in state:
            yield {"outcome": outcome}, state[outcome]


def _ttft(state: Mapping[str, Any]) -> Iterator[tuple[Labels, float]]:
    for quantile, key in (("0.5", "ttft_p50_ms"), ("0.95", "ttft_p95_ms")):
        if state.get(key) is not None:
            yield {"quantile": quantile}, state[key] / 1e3


_FIGURES = (
    _Figure("requests", "{request}", "Ended requests of the run, by outcome.", _requests, counts=True),
    _Figure("planned_requests", "{request}", "Requests of the run's plan.", _one("planned")),
    _Figure("in_flight_requests", "{request}", "Requests that are sent and not ended.", _one("in_flight")),
    _Figure("ttft", "s", "Time to first token so far, from the scheduled time.", _ttft),
    _Figure("client_lag_max", "s", "The load generator's worst lag so far.", _one("lag_max_ms", 1e-3)),
)


@dataclass(slots=True, eq=False)  # a collector is told apart by what it is, not by what it holds
class RunMetrics:
    """What is known of the runs; every run keeps its last figures."""

    scenario: str
    _runs: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)

    def update(self, run: Run, state: Mapping[str, Any]) -> None:
        """`state` is a line of the load generator's progress, or the counts of its run.json."""
        key = run.policy, run.repeat
        self._runs[key] = {**self._runs.get(key, {}), **state}

    def samples(self, figure: _Figure) -> Iterator[tuple[Labels, float]]:
        for (policy, repeat), state in list(self._runs.items()):
            for labels, value in figure.read(state):
                yield {"scenario": self.scenario, "policy": policy, "repeat": str(repeat), **labels}, value

    def collect(self) -> Iterator[Any]:
        """As `prometheus_client` asks a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for figure in _FIGURES:
            name = f"prefixwatch_bench_{figure.name}{'_seconds' if figure.otlp_unit == 's' else ''}"
            family = CounterMetricFamily(name, figure.help) if figure.counts else GaugeMetricFamily(name, figure.help)
            for labels, value in self.samples(figure):
                family.add_sample(f"{name}_total" if figure.counts else name, dict(labels), value)
            yield family

    @contextlib.asynccontextmanager
    async def shown(self, listen: str | None, otlp: str | None) -> AsyncIterator[None]:
        """Served and pushed meanwhile, for the last time at the end. Raises UsageError for a taken address."""
        async with contextlib.AsyncExitStack() as stack:
            if listen is not None:
                stack.callback(_serve(self, listen))
            if otlp is not None:
                stack.push_async_callback(asyncio.to_thread, _push(self, otlp))
            yield


def _serve(metrics: RunMetrics, listen: str) -> Callable[[], None]:
    """The page at http://LISTEN/metrics; returns what ends it."""
    from prometheus_client import CollectorRegistry, start_http_server

    try:
        host, port = split_listen(listen)
    except ValueError:
        raise UsageError(f"--metrics-listen {listen}: write it as HOST:PORT") from None
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-listen {listen}: can't listen there ({error.strerror}): name a free port"
        ) from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def _push(metrics: RunMetrics, endpoint: str) -> Callable[[], None]:
    """To ENDPOINT/v1/metrics once a second; returns what pushes for the last time and ends it."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/').removesuffix('/v1/metrics')}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=PUSH_SECONDS * 1e3)
    provider = MeterProvider([reader], Resource.create({SERVICE_NAME: "prefixwatch-bench"}))
    meter = provider.get_meter("prefixwatch.bench")

    def observed(figure: _Figure) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda options: [Observation(value, dict(labels)) for labels, value in metrics.samples(figure)]

    for figure in _FIGURES:
        make = meter.create_observable_counter if figure.counts else meter.create_observable_gauge
        make(f"prefixwatch.bench.{figure.name}", [observed(figure)], figure.otlp_unit, figure.help)
    return provider.shutdown
