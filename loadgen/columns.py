"""The request log as columns: one float array a figure, NaN where a request has none.

Grading, comparison and charts all take their figures from here, so that each has one definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import nan
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from loadgen.plan import COOL_DOWN, MEASURED, WARM_UP
from loadgen.records import Outcome, RequestRecord, table_of
from slo.objective import Floats, RequestField
from slo.selection import RequestFacts

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]

RequestLog: TypeAlias = pa.Table | Iterable[RequestRecord]
"""A request log, as it lies in requests.parquet or as records."""

HIT, PARTIAL, MISS = "hit", "partial", "miss"
CACHE_CLASSES = (HIT, PARTIAL, MISS)


@dataclass(frozen=True, slots=True)
class Columns:
    """One policy's measured requests, in order of repeat and plan position; times in seconds, lengths in tokens."""

    repeat: Ints
    index: Ints
    scheduled: Floats
    end: Floats
    ttft: Floats
    """First token after the scheduled time; NaN without a first token."""
    wait: Floats
    """The TTFT or, for one that timed out or was cut off before its first token, how long it had waited: a lower
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
    group: Texts
    request_class: Texts
    turn: Ints
    """Position in its session, from 0."""
    gaps_ms: Floats
    """Gaps between reads that brought content, of all requests, one after the other."""
    gap_is_token: Bools
    """Of each gap: its answer came token by token (as many reads as tokens), so that the gap is one token's latency.
    Where a read holds several tokens the gap is a chunk's, and no inter-token latency can be told from it."""
    gap_counts: Ints
    """How many gaps each request has."""
    trimmed: Mapping[str, frozenset[tuple[int, int]]]
    """(repeat, index) of the requests that aren't among these, by phase: `warm_up`, `cool_down`."""

    @classmethod
    def of(cls, log: RequestLog) -> Columns:
        """The measured phase only: priming and warm-up requests would mix into the figures (sglang#37359, LT22)."""
        table = log if isinstance(log, pa.Table) else table_of(log)
        trimmed = {phase: _keys(table.filter(pc.equal(table["phase"], phase))) for phase in (WARM_UP, COOL_DOWN)}
        table = table.filter(pc.equal(table["phase"], MEASURED))
        table = table.take(pc.sort_indices(table, [("repeat", "ascending"), ("index", "ascending")]))
        repeat, scheduled = _ints(table, "repeat"), _floats(table, "scheduled_s")
        sent, first, end = (_floats(table, name) for name in ("sent_s", "first_token_s", "end_s"))
        reported, planned = _floats(table, "prompt_tokens"), _floats(table, "planned_prompt_tokens")
        outcome = _texts(table, "outcome")
        gaps = _Gaps.of(table)
        tokens = _floats(table, "output_tokens")
        return cls(
            repeat=repeat,
            index=_ints(table, "index"),
            scheduled=scheduled,
            end=end,
            ttft=first - scheduled,
            wait=_waits(outcome, scheduled, first, end, last=_last_times(repeat, sent, first, end)),
            tpot=_tpot(tokens, gaps, first, end),
            e2e=end - scheduled,
            lag=sent - scheduled,
            output=tokens,
            decision_us=_floats(table, "decision_us"),
            prompt=np.where(np.isnan(reported), planned, reported),
            reported_prompt=reported,
            planned_prompt=planned,
            cached=_floats(table, "cached_tokens"),
            predicted=_floats(table, "predicted_tokens"),
            shared=_floats(table, "planned_shared_tokens"),
            template=np.nan_to_num(_floats(table, "planned_template_tokens")),
            outcome=outcome,
            worker=_texts(table, "worker"),
            reason=_texts(table, "reason"),
            prediction_cause=_texts(table, "prediction_cause"),
            tenant=_texts(table, "tenant"),
            group=_texts(table, "group"),
            request_class=_texts(table, "request_class"),
            turn=_ints(table, "turn"),
            gaps_ms=gaps.values_ms,
            gap_is_token=(gaps.counts + 1 == tokens)[gaps.rows],
            gap_counts=gaps.counts.astype(np.int64),
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
            if each.name != "trimmed"
        }
        return Columns(**chosen, trimmed={})

    @property
    def completed(self) -> Bools:
        return np.asarray(self.outcome == Outcome.COMPLETED.value, dtype=np.bool_)

    def request_fields(self) -> dict[RequestField, Floats]:
        """The figures that objectives test. A wait without a first token is no TTFT, and bad whatever its threshold."""
        return {
            RequestField.TTFT_SECONDS: self.ttft,
            RequestField.TPOT_SECONDS: self.tpot,
            RequestField.E2E_SECONDS: np.where(self.completed, self.e2e, nan),
            RequestField.COMPLETED: self.completed.astype(np.float64),
            RequestField.HIT_RATIO: self.cached / np.maximum(self.prompt, 1),
        }

    def reusable(self, block_size: int) -> Floats:
        """Tokens in full blocks that a perfect cache could have reused; an engine always computes the last token."""
        return np.floor(np.minimum(self.shared, self.prompt - 1) / block_size) * block_size

    def cache_class(self, block_size: int) -> Texts:
        """`hit`: every reusable block was reused; `partial`: some; `miss`: none. Empty when the engine doesn't say."""
        known = ~np.isnan(self.cached)
        classes = np.full(len(self), "", dtype=object)
        classes[known & (self.cached <= 0)] = MISS
        reused = known & (self.cached > 0)
        classes[reused & (self.cached < self.reusable(block_size))] = PARTIAL
        classes[reused & (self.cached >= self.reusable(block_size))] = HIT
        return classes

    def facts(self, block_size: int = DEFAULT_BLOCK_SIZE) -> Iterator[RequestFacts]:
        """What objectives select requests by, request by request."""
        classes = self.cache_class(block_size)
        for k in range(len(self)):
            yield RequestFacts(
                request_class=str(self.request_class[k]),
                tenant=str(self.tenant[k]),
                prompt_tokens=None if np.isnan(self.prompt[k]) else float(self.prompt[k]),
                cache=str(classes[k]) or None,
                turn="later" if self.turn[k] else "first",
            )

    def unexplained(self, block_size: int) -> Bools:
        """Requests that reused over a block more than their namespace had ever sent: somebody else's cache entries.

        What the chat template puts in front of every prompt is nobody's, and lies in caches from runs before.
        """
        return np.asarray(self.cached > np.maximum(self.shared, self.template) + block_size, dtype=np.bool_)


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
    lost = np.isnan(first) & ((outcome == Outcome.TIMED_OUT.value) | (outcome == Outcome.CUT_OFF.value))
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
