"""What a GenAI span says of its request, whoever wrote it: attribute spellings are data, in `genai.yaml`.

Pure: a decoded span goes in, what it reports comes out. A value that can't be true (a negative count, a first token
after the end) is dropped and named in `faults`; the rest of the span still counts. Unknown stays None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from importlib import resources
from typing import Literal

from prefixwatch.documents import parse
from prefixwatch.documents.section import Section

Value = str | bool | int | float

MAX_TOKENS = 100_000_000
MAX_SECONDS = 86_400.0
MAX_TEXT = 200
"""Longest label or id that is kept, in characters."""
_CLOCK_TOLERANCE_SECONDS = 0.001


class Level(IntEnum):
    """Where in a request's path a span was written; a higher one saw the request earlier and its end later."""

    ENGINE = 0
    ROUTER = 1
    GATEWAY = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class Span:
    """One decoded span; ids are hex, times nanoseconds of the epoch, attributes only those in the table."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root."""
    name: str
    kind: Literal["internal", "server", "client", "producer", "consumer", ""]
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    """The span's own, over its resource's."""
    events: Sequence[tuple[str, int]] = ()
    """Name and time of the events in the table."""
    failed: bool = False
    """Its status is an error."""


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """What one span reports about one request to a model."""

    trace_id: str
    span_id: str
    start_ns: int
    end_ns: int
    level: Level
    producer: str
    outcome: str
    model: str = ""
    tenant: str = ""
    session: str = ""
    worker: str = ""
    """As the router calls it."""
    instance: str = ""
    """As an engine that wrote the span calls itself; a gateway's or a client's own name isn't a worker's."""
    policy: str = ""
    reason: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    predicted_tokens: int | None = None
    retries: int | None = None
    decision_seconds: float | None = None
    ttft_seconds: float | None = None
    e2e_seconds: float | None = None
    faults: tuple[str, ...] = ()
    """Values that were dropped, by what was wrong with them."""


class Spelling(Section):
    """An attribute, in another unit than the field's own."""

    name: str
    unit: Literal["milliseconds"]


class Producer(Section):
    """How a producer is known by its spans."""

    name: str
    level: Literal["engine", "router", "gateway", "client"]
    span_name: str = ""
    has_any: tuple[str, ...] = ()


class Inference(Section):
    """What makes a span a request to a model."""

    operations: tuple[str, ...]
    kinds: Mapping[str, tuple[str, ...]]


class SpanTable(Section):
    """`genai.yaml`."""

    fields: Mapping[str, tuple[str | Spelling, ...]]
    first_token_events: tuple[str, ...]
    producers: tuple[Producer, ...]
    inference: Inference

    @property
    def wanted(self) -> frozenset[str]:
        """Every attribute that is read; a decoder may leave out all others."""
        names = {_name(spelling) for spellings in self.fields.values() for spelling in spellings}
        markers = {name for producer in self.producers for name in producer.has_any}
        return frozenset(names | markers | self.inference.kinds.keys())

    def with_tenant_attributes(self, names: Sequence[str]) -> SpanTable:
        """The same with these attributes, in this order, before the table's own for the tenant."""
        fields = dict(self.fields)
        fields["tenant"] = (*names, *fields["tenant"])
        return self.model_copy(update={"fields": fields})


@cache
def shipped_table() -> SpanTable:
    """The table in this folder."""
    text = resources.files("prefixwatch.exporters.spans").joinpath("genai.yaml").read_text(encoding="utf-8")
    return parse(text, SpanTable, name="exporters/spans/genai.yaml")


def request_span(span: Span, table: SpanTable) -> RequestSpan | None:
    """What the span reports about its request; None when it isn't a model call (an agent, a tool, an embedding)."""
    values = span.attributes
    if not _is_inference(span, table):
        return None
    producer = next((row for row in table.producers if _wrote(row, span)), None)
    reader = _Reader(values, table)
    level = Level[producer.level.upper()] if producer else _level_of_kind(span)
    duration = (span.end_ns - span.start_ns) / 1e9
    e2e = reader.seconds("e2e_seconds")
    prompt, cached = reader.tokens("prompt_tokens"), reader.tokens("cached_tokens")
    if prompt is not None and cached is not None and cached > prompt:
        reader.faults.append("cached_beyond_prompt")
        cached = None
    return RequestSpan(
        trace_id=span.trace_id,
        span_id=span.span_id,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        level=level,
        producer=producer.name if producer else "",
        outcome=_outcome(span, reader),
        model=reader.text("model"),
        tenant=reader.text("tenant"),
        session=reader.text("session"),
        worker=reader.text("worker"),
        instance=reader.text("instance") if level is Level.ENGINE else "",
        policy=reader.text("policy"),
        reason=reader.text("reason"),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=reader.tokens("output_tokens"),
        predicted_tokens=reader.tokens("predicted_tokens"),
        retries=reader.tokens("retries"),
        decision_seconds=reader.seconds("decision_seconds"),
        ttft_seconds=_ttft(span, reader, table, e2e if e2e is not None else duration),
        e2e_seconds=e2e if e2e is not None else duration,
        faults=tuple(reader.faults),
    )


