"""Faults of a fleet in the field: the right alert is sent at the right severity, and no other.

The small form of `benchmarks.field_alerts`, which has every fault and 200 workers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.field_alerts import EXPECTED, Alertmanager, Sent, field_of, fired, sent
from benchmarks.field_faults import FAULTS
from prefixwatch.alerts.catalogue.model import load_catalogue
from tests.alerts.promtools import promtools

WORKERS = 16
SOME = ("none", "hot-prefix", "cache-too-small", "metrics-page-broken", "preemptions")

pytestmark = [pytest.mark.prometheus, pytest.mark.alertmanager, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sent]:
    return asyncio.run(_outcomes(tmp_path_factory.mktemp("field")))


async def _outcomes(folder: Path) -> dict[str, Sent]:
    fields = {name: field_of(name, WORKERS) for name in SOME}
    found = await asyncio.to_thread(fired, fields, folder, next(iter(promtools().values()), "promtool"))
    async with Alertmanager(folder) as address:
        return {name: await sent(name, fields[name], found[name], address) for name in SOME}


@pytest.mark.parametrize("name", SOME)
def test_the_right_alert_is_sent_and_no_other(outcomes: dict[str, Sent], name: str) -> None:
    assert outcomes[name].severities == EXPECTED[name]


def test_a_symptom_of_the_fleet_is_silenced_by_its_cause(outcomes: dict[str, Sent]) -> None:
    assert outcomes["cache-too-small"].silenced == {"PrefixBlocksNearCapacity", "PrefixHitRateLow"}


def test_every_fault_has_its_alerts_and_their_own_severity() -> None:
    catalogue = load_catalogue()

    assert set(EXPECTED) == set(FAULTS)
    for alerts in EXPECTED.values():
        assert alerts == {name: catalogue.alert(name).severity for name in alerts}
