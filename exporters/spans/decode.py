"""OTLP trace exports: bytes, protobuf or JSON → spans. Only the attributes and events that are wanted are kept.

Format: the OTLP specification 1.x, https://opentelemetry.io/docs/specs/otlp/. In JSON, ids are hex, unlike protobuf's
own JSON mapping, which says base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Container, Iterator
from typing import Any, Literal, get_args

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from prefixwatch.exporters.spans.genai import Span, Value

Encoding = Literal["protobuf", "json"]

_Kind = Literal["", "internal", "server", "client", "producer", "consumer"]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")
_MAX_EVENTS = 1_000
"""Events of one span that are looked at: some producers write one a token."""


class BadExport(ValueError):
    """The bytes are not an OTLP trace export; the message says what is wrong with them."""


def decode(body: bytes, encoding: Encoding, attributes: Container[str], events: Container[str]) -> list[Span]:
    """All spans of an export, with these attributes and events of theirs. Raises BadExport."""
    request = _from_json(body) if encoding == "json" else _from_protobuf(body)
    return list(_spans(request, attributes, events))


def _from_protobuf(body: bytes) -> ExportTraceServiceRequest:
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise BadExport(f"not a protobuf ExportTraceServiceRequest: {error}") from error


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadExport(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadExport("not a JSON ExportTraceServiceRequest: an object with resourceSpans was expected")
    for span in _json_spans(document):
        _ids_to_base64(span)
    try:
        return json_format.ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError, OverflowError, ValueError, TypeError) as error:
        raise BadExport(f"not a JSON ExportTraceServiceRequest: {str(error)[:300]}") from error


def _json_spans(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The span objects of a document whose shape isn't checked yet."""
    for resource in _objects(document, "resourceSpans"):
        for scope in _objects(resource, "scopeSpans"):
            for span in _objects(scope, "spans"):
                yield span
                yield from _objects(span, "links")


def _objects(holder: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = holder.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _ids_to_base64(span: dict[str, Any]) -> None:
    for name in _ID_FIELDS:
        if isinstance(given := span.get(name), str):
            try:
                span[name] = base64.b64encode(bytes.fromhex(given)).decode()
            except ValueError:
                span[name] = ""  # refused later, this span alone, as one without an id


def _spans(request: ExportTraceServiceRequest, attributes: Container[str], events: Container[str]) -> Iterator[Span]:
    for resource in request.resource_spans:
        shared = _values(resource.resource.attributes, attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(span, shared, attributes, events)


def _span(span: ProtoSpan, shared: dict[str, Value], attributes: Container[str], events: Container[str]) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=_KINDS[span.kind] if 0 <= span.kind < len(_KINDS) else "",
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=shared | _values(span.attributes, attributes),
        events=[(event.name, event.time_unix_nano) for event in span.events[:_MAX_EVENTS] if event.name in events],
        failed=span.status.code == Status.STATUS_CODE_ERROR,
    )


def _values(pairs: Iterator[KeyValue] | Any, wanted: Container[str]) -> dict[str, Value]:
    found = {}
    for pair in pairs:
        if pair.key in wanted and (value := _value(pair.value)) is not None:
            found[pair.key] = value
    return found


def _value(value: AnyValue) -> Value | None:
    """Text, number or truth; lists, maps and bytes are never wanted."""
    kind = value.WhichOneof("value")
    if kind in ("string_value", "bool_value", "int_value", "double_value"):
        scalar: Value = getattr(value, kind)
        return scalar
    return None
