"""Spans over real HTTP: from OpenTelemetry's own exporter, from our router, and from who means no good."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from google.protobuf import json_format
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # googleapis-common-protos has no types
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind

from prefixwatch.exporters.spans.config import OtlpConfig
from prefixwatch.exporters.spans.decode import BadExport, Encoding, decode
from prefixwatch.exporters.spans.genai import shipped_table
from prefixwatch.exporters.spans.receiver import PATH, OtlpReceiver
from prefixwatch.kvcache.request_record import RequestRecord

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROTOBUF, JSON = {"Content-Type": "application/x-protobuf"}, {"Content-Type": "application/json"}


class Ledger:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[tuple[str, RequestRecord]] = []

    def record(self, record: RequestRecord, source: str) -> None:
        self.records.append((source, record))


@dataclass
class Served:
    """A receiver that listens. Its clock stands until it is told otherwise."""

    receiver: OtlpReceiver
    ledger: Ledger
    url: str
    clock: list[float] = field(default_factory=list)

    async def settle(self) -> list[RequestRecord]:
        self.clock[0] += 100
        await self.receiver.settle()
        return [record for _, record in self.ledger.records]

    def spans(self) -> dict[str, int]:
        found: dict[str, int] = self.receiver.document(0)["spans"]
        return found


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners = []

    async def start(tenants: tuple[str, ...] = (), **config: Any) -> Served:
        ledger, clock = Ledger(), [0.0]
        receiver = OtlpReceiver(OtlpConfig(**config), ledger.record, tenants=tenants, clock=lambda: clock[0])
        app = web.Application()
        app.add_routes(receiver.routes())
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return Served(receiver, ledger, f"http://127.0.0.1:{runner.addresses[0][1]}", clock)

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as client:
        yield client


def export(*, ended: float | None = None, **span: Any) -> dict[str, Any]:
    """An export of one span, as OTLP's JSON."""
    end = time.time() if ended is None else ended
    attributes = [
        {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "640"}},
        {"key": "gen_ai.usage.cache_read.input_tokens", "value": {"intValue": 512}},
        {"key": "team.id", "value": {"stringValue": "blue"}},
        {"key": "gen_ai.input.messages", "value": {"stringValue": "secret words"}},
    ]
    fields = {
        "traceId": TRACE,
        "spanId": SPAN,
        "name": "chat tiny",
        "kind": 3,
        "startTimeUnixNano": str(int((end - 2) * 1e9)),
        "endTimeUnixNano": str(int(end * 1e9)),
        "attributes": attributes,
        "events": [{"name": "gen_ai.first_token", "timeUnixNano": str(int((end - 1.5) * 1e9))}],
        **span,
    }
    return {"resourceSpans": [{"scopeSpans": [{"spans": [fields]}]}]}