class _Reader:
    """The fields of one span's attributes; what can't be true is None and noted."""

    def __init__(self, values: Mapping[str, Value], table: SpanTable) -> None:
        self._values = values
        self._fields = table.fields
        self.faults: list[str] = []

    def text(self, name: str) -> str:
        for spelling in self._fields[name]:
            value = self._values.get(_name(spelling))
            if value is not None and value != "":
                return str(value)[:MAX_TEXT]
        return ""

    def tokens(self, name: str) -> int | None:
        number = self._number(name, MAX_TOKENS)
        if number is None:
            return None
        if number != int(number):
            self.faults.append(f"{name}_not_whole")
            return None
        return int(number)

    def seconds(self, name: str) -> float | None:
        return self._number(name, MAX_SECONDS)

    def _number(self, name: str, most: float) -> float | None:
        for spelling in self._fields[name]:
            value = self._values.get(_name(spelling))
            if value is None or value == "":
                continue
            number = _as_number(value)
            if number is None or not 0 <= number <= most:
                self.faults.append(f"{name}_out_of_range")
                return None
            return number / 1000 if isinstance(spelling, Spelling) else number
        return None


def _as_number(value: Value) -> float | None:
    """Some producers write every value as text. Booleans are no numbers; neither is NaN."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _name(spelling: str | Spelling) -> str:
    return spelling if isinstance(spelling, str) else spelling.name


def _is_inference(span: Span, table: SpanTable) -> bool:
    values = span.attributes
    for attribute, models in table.inference.kinds.items():
        if attribute in values:
            return str(values[attribute]).lower() in {model.lower() for model in models}
    reader = _Reader(values, table)
    operation = reader.text("operation").lower()
    if operation:
        return operation in table.inference.operations
    told = ("prompt_tokens", "output_tokens", "ttft_seconds")
    return any(_name(spelling) in values for field_name in told for spelling in table.fields[field_name])


def _wrote(producer: Producer, span: Span) -> bool:
    return (producer.span_name != "" and span.name == producer.span_name) or any(
        name in span.attributes for name in producer.has_any
    )


def _level_of_kind(span: Span) -> Level:
    """Who calls a model is its client; who is called and not known as an engine or router is a gateway."""
    return Level.GATEWAY if span.kind == "server" else Level.CLIENT


def _ttft(span: Span, reader: _Reader, table: SpanTable, e2e_seconds: float) -> float | None:
    """Seconds to the first token. 0 is what engines write that never saw one: unknown."""
    told = reader.seconds("ttft_seconds")
    if told is None:
        first = min((at for name, at in span.events if name in table.first_token_events), default=None)
        if first is None:
            return None
        told = (first - span.start_ns) / 1e9
        if told < 0:
            reader.faults.append("first_token_before_start")
            return None
    if told > e2e_seconds + _CLOCK_TOLERANCE_SECONDS:
        reader.faults.append("first_token_after_end")
        return None
    return told or None


def _outcome(span: Span, reader: _Reader) -> str:
    """Our router's own word, else by HTTP status, else by the error's name, else by the span's status."""
    named = reader.text("outcome")
    if named in _OUTCOMES:
        return named
    status, error = reader.text("status_code"), reader.text("error")
    code = status if status.isdecimal() else error if error.isdecimal() else ""
    if code and int(code) >= 400:
        return _outcome_of_status(int(code))
    if error:
        lowered = error.lower()
        return next((outcome for word, outcome in _ERROR_WORDS if word in lowered), "failed")
    return "failed" if span.failed else "completed"


def _outcome_of_status(code: int) -> str:
    if code in (429, 503):
        return "refused"
    if code in (408, 504):
        return "timed_out"
    if code == 499:
        return "disconnected"
    return "failed" if code >= 500 else "rejected"


_OUTCOMES = frozenset({"completed", "refused", "rejected", "failed", "timed_out", "disconnected"})
_ERROR_WORDS = (
    ("timeout", "timed_out"),
    ("timed_out", "timed_out"),
    ("ratelimit", "refused"),
    ("rate_limit", "refused"),
    ("cancel", "disconnected"),
    ("badrequest", "rejected"),
    ("invalid_request", "rejected"),
)
