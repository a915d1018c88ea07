"""When a calendar period began, in PromQL, against Python's own calendar: zones, summer time, leap years, quarters."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import yaml

from prefixwatch.alerts.calendar_records import PERIOD_START, period_start_rules
from prefixwatch.slo.window import CalendarPeriod, zone_offsets
from tests.alerts.promtools import ends

pytestmark = pytest.mark.prometheus

PROMTOOLS = ends() or {"none": "promtool"}
BASE = 300

PERIODS = [
    # zone, start, days, months
    ("UTC", "2026-01-01T00:00", 0, 1),
    ("UTC", "2020-02-28T06:30", 0, 1),
    ("UTC", "2024-01-01T00:00", 0, 12),
    ("UTC", "2026-01-07T00:00", 7, 0),
    ("America/New_York", "2022-01-01T12:00", 7, 0),
    ("America/New_York", "2024-01-01T00:00", 1, 0),
    ("America/New_York", "2026-01-01T00:00", 0, 1),
    ("Europe/Berlin", "2026-01-01T00:00", 0, 3),
    ("Europe/Berlin", "2030-11-21T12:30", 0, 2),
    ("Australia/Lord_Howe", "2026-07-01T00:00", 0, 12),
    ("Asia/Kolkata", "2026-04-01T00:00", 0, 12),
]
MOMENTS = [
    *("2026-01-01T00:04", "2026-01-01T00:05", "2026-03-08T08:00", "2026-03-29T02:30", "2026-03-31T23:59"),
    *("2026-04-01T00:05", "2026-07-01T03:00", "2026-10-25T01:30", "2026-11-01T05:30", "2026-11-01T12:00"),
    *("2026-12-31T23:00", "2028-02-29T12:00", "2028-03-01T00:10", "2031-06-30T22:30", "2037-12-31T12:00"),
]


def began(zone: ZoneInfo, start: datetime, days: int, months: int, moment: datetime) -> float:
    """By stepping from period to period on the wall clock."""
    wall = moment.astimezone(zone).replace(tzinfo=None)
    while start > wall:
        start = _step(start, -days, -months)
    while (after := _step(start, days, months)) <= wall:
        start = after
    return start.replace(tzinfo=zone).timestamp()


def _step(start: datetime, days: int, months: int) -> datetime:
    month = start.year * 12 + start.month - 1 + months
    return start.replace(year=month // 12, month=month % 12 + 1) + timedelta(days=days)


def rules(period: CalendarPeriod, slo: str, moment: float) -> list[dict[str, object]]:
    """The rules as they are recorded at a moment."""
    return [
        {"record": name, "expr": expr.replace("time()", f"{moment:.0f}"), "labels": {"slo": slo}}
        for name, expr in period_start_rules(period, BASE, f'{{slo="{slo}"}}')
    ]


@pytest.mark.parametrize("promtool", PROMTOOLS.values(), ids=PROMTOOLS)
def test_a_period_begins_when_the_places_own_calendar_says(promtool: str, tmp_path: Path) -> None:
    """OpenSLO's own examples are of America/New_York."""
    groups, wanted = [], []
    for number, (name, start, days, months) in enumerate(PERIODS):
        zone, first = ZoneInfo(name), datetime.fromisoformat(start)
        period = CalendarPeriod(days, months, int(first.replace(tzinfo=UTC).timestamp()), *zone_offsets(zone))
        for text in MOMENTS:
            moment, slo = datetime.fromisoformat(text).replace(tzinfo=UTC), f"{number} {name} {text}"
            groups.append({"name": slo, "rules": rules(period, slo, moment.timestamp())})
            value = began(zone, first, days, months, moment - timedelta(seconds=BASE))
            wanted.append({"labels": f'{PERIOD_START}{{slo="{slo}"}}', "value": value})
    asked = {"expr": PERIOD_START, "eval_time": "0m", "exp_samples": wanted}
    case = {"interval": "1m", "input_series": [], "promql_expr_test": [asked]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [case]}))

    command = [promtool, "test", "rules", "tests.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert len(wanted) == len(PERIODS) * len(MOMENTS)


def test_a_zone_without_summer_time_is_one_offset() -> None:
    assert zone_offsets(ZoneInfo("Asia/Kolkata")) == (19_800, ())


def test_the_changes_of_a_zone_are_exact() -> None:
    """Berlin put its clocks forward on 2026-03-29 at 01:00 UTC, and back on 2026-10-25 at 01:00 UTC."""
    offset, changes = zone_offsets(ZoneInfo("Europe/Berlin"))

    assert offset == 3600
    assert [at for at in changes if 1_767_225_600 <= at[0] < 1_798_761_600] == [
        (1_774_746_000, 3600),
        (1_792_890_000, -3600),
    ]
    assert len(changes) == 28
