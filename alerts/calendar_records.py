"""PromQL that knows when a calendar period began, at the place whose calendar it is.

Prometheus' clock is UTC. A place's offset is a step function of time, its changes to and from summer time written out;
on the local clock days, weeks and months are arithmetic. Each step is a recording rule, so that none is long.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date

from prefixwatch.slo.window import CalendarPeriod

PERIOD_START = "prefixwatch:slo_period_start:timestamp_seconds"
"""When the present period began, in Unix seconds."""
CLOCK = "prefixwatch:slo_period_clock:timestamp_seconds"
"""The local clock at the newest piece."""
FIRST_MONTH = "prefixwatch:slo_period_first_month:months"
"""The period's first month, in months since the year 0."""
LOCAL_START = "prefixwatch:slo_period_start_local:timestamp_seconds"
"""When the present period began, by the local clock."""
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()


def period_start_rules(period: CalendarPeriod, behind_seconds: int, matcher: str) -> Iterable[tuple[str, str]]:
    """Names and expressions, in order; the last is `PERIOD_START`. `matcher` picks the SLO's own series.

    A piece of `behind_seconds` belongs to the period in which it begins, so a new period begins to count when its first
    piece is whole.
    """
    now = f"(time() - {behind_seconds})"
    if not period.is_utc:
        yield CLOCK, f"vector({now} + {_offset(period, now)})"
        now = f"scalar({CLOCK}{matcher})"
    local = LOCAL_START if not period.is_utc else PERIOD_START
    if period.days:
        length = period.days * 86_400
        yield local, f"vector({now} - ({now} - {period.start_local_seconds % length}) % {length})"
    else:
        yield from _months(period, now, matcher, local)
    if not period.is_utc:
        yield PERIOD_START, _to_utc(period, f"{LOCAL_START}{matcher}")


def _months(period: CalendarPeriod, now: str, matcher: str, local: str) -> Iterable[tuple[str, str]]:
    """On a clock that is put back by the day and time at which periods start, they start with the 1st at 00:00."""
    shift, first_month = _shift_and_month(period)
    moved = f"({now} - {shift})" if shift else now
    back = f" + {shift}" if shift else ""
    if period.months == 1:
        midnight = f"vector({moved} - {moved} % 86400)"
        yield local, f"{midnight} - (day_of_month(vector({moved})) - 1) * 86400{back}"
        return
    month = f"(12 * year(vector({moved})) + month(vector({moved})) - 1)"
    yield FIRST_MONTH, f"{month} - ({month} - {first_month % period.months}) % {period.months}"
    yield local, f"({_days_until(f'{FIRST_MONTH}{matcher}')}) * 86400{back}"


def _shift_and_month(period: CalendarPeriod) -> tuple[int, int]:
    """Seconds from the 1st at 00:00 to the start of a period in its month, and that month since the year 0."""
    days, seconds = divmod(period.start_local_seconds, 86_400)
    civil = date.fromordinal(_EPOCH_ORDINAL + days)
    return (civil.day - 1) * 86_400 + seconds, 12 * civil.year + civil.month - 1


def _days_until(month: str) -> str:
    """Days from 1970-01-01 to the 1st of a month: years from March on, so that February's end is the year's.

    https://howardhinnant.github.io/date_algorithms.html#days_from_civil
    """
    year = f"floor(({month} - 2) / 12)"
    leap_days = f"floor({year} / 4) - floor({year} / 100) + floor({year} / 400)"
    return f"365 * {year} + {leap_days} + floor((153 * (({month} - 2) % 12) + 2) / 5) - 719468"


def _offset(period: CalendarPeriod, moment: str) -> str:
    steps = [f"{by} * ({moment} >= bool {at})" for at, by in period.changes]
    return " + ".join([str(period.offset_seconds), *steps]).replace("+ -", "- ")


def _to_utc(period: CalendarPeriod, local: str) -> str:
    """Less the offset that holds at that local time."""
    offset, parts = period.offset_seconds, [f"{local} - {period.offset_seconds}"]
    for at, by in period.changes:
        parts.append(f"{by} * ({local} >= bool {at + offset})")
        offset += by
    return " - ".join(parts).replace("- -", "+ ")
