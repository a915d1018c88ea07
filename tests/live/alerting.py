"""The shipped rules and runbooks over a live test's exporter: which alerts fire, and what the diagnosis reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from prefixwatch.alerts.build import build, rendered
from prefixwatch.alerts.prometheus import new_session
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.runbooks.diagnosis import Diagnosis
from prefixwatch.runbooks.evidence import PrometheusEvidence
from prefixwatch.runbooks.page import shipped_runbooks
from prefixwatch.stack.diagnose.command import DiagnoseOptions, find
from prefixwatch.stack.local.monitoring import prometheus_command, prometheus_config

SPEED = 60
"""A minute of a rule is a second of the test."""
WINDOW = "20s"
PATIENCE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Alerting:
    """A Prometheus that judges the exporter's page by the shipped rules."""

    url: str

    async def firing(self) -> set[str]:
        async with new_session() as session:
            return {labels["alertname"] for labels in await PrometheusEvidence(self.url, session).firing_alerts()}

    async def fires(self, alert: str) -> bool:
        """Whether this alert fires before the test's patience ends."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while alert not in await self.firing():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.5)
        return True

    async def diagnosis(self, alert: str, awaited: Mapping[str, str]) -> Diagnosis:
        """What `prefixwatch diagnose ALERT --prometheus` finds, asked until these steps read so or patience ends."""
        options = DiagnoseOptions(alert=alert, prometheus=self.url, window=WINDOW)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = (await find(options, shipped_runbooks())).diagnosis
            if time.monotonic() > deadline or all(reading(found, step) == state for step, state in awaited.items()):
                return found
            await asyncio.sleep(0.5)


def reading(diagnosis: Diagnosis, step: str) -> str:
    """How a step of a runbook reads: bad, warn, ok or unknown."""
    return next(one.state for one in diagnosis.observations if one.step.id == step)


@asynccontextmanager
async def alerting(exporter: str, folder: Path) -> AsyncIterator[Alerting]:
    """A Prometheus on a fast clock, with its files in this folder."""
    rules = folder / "rules"
    rules.mkdir()
    settings = RuleSettings(speedup=SPEED, scrape_interval_seconds=1.0, absent_alerts=False)
    for name, text in rendered(build(settings=settings)).items():
        (rules / name).write_text(text)
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(prometheus_config(urlsplit(exporter).netloc, "1s", rules=rules))
    )
    address = f"127.0.0.1:{free_port()}"
    process = ManagedProcess("prometheus", prometheus_command("prometheus", folder, address), folder / "prometheus.log")
    try:
        await process.wait_ready(f"http://{address}/-/ready", PATIENCE_SECONDS)
        yield Alerting(f"http://{address}")
    finally:
        process.kill()
