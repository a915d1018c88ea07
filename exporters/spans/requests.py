"""From spans to requests: every request is counted once, however many processes wrote a span about it.

A router, a gateway and the engine behind them each write a span of the same trace. Two GenAI spans of a trace are one
request when one is an ancestor of the other; where the links between them are missing (a hop that exports elsewhere),
when they are on different levels and the middle of the lower one lies within the higher one. So an agent's trace
with many calls gives as many requests. Of one request

* the outermost span gives TTFT, end-to-end time, outcome, tenant, session and model: it saw what the client saw;
* the innermost one gives prompt, cached and output tokens: it counted them;
* whoever knows one that others don't gives it.

A trace is held for `settle_seconds` after its first span, because exporters send in batches of their own. Spans that
come later are not counted again. A trace whose request was read from a router's own records is dropped whole.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from prefixwatch.exporters.spans.genai import RequestSpan, Span, SpanTable, request_span
from prefixwatch.kvcache.request_record import RequestRecord

MAX_CLOCK_DIFFERENCE_SECONDS = 86_400.0
"""A span that ended longer ago, or that much in the future, has a broken clock."""
_MAX_SPANS = 1_000
"""Of one trace: how many wait at a time, and the links of how many are remembered."""
_MAX_ANCESTORS = 64
_MAX_COUNTED = 100
"""Counted spans of a trace that a latecomer is compared with by time."""
_MAX_REMEMBERED = 10_000
"""And by links."""
_FORGET_AFTER_SETTLING = 4
"""A settled trace is remembered this many times as long as it was held, against latecomers."""

_Known = TypeVar("_Known")


class SpanRefused(ValueError):
    """A span that can't be used at all; the message is the reason's short name."""


@dataclass(slots=True)
class _Trace:
    first_seen_seconds: float
    parents: dict[str, str] = field(default_factory=dict)
    """Of the newest spans."""
    waiting: list[RequestSpan] = field(default_factory=list)
    settled: bool = False
    counted: deque[RequestSpan] = field(default_factory=lambda: deque(maxlen=_MAX_COUNTED))
    counted_ids: set[str] = field(default_factory=set)
    above_counted: set[str] = field(default_factory=set)
    """Ids of all spans above those that were counted."""

    def link(self, span: Span) -> None:
        self.parents[span.span_id] = span.parent_id
        if len(self.parents) > _MAX_SPANS:
            del self.parents[next(iter(self.parents))]

    def count(self, spans: Sequence[RequestSpan]) -> None:
        self.counted.extend(spans)
        if len(self.counted_ids) > _MAX_REMEMBERED:
            self.counted_ids.clear()
            self.above_counted.clear()
        for span in spans:
            self.counted_ids.add(span.span_id)
            self.above_counted.update(_ancestors(span.span_id, self.parents))

    def has_counted(self, span: RequestSpan) -> bool:
        """The span is of a request that was counted already."""
        return (
            span.span_id in self.above_counted
            or not self.counted_ids.isdisjoint(_ancestors(span.span_id, self.parents))
            or any(_within(span, one, self.parents) or _within(one, span, self.parents) for one in self.counted)
        )


class SpanRequests:
    """Takes spans in any order and gives the requests of settled traces.

    `tenant_label` and `session_label` turn a name into what may be shown of it; `read_elsewhere` holds the ids of
    traces whose requests a router's own records tell; `block_size_of` knows the workers' block sizes. Memory is
    bounded by `max_traces` of at most 1,000 spans.
    """

    def __init__(
        self,
        table: SpanTable,
        tenant_label: Callable[[str], str],
        session_label: Callable[[str], str],
        *,
        read_elsewhere: Container[str] = (),
        block_size_of: Callable[[str], int | None] = lambda _: None,
        settle_seconds: float = 15.0,
        max_traces: int = 20_000,
    ) -> None:
        self._table = table
        self._tenant_label = tenant_label
        self._session_label = session_label
        self._read_elsewhere = read_elsewhere
        self._block_size_of = block_size_of
        self._settle_seconds = settle_seconds
        self._max_traces = max_traces
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self.results: Counter[str] = Counter()
        """Spans by their outcome: used, merged, other, duplicate, late, elsewhere, refused."""
        self.faults: Counter[str] = Counter()
        """Values that were dropped, and spans that were refused, by what was wrong."""

    @property
    def waiting_traces(self) -> int:
        """Traces that are still held."""
        return sum(not trace.settled for trace in self._traces.values())

    def add(self, span: Span, now_seconds: float, now_unix_seconds: float) -> None:
        """One span. Raises SpanRefused, having counted it, when it can't be used."""
        try:
            self._check(span, now_unix_seconds)
        except SpanRefused as refused:
            self.results["refused"] += 1
            self.faults[str(refused)] += 1
            raise
        trace = self._traces.setdefault(span.trace_id, _Trace(now_seconds))
        if span.span_id in trace.parents:  # sent again because an answer was lost
            self.results["duplicate"] += 1
            return
        trace.link(span)
        told = request_span(span, self._table)
        if told is None:
            self.results["other"] += 1
            return
        for fault in told.faults:
            self.faults[fault] += 1
        if trace.settled and trace.has_counted(told):
            self.results["late"] += 1
            return
        trace.waiting.append(told)
        if trace.settled:  # a further request of a trace that goes on
            trace.settled, trace.first_seen_seconds = False, now_seconds
            self._traces.move_to_end(span.trace_id)

    def _check(self, span: Span, now_unix_seconds: float) -> None:
        if len(span.trace_id) != 32 or not span.trace_id.strip("0"):
            raise SpanRefused("bad_trace_id")
        if len(span.span_id) != 16 or not span.span_id.strip("0"):
            raise SpanRefused("bad_span_id")
        if not span.start_ns or not span.end_ns:
            raise SpanRefused("missing_time")
        if span.end_ns < span.start_ns:
            raise SpanRefused("negative_duration")
        if abs(span.end_ns / 1e9 - now_unix_seconds) > MAX_CLOCK_DIFFERENCE_SECONDS:
            raise SpanRefused("wrong_clock")
        trace = self._traces.get(span.trace_id)
        if trace and len(trace.waiting) >= _MAX_SPANS:
            raise SpanRefused("too_many_spans")

    def settled(self, now_seconds: float) -> Iterator[RequestRecord]:
        """The requests of traces that have been held long enough, or that there is no more room for."""
        for trace_id, trace in list(self._traces.items()):
            age = now_seconds - trace.first_seen_seconds
            crowded = len(self._traces) > self._max_traces
            if not trace.settled and (crowded or age >= self._settle_seconds):
                yield from self._settle(trace_id, trace)
            if crowded or (trace.settled and age >= self._settle_seconds * _FORGET_AFTER_SETTLING):
                del self._traces[trace_id]

    def all(self) -> Iterator[RequestRecord]:
        """Everything that is still held."""
        for trace_id, trace in self._traces.items():
            if not trace.settled:
                yield from self._settle(trace_id, trace)

    def _settle(self, trace_id: str, trace: _Trace) -> Iterator[RequestRecord]:
        waiting, trace.waiting, trace.settled = trace.waiting, [], True
        elsewhere = trace_id in self._read_elsewhere
        for spans in _requests(waiting, trace.parents):
            trace.count(spans)
            if elsewhere:
                self.results["elsewhere"] += len(spans)
                continue
            self.results["used"] += 1
            self.results["merged"] += len(spans) - 1
            yield self._record(spans)

    def _record(self, spans: Sequence[RequestSpan]) -> RequestRecord:
        """`spans` from the innermost to the outermost."""
        outer = spans[-1]
        ttft, e2e, output = _outermost(spans, "ttft_seconds", float), outer.e2e_seconds, _inner(spans, "output_tokens")
        prompt, cached = _inner(spans, "prompt_tokens"), _inner(spans, "cached_tokens")
        if prompt is not None and cached is not None and cached > prompt:
            self.faults["cached_beyond_prompt"] += 1
            cached = None
        worker = _first(s.worker for s in spans) or _first(s.instance for s in spans)
        return RequestRecord(
            ended_unix_seconds=outer.end_ns / 1e9,
            outcome=outer.outcome,
            worker=worker,
            model=_first(s.model for s in reversed(spans)),
            tenant=self._shown(self._tenant_label, _first(s.tenant for s in reversed(spans))),
            session=self._shown(self._session_label, _first(s.session for s in reversed(spans))),
            policy=_first(s.policy for s in spans),
            reason=_first(s.reason for s in spans),
            retries=_inner(spans, "retries") or 0,
            prompt_tokens=prompt,
            cached_tokens=cached,
            block_size=self._block_size_of(worker),
            predicted_tokens=_inner(spans, "predicted_tokens"),
            output_tokens=output,
            decision_seconds=_outermost(spans, "decision_seconds", float),
            ttft_seconds=ttft,
            e2e_seconds=e2e,
            tpot_seconds=_tpot(ttft, e2e, output),
            trace_id=outer.trace_id,
        )

    @staticmethod
    def _shown(label: Callable[[str], str], name: str) -> str:
        return label(name) if name else ""


