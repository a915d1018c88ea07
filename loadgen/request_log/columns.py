"""The request log as columns: one float array a figure, NaN where a request has none.

Grading, comparison and charts all take their figures from here, so that each has one definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import nan
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefixwatch.kvcache.cache_class import UNKNOWN, cache_classes, reusable_parts
from prefixwatch.loadgen.plan.request import BLOCK_CLASSES, COOL_DOWN, MEASURED, WARM_UP
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, block_size_of, table_of
from prefixwatch.slo.objective import Floats, RequestField
from prefixwatch.slo.selection import RequestFacts

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]

RequestLog: TypeAlias = pa.Table | Iterable[RequestRecord]
"""A request log, as it lies in requests.parquet or as records."""

_STILL_WAITING = tuple(outcome.value for outcome in (Outcome.TIMED_OUT, Outcome.CANCELLED, Outcome.NEVER_SENT))


@dataclass(frozen=True, slots=True)
class Columns:
    """One policy's measured requests, in order of repeat and plan position; times in seconds, lengths in tokens."""

    repeat: Ints
    index: Ints
    scheduled: Floats
    end: Floats
    ttft: Floats
    """First token after the scheduled time; NaN without a first token."""
    first_answer: Floats
    """First token of the answer proper, after any reasoning; NaN where none came."""
    wait: Floats
    """The TTFT or, for one that timed out or was still waiting when the run ended, how long it had waited: a lower
    bound, so that a slow policy doesn't look faster for those it lost (vllm#28493). NaN for one refused or failed."""
    tpot: Floats
    e2e: Floats
    lag: Floats
    """Sent after the scheduled time."""
    output: Floats
    """Output tokens as reported."""
    decision_us: Floats
    prompt: Floats
    """Prompt tokens as reported, as planned where nothing is reported."""
    reported_prompt: Floats
    planned_prompt: Floats
    cached: Floats
    predicted: Floats
    """Hit tokens that the router expected."""
    shared: Floats
    """Prompt tokens that the plan had sent before in the same namespace."""
    template: Floats
    """Prompt tokens at the head that are the chat template's own."""
    outcome: Texts
    worker: Texts
    reason: Texts
    """The router's branch; empty where no router says."""
    prediction_cause: Texts
    tenant: Texts
    session: Texts
    user: Texts
    group: Texts
    request_class: Texts
    turn: Ints
    """Position in its session, from 0."""
    retries: Floats
    """How often the router tried another worker; NaN in a log that doesn't know."""
    part_tokens: Ints
    """Planned prompt tokens by request and block class, in the order of `BLOCK_CLASSES`; no column at all for a log
    that doesn't know them."""
    part_hit_tokens: Ints
    """Those of them that were reused: reuse is a prompt's head, so they are the parts that it covers."""
    gaps_ms: Floats
    """Gaps between reads that brought content, of all requests, one after the other."""
    gap_is_token: Bools
    """Of each gap: its answer came token by token (as many reads as tokens), so that the gap is one token's latency.
    Where a read holds several tokens, the gap is a chunk's and gives no inter-token latency."""
    gap_counts: Ints
    """How many gaps each request has."""
    block_size: int
    """Tokens per KV block of the engines."""
    trimmed: Mapping[str, frozenset[tuple[int, int]]]
    """(repeat, index) of the requests that aren't among these, by phase: `warm_up`, `cool_down`."""

    @classmethod
    def of(cls, log: RequestLog, block_size: int | None = None) -> Columns:
        """The measured phase only: priming and warm-up requests would mix into the figures (sglang#37359, LT22).

        `block_size` is that of the engines; by default the one that the log was written with.
        """
        table = log if isinstance(log, pa.Table) else table_of(log)
        trimmed = {phase: _keys(table.filter(pc.equal(table["phase"], phase))) for phase in (WARM_UP, COOL_DOWN)}
        table = measured_rows(table)
        repeat, scheduled = _ints(table, "repeat"), _floats(table, "scheduled_s")
        sent, first, end = (_floats(table, name) for name in ("sent_s", "first_token_s", "end_s"))
        reported, planned = _floats(table, "prompt_tokens"), _floats(table, "planned_prompt_tokens")
        outcome = _texts(table, "outcome")
        gaps = _Gaps.of(table)
        tokens = _floats(table, "output_tokens")
        cached = _floats(table, "cached_tokens")
        part_tokens, part_hit_tokens = _parts(table, np.nan_to_num(cached))
        return cls(
            repeat=repeat,
            index=_ints(table, "index"),
            scheduled=scheduled,
            end=end,
            ttft=first - scheduled,
            first_answer=_floats(table, "first_answer_s") - scheduled,
            wait=_waits(outcome, scheduled, first, end, last=_last_times(repeat, sent, first, end)),
            tpot=_tpot(tokens, gaps, first, end),
            e2e=end - scheduled,
            lag=sent - scheduled,
            output=tokens,
            decision_us=_floats(table, "decision_us"),
            prompt=np.where(np.isnan(reported), planned, reported),
            reported_prompt=reported,
            planned_prompt=planned,
            cached=cached,
            predicted=_floats(table, "predicted_tokens"),
            shared=_floats(table, "planned_shared_tokens"),
            template=np.nan_to_num(_floats(table, "planned_template_tokens")),
            outcome=outcome,
            worker=_texts(table, "worker"),
            reason=_texts(table, "reason"),
            prediction_cause=_texts(table, "prediction_cause"),
            tenant=_texts(table, "tenant"),
            session=_texts(table, "session"),
            user=_texts(table, "user"),
            group=_texts(table, "group"),
            request_class=_texts(table, "request_class"),
            turn=_ints(table, "turn"),
            retries=_floats(table, "retries"),
            part_tokens=part_tokens,
            part_hit_tokens=part_hit_tokens,
            gaps_ms=gaps.values_ms,
            gap_is_token=(gaps.counts + 1 == tokens)[gaps.rows],
            gap_counts=gaps.counts.astype(np.int64),
            block_size=block_size or block_size_of(table),
            trimmed=trimmed,
        )

    def __len__(self) -> int:
        return len(self.repeat)

    def where(self, rows: Bools) -> Columns:
        """These rows alone, as if nothing else had been sent."""
        per_gap = np.repeat(rows, self.gap_counts)
        chosen: dict[str, Any] = {
            each.name: getattr(self, each.name)[per_gap if each.name in ("gaps_ms", "gap_is_token") else rows]
            for each in fields(self)
            if each.name not in ("block_size", "trimmed")
        }
        return Columns(**chosen, block_size=self.block_size, trimmed={})

    def without_plan(self) -> Columns:
        """The same requests when nothing is known of what their prompts share, and only answers report lengths."""
        return replace(self, shared=np.full(len(self), nan), planned_prompt=self.prompt)

    @property
    def completed(self) -> Bools:
        return np.asarray(self.outcome == Outcome.COMPLETED.value, dtype=np.bool_)

    def request_fields(self) -> dict[RequestField, Floats]:
        """The figures that objectives test. A wait without a first token isn't a TTFT, and is always bad."""
        return {
            RequestField.TTFT_SECONDS: self.ttft,
            RequestField.TPOT_SECONDS: self.tpot,
            RequestField.E2E_SECONDS: np.where(self.completed, self.e2e, nan),
            RequestField.COMPLETED: self.completed.astype(np.float64),
            RequestField.HIT_RATIO: self.cached / np.maximum(self.prompt, 1),
        }

    def reusable(self) -> Floats:
        """Tokens in full blocks that a perfect cache could have reused, according to the plan."""
        return reusable_parts(self.shared, self.prompt, self.block_size)

    def cache_class(self) -> Texts:
        """`hit`, `partial`, `miss` or `unknown`, measured against what the plan had sent before."""
        return self._cache_classes()[0]

    def cache_basis(self) -> Texts:
        """What each class is measured against: `reusable` or `whole_prompt`; empty for an unknown class."""
        return self._cache_classes()[1]

    def _cache_classes(self) -> tuple[Texts, Texts]:
        return cache_classes(self.prompt, self.cached, self.block_size, self.shared)

    def facts(self) -> Iterator[RequestFacts]:
        """What objectives select requests by, request by request."""
        classes = self.cache_class()
        for k in range(len(self)):
            yield RequestFacts(
                request_class=str(self.request_class[k]),
                tenant=str(self.tenant[k]),
                prompt_tokens=None if np.isnan(self.prompt[k]) else float(self.prompt[k]),
                cache=None if classes[k] == UNKNOWN else str(classes[k]),
                turn="later" if self.turn[k] else "first",
            )