def as_protobuf(*spans: dict[str, Any]) -> bytes:
    request = ExportTraceServiceRequest()
    for document in spans:
        for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            message = request.resource_spans.add().scope_spans.add().spans.add()
            plain = {name: value for name, value in span.items() if name not in ("traceId", "spanId")}
            json_format.ParseDict(plain, message)
            message.trace_id, message.span_id = bytes.fromhex(span["traceId"]), bytes.fromhex(span["spanId"])
    return request.SerializeToString()


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate])
async def test_opentelemetrys_own_exporter(serve: Serve, compression: Compression) -> None:
    served = await serve()
    exporter = OTLPSpanExporter(endpoint=served.url + PATH, compression=compression)
    provider = TracerProvider(resource=Resource.create({"service.instance.id": "vllm-0"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def request() -> None:
        span = provider.get_tracer("vllm").start_span("llm_request", kind=SpanKind.SERVER)
        span.set_attributes({"gen_ai.usage.prompt_tokens": 320, "gen_ai.latency.time_to_first_token": 0.25})
        span.set_attributes({"gen_ai.latency.e2e": 1.5})
        span.end()
        provider.shutdown()

    await asyncio.to_thread(request)
    (record,) = await served.settle()
    assert (record.prompt_tokens, record.ttft_seconds, record.e2e_seconds) == (320, 0.25, 1.5)
    assert (record.cached_tokens, record.worker, record.outcome) == (None, "vllm-0", "completed")
    assert served.ledger.records[0][0] == "spans"


@pytest.mark.parametrize("encoding", ["json", "protobuf"])
async def test_both_encodings_say_the_same(serve: Serve, session: aiohttp.ClientSession, encoding: Encoding) -> None:
    served = await serve(tenant_attributes=("team.id",), tenants=("blue",))
    body = json.dumps(export()).encode() if encoding == "json" else as_protobuf(export())
    headers = JSON if encoding == "json" else PROTOBUF
    async with session.post(
        served.url + PATH, data=gzip.compress(body), headers={**headers, "Content-Encoding": "gzip"}
    ) as answer:
        assert (answer.status, answer.content_type) == (200, headers["Content-Type"])
        empty = await answer.read()
    assert empty == (b"{}" if encoding == "json" else b"")
    (record,) = await served.settle()
    assert (record.prompt_tokens, record.cached_tokens, record.tenant, record.trace_id) == (640, 512, "blue", TRACE)
    assert record.ttft_seconds == pytest.approx(0.5)


async def test_tenants_that_arent_named_are_hashes(serve: Serve, session: aiohttp.ClientSession) -> None:
    served = await serve(tenant_attributes=("team",), tenants=("blue",))
    for number, team in enumerate(["blue", "red", "green", "red"]):
        attributes = [
            {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
            {"key": "team", "value": {"stringValue": team}},
        ]
        document = export(attributes=attributes, traceId=f"{number + 1:032x}")
        await session.post(served.url + PATH, json=document)
    blue, red, green, again = [record.tenant for record in await served.settle()]
    assert blue == "blue"
    assert red == again != green
    assert red.startswith("#")


async def test_bad_spans_are_told_to_the_sender_and_good_ones_count(
    serve: Serve, session: aiohttp.ClientSession
) -> None:
    served = await serve()
    now = str(int(time.time() * 1e9))
    bad = export(startTimeUnixNano=now, endTimeUnixNano=str(int(now) - 10**9), spanId="00f067aa0ba902b7")
    async with session.post(served.url + PATH, data=as_protobuf(export(), bad), headers=PROTOBUF) as answer:
        told = ExportTraceServiceResponse.FromString(await answer.read())
    assert answer.status == 200
    assert told.partial_success.rejected_spans == 1
    assert told.partial_success.error_message == "negative_duration: 1"
    assert len(await served.settle()) == 1
    assert served.spans() == {"used": 1, "merged": 0, "refused": 1}
    async with session.post(served.url + PATH, json=export(traceId="xyz")) as answer:
        assert await answer.json() == {"partialSuccess": {"rejectedSpans": "1", "errorMessage": "bad_trace_id: 1"}}


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff", PROTOBUF, 400),
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b'{"resourceSpans": 1}', JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b"plain", PROTOBUF | {"Content-Encoding": "gzip"}, 400),
        (b"", {"Content-Type": "text/plain"}, 415),
        (b"", PROTOBUF | {"Content-Encoding": "snappy"}, 415),
        (b" " * 300_000, JSON, 413),
        (gzip.compress(b" " * 50_000_000), JSON | {"Content-Encoding": "gzip"}, 413),
    ],
    ids=["protobuf", "json", "list", "shape", "deep", "not gzip", "type", "encoding", "large", "bomb"],
)
async def test_what_is_no_export_is_refused_with_the_reason(
    serve: Serve, session: aiohttp.ClientSession, body: bytes, headers: dict[str, str], status: int
) -> None:
    served = await serve(max_body_bytes=200_000)
    async with session.post(served.url + PATH, data=body, headers=headers) as answer:
        assert answer.status == status
        said = await answer.read()
    assert served.receiver.document(0)["exports"] == {str(status): 1}
    if status == 415:
        assert b"send" in said
    elif headers["Content-Type"] == JSON["Content-Type"]:
        assert json.loads(said)["message"]
    else:
        assert Status.FromString(said).message


async def test_other_paths_and_methods(serve: Serve, session: aiohttp.ClientSession) -> None:
    served = await serve()
    async with session.get(served.url + PATH) as answer:
        assert answer.status == 405
    async with session.post(f"{served.url}/v1/metrics", data=b"", headers=PROTOBUF) as answer:
        assert answer.status == 404


async def test_a_cut_body_hurts_nobody(serve: Serve, session: aiohttp.ClientSession) -> None:
    served = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    del reader
    async with session.post(served.url + PATH, json=export()) as answer:
        assert answer.status == 200
    assert len(await served.settle()) == 1


async def test_slow_senders_keep_nobody_out(serve: Serve, session: aiohttp.ClientSession) -> None:
    """M8: 20 connections that send one byte of a thousand; each is ended with 408, and the others never notice."""
    served = await serve(body_timeout_seconds=1.0)
    head = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    slow = [await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2])) for _ in range(20)]
    for _, writer in slow:
        writer.write(head)
        await writer.drain()
    async with session.post(served.url + PATH, json=export()) as answer:
        assert answer.status == 200
    for reader, writer in slow:
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()