def _requests(spans: Sequence[RequestSpan], parents: dict[str, str]) -> list[list[RequestSpan]]:
    """The spans of each request, innermost first."""
    found: list[list[RequestSpan]] = []
    for tree in sorted(_trees(spans, parents), key=lambda tree: _rank(tree[-1]), reverse=True):
        top = tree[-1]
        above = [request for request in found if request[-1].level > top.level]
        if above and not _chain_ends_at_root(top, parents):
            above = [request for request in above if any(_holds(other, top) for other in request)]
            if above:  # of several, the one that ends closest to it
                min(above, key=lambda request: abs(request[-1].end_ns - top.end_ns))[:0] = tree
                continue
        found.append(tree)
    return found


def _trees(spans: Sequence[RequestSpan], parents: dict[str, str]) -> Iterable[list[RequestSpan]]:
    """Spans that links join, the innermost first and the one above all others last.

    Of several attempts at the same depth the one that ended last comes first: it brought the answer.
    """
    known = {span.span_id for span in spans}
    trees: dict[str, list[tuple[int, RequestSpan]]] = {}
    for span in spans:
        above = [ancestor for ancestor in _ancestors(span.span_id, parents) if ancestor in known]
        trees.setdefault(above[-1] if above else span.span_id, []).append((len(above), span))
    for members in trees.values():
        members.sort(key=lambda member: (-member[0], -member[1].end_ns, member[1].span_id))
        yield [span for _, span in members]


