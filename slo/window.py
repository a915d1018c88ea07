"""The period of an error budget, on the calendar of a time zone."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

MONTHS: Mapping[str, int] = {"M": 1, "Q": 3, "Y": 12}
LAST_CHANGE_YEAR = 2037
"""The last year whose changes to and from summer time are written into rules."""


@dataclass(frozen=True, slots=True)
class CalendarPeriod:
    """Consecutive periods on the calendar of a time zone, each a number of days or of months.

    Local times are seconds since 1970-01-01 00:00 as the place's clock shows them.
    """

    days: int
    """Length; 0 where it is counted in months."""
    months: int
    start_local_seconds: int
    """The start of any one of the periods."""
    offset_seconds: int = 0
    """Local time less UTC, before the first change."""
    changes: tuple[tuple[int, int], ...] = ()
    """Unix seconds of each change, and by how many seconds the local clock is put forward."""

    @property
    def is_utc(self) -> bool:
        return self.offset_seconds == 0 and not self.changes

    @property
    def longest_seconds(self) -> int:
        """The longest possible period, including the extra hour in autumn."""
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
