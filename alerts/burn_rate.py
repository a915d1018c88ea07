"""Burn rates and windows of an SLO's alerts, from the table of Google's SRE workbook, chapter 5.

A burn rate says how many times the even rate the error budget is spent at; 14.4 for one hour spends 2 % of the budget
of 30 days. Windows are scaled to the SLO's own period; rates are not, as they are relative to the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from prefixwatch.alerts.catalogue.model import Severity
from prefixwatch.documents.durations import promql
from prefixwatch.documents.errors import InputError
from prefixwatch.slo.rule_model import BurnCondition, SloDefinition

BASE_SECONDS = 300
"""Windows are whole multiples of this: events are recorded in pieces of it."""

WORKBOOK_PERIOD_SECONDS = 30 * 86_400
WORKBOOK: tuple[tuple[float, int, Severity], ...] = (
    (14.4, 3600, "page"),
    (6.0, 6 * 3600, "page"),
    (3.0, 86_400, "ticket"),
    (1.0, 3 * 86_400, "ticket"),
)
"""Burn rate, long window in seconds for a period of 30 days, severity. The short window is a twelfth of the long."""

SHORT_PER_LONG = 12
LONG_AT_LEAST_BASES = 3
MOST_BAD = 0.8
"""An alert that needs a larger share of bad events than this is replaced: it would miss all but a full outage."""

HOLD: Mapping[Severity, str] = {"page": "2m", "ticket": "15m"}


@dataclass(frozen=True, slots=True)
class BurnRate:
    """One alert: both windows must burn at `factor` or more."""

    factor: float
    long_seconds: int
    short_seconds: int
    severity: Severity
    hold: str
    note: str = ""
    """What was changed of the workbook's row, and why."""

    def line(self, budget: float) -> float:
        """The share of bad events that it fires above."""
        return self.factor * budget


def burn_rates(slo: SloDefinition) -> list[BurnRate]:
    """The SLO's burn-rate alerts: its own conditions, or the workbook's. Raises InputError for one that can't fire."""
    base = slo.slices.seconds if slo.slices else BASE_SECONDS
    if slo.conditions:
        return [_own(slo, condition, base) for condition in slo.conditions]
    return list(_without_covered(_scaled(slo, base)))


def _own(slo: SloDefinition, condition: BurnCondition, base: int) -> BurnRate:
    line = condition.factor * slo.budget
    if line >= 1:
        raise InputError(
            f"{condition.place}: a burn rate of {condition.factor:g} can't happen to {slo.name}: "
            f"{condition.factor:g} × {slo.budget * 100:g} % = {line * 100:g} % of the events would have to be bad; "
            f"use one below {1 / slo.budget:g}"
        )
    if condition.long_seconds < LONG_AT_LEAST_BASES * base:
        raise InputError(
            f"{condition.place}: a lookback of {promql(condition.long_seconds)} is too short for {slo.name}: events "
            f"are recorded in pieces of {promql(base)}, use {promql(LONG_AT_LEAST_BASES * base)} or more"
        )
    long = _multiple(condition.long_seconds, base)
    hold = promql(condition.hold_seconds) if condition.hold_seconds else HOLD[condition.severity]
    return BurnRate(condition.factor, long, _short(long, base), condition.severity, hold)


def _scaled(slo: SloDefinition, base: int) -> Iterable[BurnRate]:
    for factor, workbook_long, severity in WORKBOOK:
        wanted = workbook_long * slo.window_seconds / WORKBOOK_PERIOD_SECONDS
        used, notes = factor, []
        if factor * slo.budget >= 1:
            used = round(MOST_BAD / slo.budget, 2)
            wanted *= factor / used
            budget = f"{slo.budget * 100:g} %"
            notes.append(
                f"{slo.name}: burn rate {factor:g} × budget {budget} = {factor * slo.budget * 100:g} % bad events "
                f"can't happen: replaced by {used:g} × {budget} = {used * slo.budget * 100:.0f} %, over a window that "
                "spends as much of the budget"
            )
        long = max(_multiple(wanted, base), LONG_AT_LEAST_BASES * base)
        if long > wanted + base:
            notes.append(
                f"{slo.name}: a window of {promql(round(wanted))} is too short to count events in pieces of "
                f"{promql(base)}: replaced by {promql(long)}"
            )
        yield BurnRate(used, long, _short(long, base), severity, HOLD[severity], "\n".join(notes))


def _without_covered(rates: Iterable[BurnRate]) -> Iterable[BurnRate]:
    """Of several alerts with one severity and the same windows, only the most sensitive says anything."""
    kept: dict[tuple[str, int], BurnRate] = {}
    for rate in rates:
        key = (rate.severity, rate.long_seconds)
        other = kept.get(key, rate)
        note = "\n".join(dict.fromkeys(filter(None, (other.note, rate.note))))
        kept[key] = replace(min(rate, other, key=lambda one: one.factor), note=note)
    return kept.values()


def _short(long_seconds: int, base: int) -> int:
    return max(_multiple(long_seconds / SHORT_PER_LONG, base), base)


def _multiple(length_seconds: float, base: int) -> int:
    return math.ceil(round(length_seconds / base, 6)) * base