def _rank(span: RequestSpan) -> tuple[int, int, int, str]:
    """A span of higher rank can't lie within one of lower rank."""
    return span.level, span.end_ns - span.start_ns, span.start_ns, span.span_id


def _within(inner: RequestSpan, outer: RequestSpan, parents: dict[str, str]) -> bool:
    """The lower one lies in the higher one by time, and some hop above it is missing."""
    return _holds(outer, inner) and not _chain_ends_at_root(inner, parents)


def _holds(outer: RequestSpan, inner: RequestSpan) -> bool:
    """The middle of the one lies in the other: so much may the clocks of two machines differ."""
    return inner.level < outer.level and outer.start_ns <= (inner.start_ns + inner.end_ns) // 2 <= outer.end_ns


def _ancestors(span_id: str, parents: dict[str, str]) -> list[str]:
    """The span's parent, its parent, and so on, as far as known; a ring of parents ends it."""
    found: dict[str, None] = {}
    above = parents.get(span_id, "")
    while above and above != span_id and above not in found and len(found) < _MAX_ANCESTORS:
        found[above] = None
        above = parents.get(above, "")
    return list(found)


def _chain_ends_at_root(span: RequestSpan, parents: dict[str, str]) -> bool:
    above = _ancestors(span.span_id, parents)
    top = above[-1] if above else span.span_id
    return parents.get(top) == ""


def _inner(spans: Sequence[RequestSpan], name: str) -> int | None:
    values = map(attrgetter(name), spans)
    return next((value for value in values if value is not None), None)


def _outermost(spans: Sequence[RequestSpan], name: str, _: type[_Known]) -> _Known | None:
    values = map(attrgetter(name), reversed(spans))
    return next((value for value in values if value is not None), None)


def _first(texts: Iterator[str]) -> str:
    return next((text for text in texts if text), "")


def _tpot(ttft_seconds: float | None, e2e_seconds: float | None, output_tokens: int | None) -> float | None:
    """Seconds per output token after the first."""
    if ttft_seconds is None or e2e_seconds is None or output_tokens is None or output_tokens < 2:
        return None
    return max(0.0, e2e_seconds - ttft_seconds) / (output_tokens - 1)
