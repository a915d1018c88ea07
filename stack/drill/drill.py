"""A drill: a fault in a small stack, the alerts that come of it, and what the diagnosis says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from prefixwatch.alerts.alertmanager import configuration
from prefixwatch.alerts.build import build, rendered
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.runbooks.diagnosis import Diagnosis
from prefixwatch.runbooks.page import Runbooks, shipped_runbooks
from prefixwatch.slo.build import load_request_objectives, load_slos
from prefixwatch.slo.read import shipped_names
from prefixwatch.slo.rule_model import HistogramIndicator
from prefixwatch.stack.diagnose.command import DiagnoseOptions, find
from prefixwatch.stack.drill.faults import Fault
from prefixwatch.stack.drill.stack import DrillStack, Notice, drill_stack
from prefixwatch.stack.local.traffic import Sender

HASTEN = 60.0
"""How many times as fast the rules' clock runs: a minute of a rule is a second of the drill."""
FAULT_SECONDS = 60.0
"""How long the right alert is waited for."""
SETTLE_SECONDS = 8.0
"""How long is waited for wrong ones after it; the exporter is watched meanwhile."""
DIAGNOSIS_WINDOW = "20s"
_WHY = "the speed of the drill's own machine is not a finding"
_ON_ANY_MACHINE = {
    "RouterDecisionSlow": {"threshold": 5, "minimum": 100, "for": "10m", "why": _WHY},
    "PrefixTreeWalkSlow": {"threshold": 5, "minimum": 100, "for": "10m", "why": _WHY},
    "PrefillWaitLong": {"threshold": 120, "minimum": 20, "for": "5m", "why": _WHY},
    "ColdPrefillSlow": {"threshold": 100, "minimum": 20, "for": "15m", "why": _WHY},
    "CacheHitsNotFaster": {"threshold": -5, "minimum": 20, "for": "15m", "why": _WHY},
    "RequestsRefused": {"threshold": 0.05, "minimum": 50, "for": "5m", "why": "five minutes are five seconds here"},
    "RequestsFailing": {"threshold": 0.05, "minimum": 50, "for": "5m", "why": "five minutes are five seconds here"},
}
"""Thresholds on plain times, out of the reach of a slow or crowded machine: no fault of a drill is about them."""
_SPEED_PAGES = frozenset({"RouterDecisionSlow", "PrefixTreeWalkSlow"})
"""Pages whose questions a slow machine answers badly, whatever the fault."""


@dataclass(frozen=True, slots=True)
class DrillResult:
    """What a drill showed."""

    name: str
    fault: Fault
    notices: Sequence[Notice]
    """What reached the webhook."""
    begun_seconds: float
    """When the fault was made, on the notices' clock."""
    firing: Sequence[str]
    """Alerts that fired at the end, those that are silenced by a cause included."""
    diagnosis: Diagnosis
    without_prometheus: Diagnosis
    """From the exporter alone, watched for `SETTLE_SECONDS` before."""
    statuses: Mapping[str, int]
    """HTTP statuses that clients saw."""

    @property
    def notified(self) -> dict[str, float]:
        """The alerts that reached the webhook, and how many seconds after the fault each first did."""
        first: dict[str, float] = {}
        for notice in self.notices:
            first.setdefault(notice.alert, round(notice.at_seconds - self.begun_seconds, 1))
        return first

    @property
    def wrong_alerts(self) -> list[str]:
        """Notifications that are neither right for the fault nor a known symptom of it.

        Objectives on times aren't counted: whether 0.5 s is kept is a matter of the machine.
        """
        told = {notice.alert for notice in self.notices if notice.labels.get("slo") not in timed_objectives()}
        return sorted(told - self.fault.alerts - self.fault.symptoms)

    @property
    def missed_alerts(self) -> list[str]:
        return sorted(self.fault.alerts - set(self.notified))

    @property
    def named(self) -> str | None:
        """The cause that the diagnosis names."""
        return self.diagnosis.found.id if self.diagnosis.found else None

    @property
    def unsure(self) -> bool:
        """Whether there is a sign of a cause, or a bad reading that none explains, where nothing is wrong.

        Causes without any sign that the drill's stack has no series for (probes, prices, GPUs) don't count: the table
        names them.
        """
        return self.fault.cause is None and bool(self.diagnosis.possible or self.diagnosis.unexplained)

    @property
    def passed(self) -> bool:
        right = self.named == self.fault.cause and not self.unsure
        return right and not self.wrong_alerts and not self.missed_alerts


