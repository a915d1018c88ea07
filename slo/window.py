"""Lengths of time as OpenSLO and Prometheus write them, and the period an error budget belongs to."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

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


MONTHS: Mapping[str, int] = {"M": 1, "Q": 3, "Y": 12}
LAST_CHANGE_YEAR = 2037
"""Up to and with this year a zone's changes to and from summer time are known and written into rules."""


@dataclass(frozen=True, slots=True)
class CalendarPeriod:
    """Periods that follow each other on the calendar of a place: so many days, or so many months, each.

    Local times are seconds since 1970-01-01 00:00 as the place's clock shows them.
    """

    days: int
    """Length; 0 where it is counted in months."""
    months: int
    start_local_seconds: int
    """A moment at which one of the periods began."""
    offset_seconds: int = 0
    """Local time less UTC, before the first change."""
    changes: tuple[tuple[int, int], ...] = ()
    """Unix seconds of each change, and by how many seconds the local clock is put forward."""

    @property
    def is_utc(self) -> bool:
        return self.offset_seconds == 0 and not self.changes

    @property
    def longest_seconds(self) -> int:
        """No period is longer, the hour won in autumn included."""
        days = self.days or {1: 31, 2: 62, 3: 92, 6: 184, 12: 366}.get(self.months, 31 * self.months)
        return days * 86_400 + (3600 if self.changes else 0)


def zone_offsets(zone: tzinfo) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Local time less UTC in seconds at the start of 2024, and the changes since, as `CalendarPeriod` has them."""
    last = int(datetime(LAST_CHANGE_YEAR + 1, 1, 1, tzinfo=UTC).timestamp())
    moment = int(datetime(2024, 1, 1, tzinfo=UTC).timestamp())
    first = offset = _offset(zone, moment)
    changes = []
    while moment < last:
        after = moment + 86_400
        if _offset(zone, after) != offset:
            at = bisect.bisect_left(range(moment, after), True, key=lambda t: _offset(zone, t) != offset) + moment
            changes.append((at, _offset(zone, after) - offset))
            offset = _offset(zone, after)
        moment = after
    return first, tuple(changes)


def _offset(zone: tzinfo, moment: int) -> int:
    offset = datetime.fromtimestamp(moment, zone).utcoffset()
    return round(offset.total_seconds()) if offset is not None else 0
