"""Spans as a real OTLP/HTTP collector receives them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.router.fake_engine import DONE, ROLE, FakeEngine, Out, delta, reset_at_once, usage

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "<user>secret words<assistant>"  # a token a byte
Start = Any  # a coroutine function, see conftest.start


class Collector:
    """Keeps every span it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def take(self, request: web.Request) -> web.Response:
        batch = ExportTraceServiceRequest.FromString(await request.read())
        self.spans += [span for r in batch.resource_spans for scope in r.scope_spans for span in scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its base address."""
    keeper = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", keeper.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield keeper, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def attributes(span: Span) -> dict[str, Any]:
    read: dict[str, Callable[[Any], Any]] = {
        "string_value": lambda v: v.string_value,
        "int_value": lambda v: v.int_value,
        "double_value": lambda v: v.double_value,
    }
    return {a.key: read[str(a.value.WhichOneof("value"))](a.value) for a in span.attributes}


async def test_a_request_is_one_server_span_with_genai_attributes(
    engines: list[FakeEngine], start: Start, collector: tuple[Collector, str]
) -> None:
    async def behaviour(out: Out) -> None:
        await out.stream(ROLE, delta("hello"), usage(prompt=40, cached=16, output=2), DONE)

    engines[0].behaviour = behaviour
    keeper, endpoint = collector
    client = await start(engines[:1], policy="score", otlp_endpoint=endpoint)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-tenant-id": "alice"}
    async with client.chat("secret words", headers=headers, max_tokens=7, cache_salt="salty") as answer:
        await answer.read()
    await client.stop()  # flushes

    (span,) = keeper.spans
    assert (span.name, span.kind) == ("chat tiny", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert engines[0].headers[0]["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    values = attributes(span)
    assert 0 < values.pop("prefixwatch.decision_seconds") < values.pop("prefixwatch.time_to_first_token_seconds")
    assert values == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 2,
        "url.path": "/v1/chat/completions",
        "prefixwatch.policy": "score",
        "prefixwatch.worker": "a",
        "prefixwatch.reason": "miss_least_cost",
        "prefixwatch.predicted_cached_tokens": 0,
        "prefixwatch.predicted_queue_seconds": 0.0,
        "prefixwatch.predicted_prefill_seconds": len(PROMPT) / 8000,
        "prefixwatch.scores": '{"a":0.0}',
        "prefixwatch.prediction_cause": "within_block",
        "prefixwatch.reported_cached_tokens": 16,
        "prefixwatch.retries": 0,
        "prefixwatch.tenant": "alice",
        "prefixwatch.outcome": "completed",
    }
    (event,) = span.events
    assert event.name == "gen_ai.first_token"
    assert span.start_time_unix_nano < event.time_unix_nano < span.end_time_unix_nano
    assert b"secret" not in span.SerializeToString()
    assert b"salty" not in span.SerializeToString()


async def test_a_failed_request_is_an_error_span(
    engines: list[FakeEngine], start: Start, collector: tuple[Collector, str]
) -> None:
    engines[0].behaviour = reset_at_once
    keeper, endpoint = collector
    client = await start(engines[:1], otlp_endpoint=endpoint)
    async with client.chat() as answer:
        assert answer.status == 502
    await client.stop()
    (span,) = keeper.spans
    assert span.status.code == 2
    assert attributes(span)["error.type"] == "failed"
    assert "prefixwatch.reported_cached_tokens" not in attributes(span)


async def test_without_an_endpoint_the_callers_trace_passes_through(engines: list[FakeEngine], start: Start) -> None:
    client = await start(engines[:1])
    async with client.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}) as answer:
        await answer.read()
    assert engines[0].headers[0]["traceparent"] == f"00-{TRACE}-{PARENT}-01"