async def test_scrapes_go_on_while_a_large_export_is_read(serve: Serve, session: aiohttp.ClientSession) -> None:
    """1,000 spans are taken a few at a time: another task of the same loop runs in between, again and again."""
    served = await serve()
    one = export()["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    spans = [{**one, "spanId": f"{n + 1:016x}", "traceId": f"{n + 1:032x}"} for n in range(1_000)]
    body = as_protobuf({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    seen: set[int] = set()

    async def scrape() -> None:
        while True:
            await asyncio.sleep(0)
            seen.add(served.receiver.document(0)["waiting_traces"])

    scraping = asyncio.create_task(scrape())
    async with session.post(served.url + PATH, data=body, headers=PROTOBUF) as answer:
        assert answer.status == 200
    scraping.cancel()
    assert len(seen & set(range(1, 1_000))) >= 3
    assert len(await served.settle()) == 1_000


async def test_stopping_counts_what_is_still_held(serve: Serve, session: aiohttp.ClientSession) -> None:
    served = await serve()
    served.receiver.start()
    await session.post(served.url + PATH, json=export())
    await served.receiver.stop()
    assert len(served.ledger.records) == 1


def test_before_anything_came_the_api_says_so() -> None:
    receiver = OtlpReceiver(OtlpConfig(), Ledger().record)
    assert "nothing was sent to /v1/traces yet; it takes OTLP over HTTP" in receiver.document(0)["absent"]["requests"]
    assert all(not family.samples for family in receiver.metrics(0))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["resourceSpans", "scopeSpans", "spans", "traceId", "spanId", "attributes", "key", "value", "intValue"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_json)
def test_no_json_gets_past_the_decoder(document: Any) -> None:
    decode_or_refuse(json.dumps(document).encode(), "json")


@pytest.mark.parametrize(
    "span",
    [
        '{"kind": 1e400}',
        '{"name": "\\ud800"}',
        '{"startTimeUnixNano": "' + "9" * 5_000 + '"}',
        '{"startTimeUnixNano": ' + "9" * 4_000 + "}",
        '{"attributes": [{"key": "error.type", "value": {"doubleValue": 1e999}}]}',
        '{"attributes": ' + '[{"key": "a", "value": {"arrayValue": {"values": ' * 300 + "[]" + "}}}]" * 300 + "}",
    ],
    ids=["infinite enum", "half a character", "long text", "long number", "infinite double", "nested"],
)
def test_values_that_no_field_holds_are_refused(span: str) -> None:
    body = '{"resourceSpans": [{"scopeSpans": [{"spans": [' + span + "]}]}]}"
    with pytest.raises(BadExport):
        decode(body.encode(), "json", shipped_table().wanted, ())


@given(st.binary(max_size=200))
def test_no_bytes_get_past_the_decoder(body: bytes) -> None:
    decode_or_refuse(body, "protobuf")
    decode_or_refuse(body, "json")


_GOOD = as_protobuf(export(ended=1_700_000_000.0))


@given(st.integers(0, len(_GOOD) - 1), st.binary(min_size=1, max_size=4))
def test_no_damage_gets_past_the_decoder(at: int, damage: bytes) -> None:
    decode_or_refuse(_GOOD[:at] + damage + _GOOD[at + len(damage) :], "protobuf")


def decode_or_refuse(body: bytes, encoding: Encoding) -> None:
    try:
        spans = decode(body, encoding, shipped_table().wanted, shipped_table().first_token_events)
    except BadExport:
        return
    assert all(set(span.attributes) <= shipped_table().wanted for span in spans)
