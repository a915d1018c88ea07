"""`prefixwatch diagnose`: run the runbooks' steps, rank the causes, say what to do."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from runbooks.diagnosis import Diagnosis, Verdict, diagnose, observe
from runbooks.evidence import Evidence, PrometheusEvidence, ask_all, new_session, watch_exporter
from runbooks.page import GROUPS, Runbooks, seconds_of, shipped_runbooks
from stack.access import Access, check_address
from stack.diagnosis_report import as_document, as_markdown, print_report
from stack.errors import UsageError

EXIT_CODES: Mapping[Verdict, int] = {"nothing wrong": 0, "cause found": 1, "inconclusive": 3}


@dataclass(frozen=True, slots=True)
class DiagnoseOptions:
    """The command line of `prefixwatch diagnose`."""

    alert: str | None = None
    prometheus: str | None = None
    exporter: str | None = None
    window: str = "5m"
    seconds: float = 10.0
    """How long the exporter is watched, where there is no Prometheus."""
    access: Access = field(default_factory=Access)


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis and where it comes from."""

    diagnosis: Diagnosis
    source: str
    firing: Sequence[str]
    """Alerts that fire now; empty without a Prometheus."""
    warning: str = ""
    """Why the answers may be thin."""
    asked_at: str = ""
    """In UTC, to the second: a ticket is read hours later."""


def run_diagnose(options: DiagnoseOptions, console: Console, *, markdown: bool, as_json: bool) -> tuple[Any, int]:
    """Prints the report unless JSON is wanted; answers the document and the exit code. Raises one of INPUT_ERRORS."""
    runbooks = shipped_runbooks()
    check_alert(options.alert, runbooks)
    if (options.prometheus is None) == (options.exporter is None):
        raise UsageError("give one of --prometheus URL and --exporter URL to ask")
    if markdown and as_json:
        raise UsageError("give one of --markdown and --json")
    check_address("--prometheus", options.prometheus)
    check_address("--exporter", options.exporter)
    check_window(options.window)
    with console.status("asking …"):
        finding = asyncio.run(find(options, runbooks))
    document = as_document(finding.diagnosis, finding.source, options.alert, finding.firing)
    document["asked_at"] = finding.asked_at
    if finding.warning:
        document["warning"] = finding.warning
    if markdown:
        source = f"{finding.source}, asked at {finding.asked_at}"
        print(as_markdown(finding.diagnosis, source, options.alert, finding.firing))
    elif not as_json:
        print_report(finding.diagnosis, finding.source, options.alert, finding.firing, console)
    if finding.warning:
        console.print(f"[yellow]note:[/yellow] {finding.warning}", highlight=False)
    return document, EXIT_CODES[finding.diagnosis.verdict]


def check_alert(alert: str | None, runbooks: Runbooks) -> None:
    """Raises UsageError for an alert without a page, naming the nearest ones."""
    if alert is None or alert in runbooks.pages:
        return
    by_lower = {name.lower(): name for name in runbooks.pages}
    near = [by_lower[name] for name in difflib.get_close_matches(alert.lower(), by_lower, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(runbooks.pages))}"
    raise UsageError(f"no runbook for an alert '{alert}': {hint}")


def check_window(window: str) -> None:
    """Raises UsageError for what isn't a range."""
    try:
        seconds_of(window)
    except ValueError as error:
        raise UsageError(f"--window: {error}") from error


async def find(options: DiagnoseOptions, runbooks: Runbooks) -> Finding:
    """Ask every step of every page, in the order of a diagnosis. Raises EvidenceError."""
    async with new_session(options.access.headers, options.access.tls) as session:
        firing: list[str] = []
        warning = ""
        if options.prometheus is not None:
            prometheus = PrometheusEvidence(options.prometheus, session)
            firing = sorted({labels["alertname"] for labels in await prometheus.firing_alerts()})
            warning = _thin(options.window, await prometheus.scrape_interval_seconds())
            evidence: Evidence = prometheus
        else:
            evidence = await watch_exporter(options.exporter or "", session, seconds=options.seconds)
        steps = list(runbooks.steps.values())
        answers = await ask_all(steps, evidence, options.window)
    observations = [
        observe(step, runbooks.group_of(step.id), answer) for step, answer in zip(steps, answers, strict=True)
    ]
    observations.sort(key=lambda o: GROUPS.index(o.group))
    asked_at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Finding(diagnose(observations, runbooks, options.alert), evidence.describe, firing, warning, asked_at)


def _thin(window: str, interval_seconds: float | None) -> str:
    """A range needs four scrapes, for some get lost (SL07, SL08)."""
    if interval_seconds is None or seconds_of(window) >= 4 * interval_seconds:
        return ""
    return (
        f"--window {window} holds fewer than 4 scrapes of {interval_seconds:g} s: give --window "
        f"{4 * interval_seconds:.0f}s or more, and set Grafana's timeInterval to {interval_seconds:g}s"
    )