def measured_rows(table: pa.Table) -> pa.Table:
    """The rows of the measured phase, in order of repeat and plan."""
    table = table.filter(pc.equal(table["phase"], MEASURED))
    return table.take(pc.sort_indices(table, [("repeat", "ascending"), ("index", "ascending")]))


def _keys(table: pa.Table) -> frozenset[tuple[int, int]]:
    return frozenset(zip(_ints(table, "repeat").tolist(), _ints(table, "index").tolist(), strict=True))


def _last_times(repeat: Ints, *times: Floats) -> Floats:
    """For each request the latest thing that happened in its repeat: one that has no end waited until then."""
    latest = np.fmax.reduce(times)
    numbers, place = np.unique(repeat, return_inverse=True)
    last = np.full(len(numbers), -np.inf)
    np.fmax.at(last, place, latest)
    return np.asarray(last[place], dtype=np.float64)


def _waits(outcome: Texts, scheduled: Floats, first: Floats, end: Floats, *, last: Floats) -> Floats:
    """From the schedule to the first token, or for one lost before it to when that was given up. One that came due
    only after its run was stopped has waited for nothing."""
    lost = np.isnan(first) & np.isin(outcome.astype(str), _STILL_WAITING)
    waits = np.where(lost, np.where(np.isnan(end), last, end), first) - scheduled
    return np.where(lost & (waits < 0), np.nan, waits)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """`chunk_gaps_ms` of all rows laid out flat: each gap with the row it belongs to, and how many each row has."""

    values_ms: Floats
    rows: Ints
    counts: Floats

    @classmethod
    def of(cls, table: pa.Table) -> _Gaps:
        lists = table["chunk_gaps_ms"].combine_chunks()
        rows = np.asarray(pc.list_parent_indices(lists).to_numpy(zero_copy_only=False), dtype=np.int64)
        values = np.asarray(pc.list_flatten(lists).to_numpy(zero_copy_only=False), dtype=np.float64)
        return cls(values, rows, np.bincount(rows, minlength=len(table)).astype(np.float64))


