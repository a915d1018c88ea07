"""The diagnosis on a fleet in the field: the right cause and no other for every fault, and none in a healthy hour.

The small form of `benchmarks.field_faults`, which has 200 workers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.field_faults import FAULTS, drill, healthy_hour, passed

WORKERS = 24

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_named_first_and_no_other(name: str, tmp_path: Path) -> None:
    diagnosis = asyncio.run(drill(name, WORKERS, tmp_path))

    assert passed(name, diagnosis), [each.id for each in (*diagnosis.causes, *diagnosis.possible)]


def test_an_hour_of_a_healthy_fleet_accuses_nobody(tmp_path: Path) -> None:
    hour = asyncio.run(healthy_hour(WORKERS, tmp_path))

    assert {diagnosis.verdict for diagnosis in hour} == {"nothing wrong"}
    assert [each.id for diagnosis in hour for each in diagnosis.causes] == []
