"""Lengths of time as OpenSLO and Prometheus write them, and the period an error budget belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NOMINAL = {**_UNITS, "M": 30 * 86_400, "Q": 91 * 86_400, "Y": 365 * 86_400}
"""Months, quarters and years differ in length; burn rates are scaled to these."""
_DURATION = re.compile(r"(\d+)([smhdwMQY])")


def seconds(duration: str) -> int:
    """`30d` → 2,592,000; months, quarters and years at 30, 91 and 365 days."""
    return sum(int(count) * _NOMINAL[unit] for count, unit in _DURATION.findall(duration))


def promql(length_seconds: float) -> str:
    """The shortest way Prometheus writes it, exact to the second: 5400 → `1h30m`."""
    left, parts = round(length_seconds), []
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, _UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


CalendarUnit = Literal["d", "w", "M", "Y"]
CALENDAR_UNITS: tuple[CalendarUnit, ...] = ("d", "w", "M", "Y")


@dataclass(frozen=True, slots=True)
class CalendarPeriod:
    """A period that starts anew with the calendar, in UTC."""

    unit: CalendarUnit
    count: int
    start_unix_seconds: int
    """A moment at which one of the periods began."""