@cache
def timed_objectives() -> frozenset[str]:
    """Names of the shipped objectives that compare seconds."""
    requests = load_request_objectives(shipped_names())
    per_request = {o.name for o in requests if any(c.field.endswith("_seconds") for c in o.conditions)}
    histograms = {
        slo.name
        for slo in load_slos(shipped_names())
        if isinstance(slo.indicator, HistogramIndicator) and slo.indicator.histogram.metric.endswith("_seconds")
    }
    return frozenset(per_request | histograms)


def drill_runbooks() -> Runbooks:
    """The shipped pages and causes without those that would find the drill's own machine slow."""
    shipped = shipped_runbooks()
    pages = {name: page for name, page in shipped.pages.items() if name not in _SPEED_PAGES}
    asked = replace(shipped, pages=pages).steps
    return replace(shipped, pages=pages, causes={n: c for n, c in shipped.causes.items() if set(c.steps) <= set(asked)})


async def run_drill(name: str, fault: Fault, folder: Path) -> DrillResult:
    """Start the stack, warm it, make the fault, wait for its alerts, diagnose. Raises InputError."""
    rules, alertmanager = write_rules(folder)
    traffic = replace(fault.traffic)  # the fault may change it
    async with drill_stack(fault.settings, rules, alertmanager, folder) as stack:
        sender = Sender(stack.router_url, traffic)
        sending = asyncio.create_task(sender.run())
        try:
            begun = time.monotonic()
            if fault.inject is not None:
                await asyncio.sleep(fault.warm_seconds)
                begun = time.monotonic()
                await fault.inject(stack, traffic)
            await _wait_for(fault.alerts, stack, begun + FAULT_SECONDS)
            runbooks = drill_runbooks()
            alone = await find(DiagnoseOptions(exporter=stack.exporter_url, seconds=SETTLE_SECONDS), runbooks)
            finding = await find(DiagnoseOptions(prometheus=stack.prometheus_url, window=DIAGNOSIS_WINDOW), runbooks)
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
    return DrillResult(
        name,
        fault,
        tuple(stack.notices),
        begun,
        finding.firing,
        finding.diagnosis,
        alone.diagnosis,
        dict(sender.statuses),
    )


def write_rules(folder: Path) -> tuple[Path, Path]:
    """The shipped rules on the drill's clock, in a folder, and the shipped Alertmanager configuration.

    Without the alerts on objectives that nothing measures: a drill has no probes for a cold-prefill baseline. And with
    room for every plain time, as all processes share a few cores.
    """
    rules = folder / "rules"
    rules.mkdir(parents=True, exist_ok=True)
    thresholds = folder / "thresholds.yaml"
    thresholds.write_text(yaml.safe_dump(_ON_ANY_MACHINE), encoding="utf-8")
    settings = RuleSettings(speedup=HASTEN, scrape_interval_seconds=1.0, absent_alerts=False, thresholds=thresholds)
    for name, text in rendered(build(settings=settings)).items():
        (rules / name).write_text(text, encoding="utf-8")
    alertmanager = folder / "alertmanager-shipped.yml"
    alertmanager.write_text(configuration(settings.catalogue(), settings), encoding="utf-8")
    return rules, alertmanager


async def _wait_for(alerts: frozenset[str], stack: DrillStack, deadline: float) -> None:
    """Until all of these have come, or time is up; with none to wait for, a while in which wrong ones would come."""
    if not alerts:
        deadline = min(deadline, time.monotonic() + FAULT_SECONDS / 2)
    while time.monotonic() < deadline:
        if alerts and alerts <= {notice.alert for notice in stack.notices}:
            return
        await asyncio.sleep(0.25)
