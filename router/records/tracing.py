"""One OpenTelemetry server span a request, with GenAI attributes; only where a collector is configured.

Attribute names: OpenTelemetry's GenAI semantic conventions, and `prefixwatch.*` for what they don't name.
Prompts, token ids and cache salts never appear.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter, time_ns

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from prefixwatch.router.exchange.exchange import Exchange, Outcome
from prefixwatch.router.exchange.explain import scores_json

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Sends spans in batches to `<endpoint>/v1/traces`."""

    def __init__(self, endpoint: str, *, schedule_delay_seconds: float = 5.0) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "prefixwatch-router"}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces")
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=schedule_delay_seconds * 1000)
        )
        self._tracer = self._provider.get_tracer("prefixwatch.router")

    def begin(self, exchange: Exchange, headers: Mapping[str, str]) -> Span:
        """A span from the request's arrival on, child of the caller's `traceparent` if it sent one."""
        model = exchange.prompt.model if exchange.prompt else ""
        return self._tracer.start_span(
            f"{exchange.operation} {model}".strip(),
            context=_propagator.extract({name.lower(): value for name, value in headers.items()}),
            kind=SpanKind.SERVER,
            start_time=_wall_ns(exchange.arrived_at),
        )

    def trace_id(self, span: Span) -> str:
        """As 32 hex digits."""
        return f"{span.get_span_context().trace_id:032x}"

    def headers(self, span: Span) -> dict[str, str]:
        """The `traceparent` (and `tracestate`) that makes an engine's spans children of this one."""
        headers: dict[str, str] = {}
        _propagator.inject(headers, set_span_in_context(span))
        return headers

    def finish(self, span: Span, exchange: Exchange, policy: str) -> None:
        """Fill the span in from the finished exchange and end it."""
        known = {name: value for name, value in _attributes(exchange, policy).items() if value is not None}
        span.set_attributes(known)
        if exchange.first_content_at is not None:
            span.add_event("gen_ai.first_token", timestamp=_wall_ns(exchange.first_content_at))
        if exchange.outcome is not Outcome.COMPLETED:
            span.set_attribute("error.type", exchange.outcome.value)
            span.set_status(Status(StatusCode.ERROR, exchange.error or exchange.outcome.value))
        span.end()

    def close(self) -> None:
        """Send what is left; blocks for as long as the collector takes."""
        self._provider.shutdown()


def _attributes(exchange: Exchange, policy: str) -> dict[str, AttributeValue | None]:
    prompt, placement, usage = exchange.prompt, exchange.placement, exchange.answer.usage
    decision = placement.decision if placement else None
    return {
        "gen_ai.operation.name": exchange.operation,
        "gen_ai.request.model": prompt.model if prompt else None,
        "gen_ai.request.max_tokens": (prompt.max_output_tokens or None) if prompt else None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "url.path": exchange.path,
        "prefixwatch.policy": policy,
        "prefixwatch.worker": placement.worker if placement else None,
        "prefixwatch.reason": placement.reason if placement else None,
        "prefixwatch.predicted_cached_tokens": placement.predicted_tokens if placement else None,
        "prefixwatch.predicted_queue_seconds": decision.predicted_queue_seconds if decision else None,
        "prefixwatch.predicted_prefill_seconds": decision.predicted_prefill_seconds if decision else None,
        "prefixwatch.scores": (scores_json(decision) or None) if decision else None,
        "prefixwatch.prediction_cause": exchange.prediction_cause.value if exchange.prediction_cause else None,
        "prefixwatch.reported_cached_tokens": usage.cached_tokens,
        "prefixwatch.decision_seconds": exchange.decision_seconds,
        "prefixwatch.time_to_first_token_seconds": exchange.ttft_seconds,
        "prefixwatch.retries": exchange.retries,
        "prefixwatch.tenant": exchange.tenant or None,
        "prefixwatch.outcome": exchange.outcome.value,
    }


def _wall_ns(at: float) -> int:
    """Wall-clock time of a moment on the monotonic clock."""
    return time_ns() - int((perf_counter() - at) * 1e9)
