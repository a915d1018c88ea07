"""An objective on single requests: its conditions, and the share of requests that must meet them.

Values only: built by `slo.build`, judged here, used by load-test grading, by counters and by rules alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from prefixwatch.slo.selection import ALL_REQUESTS, RequestFacts, Selection

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class RequestField(StrEnum):
    """A metric of one request that a condition can test."""

    TTFT_SECONDS = "ttft_seconds"
    """Time to first token, from the scheduled time."""
    TPOT_SECONDS = "tpot_seconds"
    """Time per output token after the first; undefined below two tokens."""
    E2E_SECONDS = "e2e_seconds"
    """Scheduled time to end of the answer."""
    COMPLETED = "completed"
    """1 for a whole answer; 0 for refused, failed, timed out and cut off."""
    HIT_RATIO = "hit_ratio"
    """Prompt tokens that the engine reports as reused / prompt tokens; unknown where it reports nothing."""


_OPERATORS = {"lte": np.less_equal, "lt": np.less, "gte": np.greater_equal, "gt": np.greater}
SIGNS = {"lte": "≤", "lt": "<", "gte": "≥", "gt": ">"}


@dataclass(frozen=True, slots=True)
class Condition:
    """One test of one request: `field op value`, the operator spelled as OpenSLO does (lte, lt, gte, gt)."""

    field: RequestField
    op: str
    value: float

    def judge(self, values: Floats, completed: Bools) -> Floats:
        """1 where it holds, 0 where it doesn't, NaN where it doesn't apply.

        `values` is NaN where a request has no such metric. A request that did not complete is then bad; a completed one
        (no TTFT because the answer wasn't streamed, no TPOT because it has one token) is left out.
        """
        known = ~np.isnan(values)
        verdict = np.where(completed, np.nan, 0.0)
        verdict[known] = _OPERATORS[self.op](values[known], self.value)
        return verdict

    def verdict(self, value: float | None, completed: bool) -> bool | None:
        """`judge` of one request; None where it doesn't apply."""
        if value is None:
            return None if completed else False
        return bool(_OPERATORS[self.op](value, self.value))

    def __str__(self) -> str:
        if self.field is RequestField.COMPLETED:
            return "completed"
        if self.field is RequestField.HIT_RATIO:
            return f"hit tokens {SIGNS[self.op]} {self.value:.0%} of the prompt"
        name, _, unit = self.field.rpartition("_")
        return f"{name.upper()} {SIGNS[self.op]} {self.value:g} {'s' if unit == 'seconds' else unit}"


@dataclass(frozen=True, slots=True)
class Objective:
    """A share `target` of the requests of these classes must meet every condition."""

    name: str
    title: str
    service: str
    target: float
    conditions: tuple[Condition, ...]
    request_classes: tuple[str, ...] = ("*",)
    """Shell-style patterns on the request class; a request is graded when any matches."""
    selection: Selection = ALL_REQUESTS
    """Further conditions on which requests are graded."""

    def covers(self, request_class: str) -> bool:
        return any(fnmatchcase(request_class, pattern) for pattern in self.request_classes)

    def selects(self, facts: RequestFacts) -> bool:
        """Whether a request is graded: its class, and all of `selection`."""
        return self.covers(facts.request_class) and self.selection.covers(facts)

    def verdict(self, figures: Mapping[RequestField, float | None]) -> bool | None:
        """`judge` of one request: good, bad, or None when no condition applies.

        `figures` needs every field that the conditions name, and `completed`.
        """
        completed = figures[RequestField.COMPLETED] == 1.0
        verdicts = [c.verdict(figures.get(c.field), completed) for c in self.conditions]
        if False in verdicts:
            return False
        return True if True in verdicts else None

    def judge(self, columns: Mapping[RequestField, Floats]) -> Floats:
        """Per request: 1 good, 0 bad, NaN not applicable (no condition applies). Class selection is the caller's.

        `columns` needs every field that the conditions name, and `completed`.
        """
        completed = columns[RequestField.COMPLETED] == 1.0
        verdicts = np.array([c.judge(columns[c.field], completed) for c in self.conditions])
        bad = (verdicts == 0.0).any(axis=0)
        unknown = np.isnan(verdicts).all(axis=0)
        return np.where(bad, 0.0, np.where(unknown, np.nan, 1.0))

    def thresholds(self, field: RequestField) -> list[float]:
        """The thresholds that this objective has for `field`."""
        return [c.value for c in self.conditions if c.field is field]

    @property
    def rule(self) -> str:
        """The objective in words: `95 % of requests: TTFT ≤ 0.5 s`."""
        return f"{self.target * 100:g} % of requests{self.selection}: {' and '.join(map(str, self.conditions))}"