def _parts(table: pa.Table, cached: Floats) -> tuple[Ints, Ints]:
    """Tokens, and reused tokens, by request and block class."""
    none = np.zeros((len(table), 0), dtype=np.int64)
    if "planned_part_tokens" not in table.column_names:
        return none, none
    lists = table["planned_part_tokens"].combine_chunks()
    rows = np.asarray(pc.list_parent_indices(lists).to_numpy(zero_copy_only=False), dtype=np.int64)
    if not len(rows):
        return none, none
    tokens = np.asarray(pc.list_flatten(lists).to_numpy(zero_copy_only=False), dtype=np.int64)
    names = pc.list_flatten(table["planned_part_classes"].combine_chunks())
    classes = np.asarray(pc.index_in(names, pa.array(BLOCK_CLASSES)).to_numpy(zero_copy_only=False), dtype=np.int64)
    ends = np.cumsum(tokens)
    starts = ends - tokens
    first = np.searchsorted(rows, rows)  # of each part, the first part of its prompt
    reused = np.clip(cached[rows] - (starts - starts[first]), 0, tokens).astype(np.int64)
    shape = (len(table), len(BLOCK_CLASSES))
    cells = rows * shape[1] + classes
    sums = (np.bincount(cells, values, shape[0] * shape[1]).astype(np.int64) for values in (tokens, reused))
    planned, hits = (each.reshape(shape) for each in sums)
    return planned, hits


def _tpot(tokens: Floats, gaps: _Gaps, first: Floats, end: Floats) -> Floats:
    """As `RequestRecord.tpot_s`."""
    told = np.bincount(gaps.rows, gaps.values_ms, len(tokens)) / 1e3
    seconds = np.where(gaps.counts > 0, told, end - first)
    known = (tokens >= 2) & ~np.isnan(first) & ~np.isnan(end)
    return np.where(known, seconds / np.where(known, tokens - 1, 1.0), nan)


def _ints(table: pa.Table, name: str) -> Ints:
    return np.asarray(table[name].to_numpy(), dtype=np.int64)


def _floats(table: pa.Table, name: str) -> Floats:
    """NaN where there is none, and everywhere in a log that is too old to have the column."""
    if name not in table.column_names:
        return np.full(len(table), nan)
    return np.asarray(pc.cast(table[name], pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _texts(table: pa.Table, name: str) -> Texts:
    """Equal texts are one object: a million labels cost a million references, not as many strings."""
    if name not in table.column_names:
        return np.full(len(table), "", dtype=object)
    encoded = table[name].combine_chunks().dictionary_encode()
    if not len(encoded.dictionary):
        return np.full(len(table), "", dtype=object)
    return np.asarray(encoded.dictionary.to_numpy(zero_copy_only=False)[encoded.indices.to_numpy()], dtype=object)
