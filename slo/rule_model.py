"""An SLO as recording rules need it: the series that count its events, its window and its target.

Built by `slo.build` from OpenSLO documents, ours or others'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixwatch.slo.promql import Selector
from prefixwatch.slo.window import CalendarPeriod

Method = Literal["occurrences", "timeslices", "ratio_timeslices"]

MINIMUM_EVENTS = 100
"""Fewer events than this in a long window don't page: one slow request an hour isn't an outage (SL03)."""
MINIMUM_BAD_EVENTS = 5
MINIMUM_SLICES = 6
MINIMUM_BAD_SLICES = 2
"""The same for time slices, of which an hour has 12 of 5 minutes."""


@dataclass(frozen=True, slots=True)
class RatioIndicator:
    """Counters of events; exactly one of `good` and `bad` is given."""

    total: Selector
    good: Selector | None = None
    bad: Selector | None = None

    @property
    def metric(self) -> Selector:
        """The series whose absence leaves the SLO unmeasured."""
        return self.total


@dataclass(frozen=True, slots=True)
class HistogramIndicator:
    """Observations of a histogram, good up to `bound` (or above it, when `above`); `bound` is a bucket bound."""

    histogram: Selector
    bound: float
    above: bool = False

    @property
    def metric(self) -> Selector:
        return Selector(f"{self.histogram.metric}_count", self.histogram.matchers)


@dataclass(frozen=True, slots=True)
class ValueIndicator:
    """A value that each time slice compares: good while `query op value`."""

    query: str
    op: Literal["<=", "<", ">=", ">"]
    value: float


Indicator = RatioIndicator | HistogramIndicator | ValueIndicator


@dataclass(frozen=True, slots=True)
class Slices:
    """Time slices: each is an event, good if its share of good events reaches `target`."""

    seconds: int
    target: float


@dataclass(frozen=True, slots=True)
class BurnCondition:
    """A burn-rate condition that an AlertCondition asks for."""

    factor: float
    long_seconds: int
    severity: Literal["page", "ticket"]
    hold_seconds: int
    place: str
    """`file:line` of the condition, for messages."""


@dataclass(frozen=True, slots=True)
class SloDefinition:
    """One objective of one SLO."""

    name: str
    title: str
    service: str
    description: str
    target: float
    rule: str
    """The objective in words."""
    window_seconds: int
    """The budget's period; a calendar month as 30 days, a quarter as 91, a year as 365."""
    indicator: Indicator
    method: Method = "occurrences"
    slices: Slices | None = None
    calendar: CalendarPeriod | None = None
    """None for a rolling window."""
    conditions: tuple[BurnCondition, ...] = ()
    """Empty: the burn rates of the SRE workbook."""
    minimum_events: float = MINIMUM_EVENTS
    minimum_bad_events: float = MINIMUM_BAD_EVENTS
    zero_tolerance: bool = False
    severity_max: Literal["page", "ticket"] = "page"
    """`ticket`: nobody is woken, however fast the budget burns."""
    absent_alert: bool = True
    switch: str = "see the runbook"
    unknown_while: tuple[str, ...] = ()
    place: str = ""
    """`file:line` of the objective, for messages."""
    notes: tuple[str, ...] = ()
    """What is interpreted differently from what the document says."""

    @property
    def budget(self) -> float:
        """The share of events that may be bad."""
        return round(1 - self.target, 12)
