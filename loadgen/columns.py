"""The request log as columns: one float array a figure, NaN where a request has none.

Grading, comparison and charts all take their figures from here, so that each has one definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import numpy.typing as npt

from loadgen.records import Outcome, RequestRecord
from slo.objective import Floats, RequestField

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]

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
    outcome: Texts
    worker: Texts
    reason: Texts
    """The router's branch; empty where no router says."""
    prediction_cause: Texts
    tenant: Texts
    group: Texts
    request_class: Texts

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> Columns:
        """The measured phase only: priming requests would mix warm-up into the figures (sglang#37359, LT22)."""
        rows = sorted((r for r in records if r.phase == "measured"), key=lambda r: (r.repeat, r.index))
        last_seen = _last_times(rows)
        return cls(
            repeat=np.array([r.repeat for r in rows], dtype=np.int64),
            index=np.array([r.index for r in rows], dtype=np.int64),
            scheduled=_floats(rows, lambda r: r.scheduled_s),
            end=_floats(rows, lambda r: r.end_s),
            ttft=_floats(rows, lambda r: r.ttft_s),
            wait=_floats(rows, lambda r: _waited(r, last_seen)),
            tpot=_floats(rows, lambda r: r.tpot_s),
            e2e=_floats(rows, lambda r: None if r.end_s is None else r.end_s - r.scheduled_s),
            lag=_floats(rows, lambda r: r.client_lag_s),
            decision_us=_floats(rows, lambda r: r.decision_us),
            prompt=_floats(rows, lambda r: r.planned_prompt_tokens if r.prompt_tokens is None else r.prompt_tokens),
            reported_prompt=_floats(rows, lambda r: r.prompt_tokens),
            planned_prompt=_floats(rows, lambda r: r.planned_prompt_tokens),
            cached=_floats(rows, lambda r: r.cached_tokens),
            predicted=_floats(rows, lambda r: r.predicted_tokens),
            shared=_floats(rows, lambda r: r.planned_shared_tokens),
            outcome=_texts(rows, lambda r: r.outcome.value),
            worker=_texts(rows, lambda r: r.worker),
            reason=_texts(rows, lambda r: r.reason),
            prediction_cause=_texts(rows, lambda r: r.prediction_cause),
            tenant=_texts(rows, lambda r: r.tenant),
            group=_texts(rows, lambda r: r.group),
            request_class=_texts(rows, lambda r: r.request_class),
        )

    def __len__(self) -> int:
        return len(self.repeat)

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

    def unexplained(self, block_size: int) -> Bools:
        """Requests that reused over a block more than their namespace had ever sent: somebody else's cache entries."""
        return np.asarray(self.cached > self.shared + block_size, dtype=np.bool_)


def _last_times(rows: Sequence[RequestRecord]) -> dict[int, float]:
    """The latest time seen in each repeat: how long a request that has no end must have waited at least."""
    last: dict[int, float] = {}
    for row in rows:
        seen = max(t for t in (row.scheduled_s, row.sent_s, row.first_token_s, row.end_s) if t is not None)
        last[row.repeat] = max(last.get(row.repeat, seen), seen)
    return last


def _waited(record: RequestRecord, last_seen: dict[int, float]) -> float | None:
    if record.first_token_s is None and record.outcome in (Outcome.TIMED_OUT, Outcome.CUT_OFF):
        return (last_seen[record.repeat] if record.end_s is None else record.end_s) - record.scheduled_s
    return record.ttft_s


def _floats(rows: Sequence[RequestRecord], figure: Callable[[RequestRecord], float | None]) -> Floats:
    return np.array([nan if (value := figure(row)) is None else value for row in rows], dtype=np.float64)


def _texts(rows: Sequence[RequestRecord], text: Callable[[RequestRecord], str]) -> Texts:
    values = np.empty(len(rows), dtype=object)
    values[:] = [text(row) for row in rows]
    return values
