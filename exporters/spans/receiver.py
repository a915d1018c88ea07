"""OTLP/HTTP: spans come in at POST /v1/traces, requests go into the ledger.

Answers as the OTLP specification says: 200 with the spans that couldn't be used in `partial_success`; 400, 408, 413 and
415 with the reason; 503 with Retry-After when too much is being read or decoded. A slow sender holds no place that
another one needs, and not for longer than `otlp.body_timeout_seconds`. Bodies are decoded on a thread of their own, so
no export, however large, holds up a scrape.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # googleapis-common-protos has no types
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.spans.config import OtlpConfig
from prefixwatch.exporters.spans.decode import BadExport, Encoding, decode
from prefixwatch.exporters.spans.genai import Span, shipped_table
from prefixwatch.exporters.spans.requests import SpanRefused, SpanRequests
from prefixwatch.kvcache.request_record import Pseudonyms, RequestRecord

_log = logging.getLogger("prefixwatch.exporter")

PATH = "/v1/traces"

_NOTHING_SENT = (
    f"nothing was sent to {PATH} yet; it takes OTLP over HTTP, not gRPC: vLLM needs --otlp-traces-endpoint with this "
    "address and OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
)
_CONTENT_TYPES: Mapping[str, Encoding] = {"application/x-protobuf": "protobuf", "application/json": "json"}
_CONTENT_ENCODINGS = ("", "identity", "gzip", "deflate")
_MAX_DECODING = 16
_MAX_READING = 512
_MAX_READING_BYTES = 64 * 1024 * 1024
"""Of all bodies that are being received, so that slow senders can't fill the memory."""
_SPANS_AT_A_TIME = 200
_RPC_CODES = {400: 3, 408: 4, 413: 8, 415: 3, 503: 14}
"""google.rpc.Code for a Status body: invalid argument, deadline exceeded, resource exhausted, unavailable."""


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class OtlpReceiver:
    """One receiver: its HTTP handler, the traces it holds, and the task that settles them.

    `count` takes each request with the name of this source. `tenants` are shown by name; all others, and sessions, as
    hashes keyed by `hash_secret`. `read_elsewhere` holds the ids of traces whose requests come from a router's own
    records: they are not counted again. `block_size_of` returns a worker's block size, which separates full from
    partial hits.
    """

    name = "spans"

    def __init__(
        self,
        config: OtlpConfig,
        count: Callable[[RequestRecord, str], None],
        *,
        tenants: Iterable[str] = (),
        hash_secret: str | None = None,
        read_elsewhere: Container[str] = (),
        block_size_of: Callable[[str], int | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._count = count
        self._clock = clock
        self._wall_clock = wall_clock
        known = frozenset(tenants)
        pseudonyms = Pseudonyms(hash_secret)
        self._table = shipped_table().with_tenant_attributes(config.tenant_attributes)
        self._wanted = self._table.wanted
        self._requests = SpanRequests(
            self._table,
            lambda name: pseudonyms.tenant(name, known),
            pseudonyms.session,
            read_elsewhere=read_elsewhere,
            block_size_of=block_size_of,
            settle_seconds=config.settle_seconds,
            max_traces=config.max_traces,
        )
        self._exports: Counter[int] = Counter()
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="otlp")
        self._reading = self._reading_bytes = self._decoding = 0
        self._settling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Settle traces from now on; needs a running event loop."""
        self._settling = asyncio.create_task(self._keep_settling(), name="settle traces")

    async def stop(self) -> None:
        """Count what is still held, and end."""
        if self._settling:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
        for record in self._requests.all():
            self._count(record, self.name)
        self._decoder.shutdown(wait=False, cancel_futures=True)

    async def _keep_settling(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._config.settle_seconds / 4))
            try:
                await self.settle()
            except Exception:  # a mistake of ours about one request must not end all others
                _log.exception("settling traces ended by a fault of the exporter")

    async def settle(self) -> None:
        """Hand the requests of settled traces to the ledger."""
        for position, record in enumerate(self._requests.settled(self._clock()), start=1):
            self._count(record, self.name)
            if position % _SPANS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # scrapes go on meanwhile

    def routes(self) -> list[web.RouteDef]:
        """For the exporter's application."""
        return [web.post(PATH, self.handle)]

    async def handle(self, request: web.Request) -> web.Response:
        """One export."""
        encoding = _CONTENT_TYPES.get(request.content_type)
        try:
            if encoding is None:
                raise _Refused(415, f"Content-Type {request.content_type}: send {' or '.join(_CONTENT_TYPES)}")
            refused, reasons = await self._take(request, encoding)
            response = _accepted(encoding, refused, reasons)
        except _Refused as problem:
            response = _refusal(encoding, problem)
        self._exports[response.status] += 1
        return response

    async def _take(self, request: web.Request, encoding: Encoding) -> tuple[int, Counter[str]]:
        if self._reading >= _MAX_READING:
            raise _Refused(503, f"{self._reading} exports are being received; send again")
        self._reading += 1
        try:
            async with asyncio.timeout(self._config.body_timeout_seconds):
                body = await self._read(request)
        except TimeoutError as error:
            limit = self._config.body_timeout_seconds
            raise _Refused(408, f"the body took longer than {limit:g} s: send smaller batches") from error
        finally:
            self._reading -= 1
        if self._decoding >= _MAX_DECODING:
            raise _Refused(503, f"{self._decoding} exports are being decoded; send again")
        self._decoding += 1
        try:
            spans = await asyncio.get_running_loop().run_in_executor(self._decoder, self._decode, body, encoding)
        except BadExport as error:
            raise _Refused(400, str(error)) from error
        finally:
            self._decoding -= 1
        return await self._add(spans)

    async def _read(self, request: web.Request) -> bytes:
        """The body, decompressed, up to the limits. Raises _Refused."""
        given = request.headers.get("Content-Encoding", "").lower()
        if given not in _CONTENT_ENCODINGS:
            raise _Refused(415, f"Content-Encoding {given}: send gzip or none")
        body, limit = bytearray(), self._config.max_body_bytes
        try:
            async for chunk in request.content.iter_any():
                body += chunk
                self._reading_bytes += len(chunk)
                if len(body) > limit:
                    raise _Refused(413, f"more than {limit} bytes: send smaller batches, or raise otlp.max_body_bytes")
                if self._reading_bytes > max(_MAX_READING_BYTES, limit):
                    raise _Refused(503, "too many bytes are being received; send again")
        except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
            raise _Refused(400, f"the body can't be read as {given or 'sent'}: {error}") from error
        finally:
            self._reading_bytes -= len(body)
        return bytes(body)

    def _decode(self, body: bytes, encoding: Encoding) -> list[Span]:
        return decode(body, encoding, self._wanted, self._table.first_token_events)

    async def _add(self, spans: Sequence[Span]) -> tuple[int, Counter[str]]:
        reasons: Counter[str] = Counter()
        now, wall = self._clock(), self._wall_clock()
        for position, span in enumerate(spans, start=1):
            if position % _SPANS_AT_A_TIME == 0:
                await asyncio.sleep(0)
            try:
                self._requests.add(span, now, wall)
            except SpanRefused as refused:
                reasons[str(refused)] += 1
        return reasons.total(), reasons

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        """How many exports and spans came, and their outcomes."""
        exports, spans, faults = rows("otlp_exports"), rows("spans"), rows("span_faults")
        for status, count in sorted(self._exports.items()):
            exports.add_metric([str(status)], count)
        for result, count in sorted(self._requests.results.items()):
            spans.add_metric([result], count)
        for fault, count in sorted(self._requests.faults.items()):
            faults.add_metric([fault], count)
        return [exports, spans, faults]

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        """The same, and how many traces wait for more spans."""
        absent = {} if self._exports else {"requests": _NOTHING_SENT}
        return {
            "exports": {str(status): count for status, count in self._exports.items()},
            "spans": dict(self._requests.results),
            "faults": dict(self._requests.faults),
            "waiting_traces": self._requests.waiting_traces,
            "absent": absent,
        }


def _accepted(encoding: Encoding, refused: int, reasons: Counter[str]) -> web.Response:
    answer = ExportTraceServiceResponse()
    if refused:
        answer.partial_success.rejected_spans = refused
        answer.partial_success.error_message = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
    return web.Response(body=_encoded(answer, encoding), content_type=_content_type(encoding))


def _refusal(encoding: Encoding | None, problem: _Refused) -> web.Response:
    headers = {"Retry-After": "1"} if problem.status == 503 else {}
    if encoding is None:
        return web.Response(status=problem.status, text=f"{problem.reason}\n", headers=headers)
    status = Status(code=_RPC_CODES[problem.status], message=problem.reason)
    return web.Response(
        status=problem.status, body=_encoded(status, encoding), content_type=_content_type(encoding), headers=headers
    )


def _content_type(encoding: Encoding) -> str:
    return next(name for name, known in _CONTENT_TYPES.items() if known == encoding)


def _encoded(message: Message, encoding: Encoding) -> bytes:
    if encoding == "protobuf":
        return message.SerializeToString()
    return json.dumps(json_format.MessageToDict(message)).encode()
